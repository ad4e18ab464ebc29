"""Gradient and weight norms of each block of a model, for looking at where training goes wrong; on request.

A block is a layer ("layers.3") or a module beside them ("tok_embeddings", "output"). Norms are global: over the shards of FSDP and
tensor parallelism and over pipeline stages, so that every layout gives the numbers of one process. Squares are summed where they lie
and added up by one all-reduce for each way in which parameters are sharded. Gradients are taken before they are clipped.

Update ratios are left out: they need a copy of all weights. `lr` in metrics.jsonl and Adam's bounded steps say much the same.
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
from titan.optim.clipping import local_gradient, local_sum_of_squares
from titan.parallel.init_weights import canonical_name


def block_name(parameter: str) -> str:
    """ "layers.3.attention.wq.weight" -> "layers.3"; "output.weight" -> "output"."""
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


class LayerNorms:
    """Norms of the blocks in `parts`, this rank's pipeline stages; `stages`: the pipeline's group. All ranks call everything."""

    def __init__(self, parts: Sequence[nn.Module], *, stages: dist.ProcessGroup | None) -> None:
        self.stages = stages
        self.parameters = [
            (block_name(canonical_name(name)), parameter)
            for part in parts
            for name, parameter in part.named_parameters()
        ]
        names = list(dict.fromkeys(name for name, _ in self.parameters))
        if stages is not None:
            by_stage: list[list[str]] = [[]] * dist.get_world_size(stages)
            dist.all_gather_object(by_stage, names, group=stages)
            names = sorted({name for stage in by_stage for name in stage}, key=_order)
        self.names = names

    @torch.no_grad()
    def measure(self) -> AsyncScalars:
        """Begin to read the norms: of gradients, then of weights, in the order of `names`. Called between backward pass and clipping."""
        place = {name: number for number, name in enumerate(self.names)}
        locals_by_groups: dict[Any, dict[tuple[int, int], list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        device = torch.device("cpu")
        for name, parameter in self.parameters:
            if parameter.grad is None:
                continue
            grad, groups = local_gradient(parameter)
            weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            locals_by_groups[groups][0, place[name]].append(grad)
            locals_by_groups[groups][1, place[name]].append(weight)
            device = grad.device
        total = torch.zeros(2, len(self.names), device=device)
        for groups, tensors in locals_by_groups.items():
            squares = torch.zeros_like(total)
            for at, parts in tensors.items():
                squares[at] = local_sum_of_squares(parts)
            for group in groups:
                dist.all_reduce(squares, group=group)
            total += squares
        if self.stages is not None:
            dist.all_reduce(total, group=self.stages)
        return AsyncScalars([total.sqrt()])

    def row(self, scalars: AsyncScalars) -> dict[str, dict[str, float]]:
        """`grad_norm` and `weight_norm` by block."""
        values, n = scalars.values(), len(self.names)
        return {
            "grad_norm": dict(zip(self.names, values[:n], strict=True)),
            "weight_norm": dict(zip(self.names, values[n:], strict=True)),
        }


def _order(name: str) -> tuple[int, str]:
    """The same on every rank: layers by number, then what lies beside them."""
    number = name.removeprefix("layers.")
    return (int(number), "") if number.isdecimal() else (2**31, name)
