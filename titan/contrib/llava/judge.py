"""First row of a certificate of LLaVA: transformers' own LlavaForConditionalGeneration. Entry point `judge.llava` of `titan.extensions`.

B batch, S sequence, I pictures of a sequence, P patches, C channels of a patch, V vocabulary
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titan.config.schema import JobConfig
from titan.losses.loss import IGNORED
from titan.tasks.base import Microbatch

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
        report["missing_keys"] = [
            n for n in report["missing_keys"] if "post_layernorm" not in n
        ]
        if wrong := {what: names for what, names in report.items() if names}:
            raise ValueError(f"{wrong}")
        return model.eval()

    def compute(
        self, theirs: Any, batch: PictureBatch, local: Microbatch
    ) -> tuple[Tensor, Tensor]:
        # Every other sequence begins with one picture.
        patches, side = batch.images[::2, 0], theirs.config.vision_config.patch_size
        across = theirs.config.vision_config.image_size // side
        # (N, P, C) -> (N, 3, height, width)
        pixels = patches.view(-1, across, across, 3, side, side).permute(0, 3, 1, 4, 2, 5)
        pixels = pixels.flatten(4, 5).flatten(2, 3)
        logits_BSV = theirs(batch.tokens_BS, pixel_values=pixels, use_cache=False).logits
        loss = F.cross_entropy(
            logits_BSV.flatten(0, 1),
            batch.labels_BS.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        return logits_BSV, loss


judge = LlavaJudge()
