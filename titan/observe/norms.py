"""Gradient and weight norms of each block, which show where training goes wrong.

A block is a layer ("layers.3") or a module outside the layers ("tok_embeddings", "output"). Norms
cover the shards of FSDP and tensor parallelism and all pipeline stages, so every layout gives the
numbers of one process. Each rank sums the squares of its shards, and one all-reduce for each kind
of sharding adds them up. Gradients are measured before clipping.

There are no ratios of update to weight: they need a copy of all weights. `lr` in metrics.jsonl and
Adam's bounded steps nearly determine them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.async_scalars import AsyncScalars
from titan.optim.clipping import local_gradients, local_sum_of_squares, sharding_groups
from titan.parallel.init_weights import canonical_name


def block_name(parameter: str) -> str:
    """Return the block of a parameter.

    It is "layers.3" for "layers.3.attention.wq.weight", and "output" for "output.weight".
    """
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


class LayerNorms:
    """Norms of the blocks of a model. All ranks call all methods.

    Args:
        parts: the whole model, or this rank's pipeline stages.
        stages: the pipeline's process group, if there is one.
    """

    def __init__(self, parts: Sequence[nn.Module], *, stages: dist.ProcessGroup | None) -> None:
        self.stages = stages
        self.parameters = [
            (block_name(canonical_name(name)), parameter)
            for part in parts
            for name, parameter in part.named_parameters()
        ]
        # In the order of the model, each block once.
        names = list(dict.fromkeys(name for name, _ in self.parameters))
        if stages is not None:  # every rank needs the same order for the all-reduce
            by_stage: list[list[str]] = [[]] * dist.get_world_size(stages)
            dist.all_gather_object(by_stage, names, group=stages)
            names = sorted({name for stage in by_stage for name in stage}, key=_order)
        self.names = names

    @torch.no_grad()
    def measure(self) -> AsyncScalars:
        """Start to read the norms. Call it between the backward pass and clipping.

        Returns:
            Norms of gradients, then of weights, in the order of `names`.
        """
        index = {name: number for number, name in enumerate(self.names)}
        # Parameters that are sharded over the same groups share their all-reduces. The inner keys are
        # (0 for a gradient or 1 for a weight, block).
        locals_by_groups: dict[Any, dict[tuple[int, int], list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        device = torch.device("cpu")
        for name, parameter in self.parameters:
            if not parameter.requires_grad:
                continue
            # All ranks take part in the all-reduces below, with a gradient or without.
            of_groups = locals_by_groups[sharding_groups(parameter)]
            of_groups[0, index[name]] += local_gradients([parameter])
            weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            of_groups[1, index[name]].append(weight)
            device = weight.device
        total = torch.zeros(2, len(self.names), device=device)
        for groups, tensors in locals_by_groups.items():
            # One row for gradients and one for weights, so that both share an all-reduce.
            squares = torch.zeros_like(total)
            for at, parts in tensors.items():
                squares[at] = local_sum_of_squares(parts, device=device)
            for group in groups:
                dist.all_reduce(squares, group=group)
            total += squares
        if self.stages is not None:
            dist.all_reduce(total, group=self.stages)
        return AsyncScalars([total.sqrt()])

    def row(self, scalars: AsyncScalars) -> dict[str, dict[str, float]]:
        """Return `grad_norm` and `weight_norm` by block."""
        values, n = scalars.values(), len(self.names)
        return {
            "grad_norm": dict(zip(self.names, values[:n], strict=True)),
            "weight_norm": dict(zip(self.names, values[n:], strict=True)),
        }


def _order(name: str) -> tuple[int, str]:
    """Return a sort key that is the same on every rank: layers by number, then the modules outside them."""
    number = name.removeprefix("layers.")
    return (int(number), "") if number.isdecimal() else (2**31, name)
