"""Tensor parallelism: each matrix is split over a mesh axis, and so is the sequence between the matrices.

Megatron's pattern (arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198), on DTensor. A plan beside the
model names a style for each module; nothing in the model changes. With S the sequence and tp ranks:

    style            weight        input -> output of the module, local shapes
    vocab_embedding  rows V/tp     (B, S) -> (B, S/tp, D): each rank looks up its rows, reduce-scatter
    sequence         whole         (B, S/tp, D) -> same: norms work on each rank's part of the sequence
    gather_sequence  none          first argument (B, S/tp, D) -> (B, S, D), all-gather; others are taken as they are
    columns          columns /tp   (B, S, D) -> (B, S, F/tp)
    kv_columns       columns /tp   as `columns`; whole where ranks outnumber key/value heads, and each rank keeps
                                   the one head that its query heads read
    rows             rows /tp      (B, S, F/tp) -> (B, S/tp, D), reduce-scatter
    head_norm        whole         (B, S, H/tp, K) -> same: norms within each rank's heads
    vocab_output     columns V/tp  (B, S/tp, D) -> (B, S, V/tp) for the vocabulary-parallel loss, or (B, S, V);
                                   -> (B, S, D) where the loss applies the weight
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .float8 import cast_before_gather, is_tensorwise, rows_style

SEQUENCE_DIM = 1


class GatherSequence(ParallelStyle):
    """The module's first argument is gathered over the sequence, in float8 where the layers that read it cast it anyway; a
    DTensor goes in, so that the gradients of its uses add up before the one reduce-scatter."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cast = cast_before_gather(module, device_mesh)

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (Shard(SEQUENCE_DIM),), run_check=False)
            if cast is not None:
                x = cast(x)
            return (x.redistribute(placements=(Replicate(),)), *args[1:])

        module.register_forward_pre_hook(gather)
        return module


class ReplicatedHeads(ParallelStyle):
    """A key or value projection with fewer heads than ranks: whole on each rank, which keeps one head of its output."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        head = device_mesh.get_local_rank() * self.num_heads // device_mesh.size()

        def replicate(_: str, child: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(child.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                child.register_parameter(name, nn.Parameter(whole))

        def keep_head(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            # Each rank's gradient reaches its own head only: what all ranks have is an unfinished sum.
            local = output.to_local(grad_placements=(Partial(),))
            return local.unflatten(-1, (self.num_heads, -1))[..., head, :]

        return distribute_module(module, device_mesh, replicate, _accept_replicated, keep_head)  # pyright: ignore


class GatherForLoss(ParallelStyle):
    """The output layer where the loss applies its weight: rows V/tp of it, and what goes in comes out gathered.

    Each rank's gradient is that of its part of the vocabulary: a part of a sum, reduced and scattered on the way back.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x: DTensor = args[0].redistribute(placements=(Replicate(),))
            return (x.to_local(grad_placements=(Partial(),)), *args[1:])

        weight = distribute_tensor(
            module.get_parameter("weight"), device_mesh, [Shard(0)], src_data_rank=None
        )
        module.register_parameter("weight", nn.Parameter(weight))
        module.register_forward_pre_hook(gather)
        return module


def _accept_replicated(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    x = args[0]
    return (
        x
        if isinstance(x, DTensor)
        else DTensor.from_local(x, mesh, (Replicate(),), run_check=False),
    )


def apply_tp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    num_kv_heads: int,
    loss_parallel: bool = True,
    output_in_loss: bool = False,
) -> None:
    """Split `model` in place over the one axis of `mesh`.

    plan: pattern of module names (`layers.*.attention.wq`) -> style, from the table above; the first pattern
    that matches counts. Modules that no pattern matches stay as they are. Patterns
    without a module are fine: a pipeline stage holds some of the model. loss_parallel: the output layer's
    logits stay split over the vocabulary. output_in_loss: the loss applies the output layer's weight. Shared parameters stay shared.

    The sequence must divide by the number of ranks, and so must query heads and what `columns` split; key/value heads must divide
    by it or it by them. Raises KeyError for an unknown style, and ValueError for numbers that do not divide (of the sequence: in
    the forward pass), or if the plan leaves out a module that has parameters to train: each rank would see its part of the
    sequence, and nobody would add their gradients up.
    """
    # The logits, a DTensor's local part, are a view; nobody writes to them.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    size = mesh.size()
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} key/value heads do not divide by {size} ranks, nor they by the heads"
        )
    kv_split = num_kv_heads % size == 0
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "vocab_embedding": lambda: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM)
        ),
        "sequence": SequenceParallel,
        "head_norm": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        "gather_sequence": GatherSequence,
        "columns": ColwiseParallel,
        "kv_columns": ColwiseParallel if kv_split else lambda: ReplicatedHeads(num_kv_heads),
        "rows": lambda: RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)),
        "vocab_output": GatherForLoss
        if output_in_loss
        else lambda: ColwiseParallel(
            input_layouts=Shard(SEQUENCE_DIM),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
        ),
    }
    if unknown := sorted(set(plan.values()) - styles.keys()):
        raise KeyError(f"unknown style {', '.join(unknown)}; there are {', '.join(styles)}")
    shared = _shared_parameters(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    for name, module in list(model.named_modules()):
        style = next((s for pattern, s in plan.items() if fnmatchcase(name, pattern)), None)
        if style == "columns" or (style == "kv_columns" and kv_split):
            _require_split(name, module, size)
        elif style == "vocab_embedding":
            module.register_forward_pre_hook(partial(_require_whole_parts, size=size))
        if style == "rows" and is_tensorwise(module):
            parallelize_module(module, mesh, rows_style(mesh, sequence_dim=SEQUENCE_DIM))
        elif style is not None:
            parallelize_module(module, mesh, styles[style]())
    for (first, first_name), *others in shared:
        for module, name in others:
            module.register_parameter(name, first._parameters[first_name])
    for name in frozen:  # torch's styles make parameters anew
        model.get_parameter(name).requires_grad_(False)
    if left := [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise ValueError(
            f"the plan of tensor parallelism has no style for {', '.join(left[:5])}{more}: name their modules, norms as 'sequence'"
        )


def _require_split(name: str, layer: nn.Module, size: int) -> None:
    columns = getattr(layer, "out_features", 0)
    if columns % size:
        raise ValueError(f"the {columns} outputs of {name} do not divide by {size} ranks")


def _require_whole_parts(_: nn.Module, args: tuple[Any, ...], *, size: int) -> None:
    length = args[0].shape[SEQUENCE_DIM]
    if length % size:
        raise ValueError(f"a sequence of {length} tokens does not divide by {size} ranks")


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter that has several places is registered."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]
