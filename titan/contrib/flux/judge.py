"""First row of a certificate of Flux: diffusers' own FluxTransformer2DModel. Entry point `judge.flux` of `titan.extensions`.

B batch, S patches, T context positions, C channels, A axes of a position
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.config.schema import JobConfig
from titan.tasks.base import Microbatch

from .config import FluxConfig
from .flow_matching import FlowBatch


class FluxJudge:
    """Judge of flow matching."""

    name = "diffusers"

    def knows(self, config: JobConfig) -> bool:
        return isinstance(config.model.sizes, FluxConfig)

    def load(self, config: JobConfig, folder: Path) -> nn.Module:
        from diffusers import FluxTransformer2DModel

        kind: Any = FluxTransformer2DModel
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        if wrong := {what: names for what, names in report.items() if names}:
            raise ValueError(f"{wrong}")
        return model.eval()

    def compute(
        self, theirs: Any, batch: FlowBatch, local: Microbatch
    ) -> tuple[Tensor, Tensor]:
        expected_BSC = theirs(
            hidden_states=batch.patches_BSC.lerp(batch.noise_BSC, batch.time_B[:, None, None]),
            encoder_hidden_states=batch.context_BTC,
            pooled_projections=batch.pooled_BC,
            timestep=batch.time_B,
            guidance=local.inputs.get("guidance_B"),
            img_ids=batch.positions_BSA[0].float(),
            txt_ids=torch.zeros(batch.context_BTC.shape[1], 3),
        ).sample
        velocity_BSC = batch.noise_BSC - batch.patches_BSC
        return expected_BSC, F.mse_loss(expected_BSC, velocity_BSC, reduction="sum")


judge = FluxJudge()
