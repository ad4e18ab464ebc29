"""Write gradient and weight norms of each block to layer_norms.jsonl, every 100 steps or every TITAN_NORMS_EVERY steps.

    {"step": 100, "grad_norm": {"tok_embeddings": 0.21, "layers.0": 0.34, ...}, "weight_norm": {...}}

A block is a layer or a module outside the layers. Its norm is of the whole model, however it is sharded, and gradients are those
before clipping. Jobs with optimizer.early_step_in_backward have none then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.optim.clipping import local_gradients, local_sum_of_squares, sharding_groups
from titan.parallel.init_weights import canonical_name
from titan.run.hook import Hook
from titan.run.progress import RunProgress

KINDS = ("grad_norm", "weight_norm")


class LayerNorms(Hook):
    """Measure between the backward pass and clipping, on all ranks, and write on rank 0."""

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.every = int(os.environ.get("TITAN_NORMS_EVERY", "100"))
        trainer.train_step.call_with_gradients(self.write)

    def write(self) -> None:
        trainer, step = self.trainer, self.trainer.train_step
        if trainer.step % self.every:
            return
        norms = block_norms(step.model_parts, stages=step.groups.stages)
        if trainer.rank == 0:
            with (trainer.run_dir / "layer_norms.jsonl").open("a") as file:
                print(json.dumps({"step": trainer.step, **norms}), file=file)


@torch.no_grad()
def block_norms(
    parts: Sequence[nn.Module], *, stages: dist.ProcessGroup | None
) -> dict[str, dict[str, float]]:
    """Return `KINDS` by block, the same on all ranks, which must call it together.

    Args:
        parts: the model, or this rank's pipeline stages.
        stages: the pipeline's process group, if there is one.
    """
    squares: dict[str, Tensor] = {}
    for name, parameter in (named for part in parts for named in part.named_parameters()):
        if not parameter.requires_grad:
            continue
        weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # A gradient may be missing here and not on another rank, as of experts without tokens.
        tensors = (local_gradients([parameter]), [weight])
        pair = torch.stack([local_sum_of_squares(t, device=weight.device) for t in tensors])
        for group in sharding_groups(parameter):
            dist.all_reduce(pair, group=group)
        first, *rest = canonical_name(name).split(".")
        block = f"{first}.{rest[0]}" if first == "layers" else first
        squares[block] = squares.get(block, 0) + pair
    found: list[Any] = [{block: pair.tolist() for block, pair in squares.items()}]
    if stages is not None:
        mine, found = found[0], [None] * dist.get_world_size(stages)
        dist.all_gather_object(found, mine, group=stages)
    norms: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for of_stage in found:
        for block, pair in of_stage.items():
            for kind, square in zip(KINDS, pair, strict=True):
                norms[kind][block] = square**0.5
    return norms
