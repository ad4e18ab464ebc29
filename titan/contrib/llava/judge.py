"""First row of a certificate of LLaVA: transformers' own LlavaForConditionalGeneration. Entry point `judge.llava` of `titan.extensions`.

B batch, S sequence, I pictures of a sequence, P patches, C channels of a patch, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titan.config.schema import JobConfig
from titan.losses.loss import IGNORED
from titan.step.train_step import TrainStep

from .config import LlavaConfig
from .image_text import PictureBatch


class LlavaJudge:
    """Judge of pictures with text."""

    name = "transformers"

    def knows(self, config: JobConfig) -> bool:
        return isinstance(config.model.sizes, LlavaConfig)

    def load(self, config: JobConfig, folder: Path) -> nn.Module:
        from transformers import LlavaForConditionalGeneration

        kind: Any = LlavaForConditionalGeneration
        model, report = kind.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
        # CLIP's last norm is not read by LLaVA, and titan has none.
        model.model.vision_tower.post_layernorm = nn.Identity()
        missing = [name for name in report.pop("missing_keys") if "post_layernorm" not in name]
        if wrong := {what: names for what, names in report.items() if names}:
            raise ValueError(f"{wrong}")
        if missing:
            raise ValueError(f"missing_keys: {', '.join(missing)}")
        return model.eval()

    def pairs(
        self, step: TrainStep, theirs: Any
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        [model] = step.model_parts
        sizes: Any = step.config.model.sizes
        side, across = sizes.patch_size, sizes.image_size // sizes.patch_size
        for seed in (1, 2):
            batch = step.task.random_batch(seed)
            assert isinstance(batch, PictureBatch)
            local = step.to_local(batch)
            ours_BSV = model(local.input, **local.inputs)
            # Every other sequence begins with one picture.
            patches = batch.images[::2, 0].unflatten(1, (across, across))
            pixels = patches.unflatten(3, (3, side, side)).permute(0, 3, 1, 4, 2, 5)
            pixels = pixels.flatten(4, 5).flatten(2, 3)
            expected_BSV = theirs(batch.tokens_BS, pixel_values=pixels, use_cache=False).logits
            their_loss = F.cross_entropy(
                expected_BSV.flatten(0, 1),
                batch.labels_BS.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            loss = step.loss_sum(ours_BSV, local.targets)
            yield ours_BSV, expected_BSV, loss, their_loss


judge = LlavaJudge()
