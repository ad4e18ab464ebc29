"""Data parallelism: FSDP2 (ZeRO-2 and ZeRO-3), HSDP and DDP, on any nn.Module.

FSDP2 (torch.distributed.fsdp.fully_shard; ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277) shards parameters, gradients
and optimizer state over a mesh axis, and all-gathers the parameters of one unit at a time. The units are the modules before the
blocks (the embedding, and each part of an encoder), each block, and the modules after them (norm and output). All other
parameters belong to the root, such as an embedding and an output layer that share a weight. A mesh of two axes replicates over
the first and shards over the second (HSDP). DDP is torch's `replicate`, which runs on FSDP2's machinery, and so works with
tensor parallelism and lower precision in the same way.

An example: a model of 1 embedding, 4 blocks, norm and output on 8 ranks has 6 units: the embedding, 4 blocks, and norm with
output. A block's weight of (4096, 4096) is (512, 4096) on each rank, and whole only while the block computes.

Gradients are summed over ranks or averaged, as the caller says. titan's trainer sums: it divides the loss by the number of valid
tokens of the *global* batch (titan/step/train_step.py), which is the same in every layout, and a mean would be wrong if ranks have
different numbers of valid tokens. torch's fully_shard averages, which is right for a loss that is a mean over each rank's own batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from .alike import require_alike_modules, require_alike_parameters
from .fsdp_compat import (
    average_gradients,
    gathers_itself,
    reduce_unused,
    refuse_graph,
)
from .init_weights import canonical_name
from .one_rank import stay_on_rank
from .selective import outside_selection
from .torch_compat import replicate

Reduction = Literal["sum", "mean"]


def apply_fsdp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    blocks: Iterable[nn.Module] | nn.ModuleDict,
    gradients: Reduction | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    kept_blocks: int = 1,
    blocks_per_unit: int = 1,
    cpu_offload: bool = False,
    cast_forward_inputs: bool = True,
    prefetch: int = -1,
    own_mesh: Mapping[nn.Module, DeviceMesh] | None = None,
    encoders: Sequence[nn.Module] = (),
    first: Sequence[Any] = (),
    last: Sequence[nn.Module] = (),
) -> None:
    """Shard `model` in place over `mesh`: one axis (FSDP) or two (replicate, shard: HSDP).

    Args:
        model: the model.
        mesh: the axis or the two axes.
        blocks: modules in forward order, gathered `blocks_per_unit` at a time.
        gradients: "sum" over the ranks of `mesh`, or their "mean" as in fully_shard. No default: AdamW would hide the wrong one.
        param_dtype: dtype in which parameters are gathered and computed with. None: their own.
        reduce_dtype: dtype of gradients in the reduction. None: fp32, or fp64 if the model has parameters in it. torch's own default
            changed in 2.15.
        reshard_after_forward: free a unit's gathered parameters until its backward pass (ZeRO-3), or keep them (ZeRO-2).
        kept_blocks: number of last blocks not resharded (with their unit and all later modules): their backward pass comes next.
        blocks_per_unit: number of blocks in a unit.
        cpu_offload: keep shards on the host.
        cast_forward_inputs: cast floating-point inputs of each unit to param_dtype. False for a model with fp32 tables as inputs.
        prefetch: units gathered ahead, in the forward and the backward pass. 0: FSDP's default, the next unit when the host gets
            there. -1: 1 if `own_mesh` has modules that are gathered, else 0.
        own_mesh: modules within blocks that are units over another mesh: experts, split between experts, or within if ranks
            outnumber them.
        encoders: more modules that run before the blocks, one unit each, outer modules first.
        first: modules that run before the blocks, one unit. Without it they are the root's, gathered during the whole step.
        last: modules that run after the blocks, one unit.

    Raises:
        TypeError: `gradients` is missing.
        ValueError: no module is named, or one that the model does not have; or as `units_of`.
    """
    divisor = _divisor(gradients, mesh)
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype or _precise(model)}
    precision = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast_forward_inputs)
    pins = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pins) if cpu_offload else OffloadPolicy()
    blocks = [*(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)]
    _check_model(model, mesh, [*encoders, *first, *blocks, *last], own=own_mesh or ())
    ends = {"encoders": encoders, "first": first, "last": last}
    units = units_of(
        model, blocks, **ends, blocks_per_unit=blocks_per_unit, inside=own_mesh or ()
    )
    # A loss in chunks has done the output layer's part of the backward pass. The norm, which follows, is too short to
    # hide an all-gather of the last block.
    kept = {*last, *blocks[-kept_blocks:]}
    options = {"mp_policy": precision, "offload_policy": offload}
    gathered: list[list[nn.Module]] = []
    for unit in reversed(units):  # inner ones first: all other parameters belong to the root
        reshard = reshard_after_forward and kept.isdisjoint(unit)
        inside = _shard_inside(unit, own_mesh or {}, reshard_after_forward=reshard, **options)
        gathered.insert(0, [unit[0], *inside])
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, **options)
    # The root's parameters are used at both ends of the forward pass (tied embeddings), so they stay gathered.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, **options)
    alone = {inner for inner, inner_mesh in (own_mesh or {}).items() if inner_mesh.size() == 1}
    if mesh.size() == 1:
        alone |= {*model.modules()} - {*(own_mesh or ())}
    reduce_gradients(model, divisor=divisor, alone=alone, uneven=own_mesh or ())
    if [*first] in units and _only_embeddings(first):
        first[0].set_unshard_in_backward(False)
    # FSDP finds a unit inside another one only when it runs, and experts run after a wait of the host.
    gathers = any(inner.size(inner.ndim - 1) > 1 for inner in (own_mesh or {}).values())
    _prefetch(gathered, int(gathers) if prefetch < 0 else prefetch)


def _divisor(gradients: Reduction | None, mesh: DeviceMesh) -> int:
    """Return the number by which sums of gradients are divided."""
    if gradients not in get_args(Reduction):
        raise TypeError(
            f'gradients="sum" or "mean", got {gradients!r}: "mean" for a trainer that was written for torch\'s fully_shard or '
            'DistributedDataParallel, whose loss is a mean over each rank\'s own batch; "sum" if each rank divides its loss by what all '
            "ranks count"
        )
    return mesh.size() if gradients == "mean" else 1


def _precise(model: nn.Module) -> torch.dtype:
    """Return fp32, or fp64 for a model with parameters in it."""
    is_double = any(p.dtype == torch.float64 for p in model.parameters())
    return torch.float64 if is_double else torch.float32


def _shard_inside(
    unit: Sequence[nn.Module], own_mesh: Mapping[nn.Module, DeviceMesh], **options: Any
) -> list[nn.Module]:
    """Shard the modules of a unit that have their own mesh, and return them."""
    parts = {part for module in unit for part in module.modules()}
    inside = [module for module in own_mesh if module in parts]
    for inner in inside:
        dim = _shard_dimension(inner, own_mesh[inner])
        fully_shard(
            inner,
            mesh=own_mesh[inner],
            shard_placement_fn=lambda _, dim=dim: Shard(dim),
            **options,
        )
        _run_hooks_outside_selection(inner)
    return inside


def units_of(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    encoders: Sequence[nn.Module] = (),
    first: Sequence[nn.Module],
    last: Sequence[nn.Module],
    blocks_per_unit: int = 1,
    inside: Iterable[nn.Module] = (),
) -> list[list[nn.Module]]:
    """Return the modules of each unit, in forward order.

    `first` or `last` is left to the root if it shares a parameter with the other, or with a module in no unit.

    Args:
        model: the model.
        blocks: modules in forward order.
        encoders: more modules that run before the blocks, one unit each.
        first: modules that run before the blocks, one unit.
        last: modules that run after the blocks, one unit.
        blocks_per_unit: number of blocks in a unit.
        inside: modules within others that are units themselves.

    Raises:
        ValueError: two units share another parameter, so that each would train a copy; or a unit has two dtypes.
    """
    # The remainder comes first: a short first unit exposes less communication at both ends of a step.
    starts = range(len(blocks) % blocks_per_unit, len(blocks), blocks_per_unit)
    middle = [[*blocks[: starts.start]], *([*blocks[n : n + blocks_per_unit]] for n in starts)]
    alone = ([module] for module in encoders)
    units = [unit for unit in (*alone, [*first], *middle, [*last]) if unit]
    number = {module: n for n, unit in enumerate(units) for module in unit}
    number |= {module: len(units) + n for n, module in enumerate(inside)}
    ends = {-1, *(number[module] for module in (*first, *last))}
    to_root: set[int] = set()
    placed = _places(model, number)
    for places in placed.values():
        if len(places) > 1:
            if not places.keys() <= ends:
                one, other, *_ = places.values()
                raise ValueError(
                    f"{one} and {other} are one parameter in two FSDP units, and each would train a copy: put both modules in one "
                    "unit (blocks_per_unit, or neither in a unit), or give each its own parameter"
                )
            to_root |= places.keys()
    kinds: dict[int, tuple[torch.dtype, str]] = {}
    for parameter, places in placed.items():
        if parameter.requires_grad:
            unit, name = next((-1 if n in to_root else n, name) for n, name in places.items())
            dtype, before = kinds.setdefault(unit, (parameter.dtype, name))
            if dtype != parameter.dtype:
                dtypes = f"{before} is {dtype} and {name} {parameter.dtype}"
                raise ValueError(
                    f"{dtypes}, and one FSDP unit reduces both: give them one dtype"
                )
    return [unit for n, unit in enumerate(units) if n not in to_root]


def _places(
    model: nn.Module, number: Mapping[nn.Module, int]
) -> dict[nn.Parameter, dict[int, str]]:
    """Return each parameter's name in each unit that has it. number: of the modules that are units. -1 is the root."""
    places: dict[nn.Parameter, dict[int, str]] = {}

    def visit(module: nn.Module, path: str, unit: int) -> None:
        unit = number.get(module, unit)
        for name, parameter in module.named_parameters(path, recurse=False):
            places.setdefault(parameter, {}).setdefault(unit, canonical_name(name))
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, unit)

    visit(model, "", -1)
    return places


def _only_embeddings(modules: Iterable[nn.Module]) -> bool:
    """Return whether a backward pass needs none of the modules' parameters: an embedding's needs the ids only."""
    inner = [part for module in modules for part in module.modules() if part._parameters]
    # A subclass may compute with its weight, and hooks may make the weight from other parameters: both do not count.
    return all(
        type(part).forward is nn.Embedding.forward and [*part._parameters] == ["weight"]
        for part in inner
    )


def _prefetch(units: Sequence[Sequence[Any]], depth: int) -> None:
    """Gather `depth` units ahead, in the forward and in the backward pass.

    Args:
        units: for each unit, the module that stands for it, and the units inside it. FSDP drops its own order in favour of these
            lists, and gathers a unit that they leave out only when it runs.
        depth: number of units.
    """
    for place, (unit, *_) in enumerate(units if depth else ()):
        assert isinstance(unit, FSDPModule)
        ahead = units[place + 1 : place + 1 + depth]
        # In the order in which the backward pass needs them: the nearest block before this one first.
        behind = units[max(0, place - depth) : place][::-1]
        unit.set_modules_to_forward_prefetch([*chain(*ahead)])
        unit.set_modules_to_backward_prefetch([*chain(*behind)])


def _run_hooks_outside_selection(unit: nn.Module) -> None:
    """Hide FSDP's hooks of a unit from a selective checkpoint around it."""
    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                hooks[key] = outside_selection(hook)


def _shard_dimension(experts: nn.Module, mesh: DeviceMesh) -> int:
    """Return 0 if each rank of the mesh's last axis can have whole experts, else 1, to split each expert."""
    parameter = next(experts.parameters())
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return 0 if mesh.size(mesh.ndim - 1) <= len(own) else 1


def apply_ddp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    blocks: Iterable[nn.Module] | nn.ModuleDict,
    gradients: Reduction | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
    encoders: Sequence[nn.Module] = (),
    first: Sequence[nn.Module] = (),
    last: Sequence[nn.Module] = (),
) -> None:
    """Replicate `model` in place over the one axis of `mesh`. The gradients of each block are reduced as a bucket.

    Nothing is broadcast, unlike in torch's DistributedDataParallel: replicas must start equal. `initialize` draws the same
    weights on all ranks; `replicas.require_equal_replicas` checks other weights.

    Args:
        model: the model.
        mesh: mesh with one axis.
        blocks: as in `apply_fsdp`, like all following arguments.
        gradients: "sum" or "mean".
        param_dtype: dtype of computation.
        reduce_dtype: as in `apply_fsdp`.
        cast_forward_inputs: cast floating-point inputs of each unit to param_dtype.
        encoders: more modules that run before the blocks.
        first: modules that run before the blocks.
        last: modules that run after the blocks.
    """
    divisor = _divisor(gradients, mesh)
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype or _precise(model)}
    precision = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast_forward_inputs)
    blocks = [*(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)]
    _check_model(model, mesh, [*encoders, *first, *blocks, *last])
    units = units_of(model, blocks, encoders=encoders, first=first, last=last)
    for unit in [*reversed(units), model]:
        replicate(unit, mesh=mesh, mp_policy=precision)
    reduce_gradients(model, divisor=divisor)


def _check_model(
    model: nn.Module,
    mesh: DeviceMesh,
    named: Sequence[nn.Module],
    *,
    own: Iterable[nn.Module] = (),
) -> None:
    """Raise ValueError if data parallelism would change what the model computes, or would do nothing for a named module."""
    require_alike_modules(model, num_ranks=mesh.size())
    require_alike_parameters(model)
    _require_even_float8(model, mesh)
    if not named:
        raise ValueError(
            f"no block of {type(model).__name__} is named: give its blocks in `blocks` (a list that was used up is empty), "
            "or other modules in `first`, `last` or `encoders`"
        )
    inside = {part for module in named for part in module.modules()}
    for found, modules, where in (
        ({*model.modules()}, named, f"in {type(model).__name__}"),
        (inside, own, "in a block, and own_mesh names it"),
    ):
        for module in modules:
            if module not in found:
                raise ValueError(f"a module {type(module).__name__} is not {where}")


def _require_even_float8(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError for a weight that torchao gathers in float8, and cannot in parts of unequal size: ranks would wait for ever."""
    ranks = mesh.size(mesh.ndim - 1)
    for name, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if gathers_itself(own) and len(own) % ranks:
            raise ValueError(
                f"{ranks} FSDP ranks do not divide the {len(own)} rows of {name}, which is gathered in float8: give apply_float8 "
                f"fsdp_ranks={ranks}, which gathers such a weight in its own dtype"
            )


def reduce_gradients(
    model: nn.Module,
    *,
    divisor: int,
    alone: Container[nn.Module] = (),
    uneven: Container[nn.Module] = (),
) -> None:
    """Make every unit's gradient reduction a sum over ranks, divided by `divisor`.

    A factor of 1 alone is not enough: with gloo, torch would still scale inside the collective, by an operation that gloo
    lacks.

    Args:
        model: model after FSDP or DDP.
        divisor: number of ranks whose gradients are averaged, or 1. Experts have received the tokens of all these ranks, so that the
            number of ranks of their own mesh is another one.
        alone: units of one rank. They get no factor, since torch would divide their gradients by 1, into a copy; and they copy
            nothing to themselves (one_rank.py).
        uneven: units that may have gradients on some ranks only: experts.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if divisor == 1 and module not in alone:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        reduce_unused(module, is_uneven=module in uneven and module not in alone)
        if module in alone:
            stay_on_rank(module)
        if divisor > 1:
            average_gradients(module, divisor)
        refuse_graph(module)


def set_gradient_sync(
    model: nn.Module, enabled: bool, *, all_reduce: bool | None = None, reshard: bool = True
) -> None:
    """Set what the next backward pass does with the gradients of a unit.

    Args:
        model: model after FSDP or DDP.
        enabled: reduce gradients over ranks, or only add them to the local ones. Without the reduction, FSDP keeps unsharded
            gradients of every unit in memory until the last backward pass.
        all_reduce: for HSDP: also reduce over replicas. False: gradients add up in shards until a backward pass does. None: as
            `enabled`.
        reshard: free the gathered weights. False: the next forward pass uses them, without an update before it.

    Raises:
        ValueError: the model itself is no unit of FSDP or DDP.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"{type(model).__name__} is not sharded: give the model that apply_fsdp or apply_ddp got"
        )
    model.set_requires_gradient_sync(enabled)
    if all_reduce is not None:
        model.set_requires_all_reduce(enabled and all_reduce)
    model.set_reshard_after_backward(reshard)
