"""The techniques of parallel training, applied to a model in their order. No other place states this order.

    float8 -> pipeline split -> TP/SP -> CP -> EP -> AC -> compile -> FSDP / HSDP / DDP

Inner to outer: first what changes a layer's computation, then what changes how a block is run (recomputed, compiled),
and last the wrapper that gathers parameters around a block's run, so that it sees everything below it as one unit.

Float8 and the pipeline split work on the whole model, before `parallelize` gets a stage of it (titan/step/train_step.py): tensor
parallelism and FSDP must find layers and weights that know how to cast themselves, and which layers are converted is decided for
the whole model.

Compile goes around AC: the compiler sees the recomputation, fuses it with the backward pass, and leaves out operations that this
pass does not need (the last matmul of a block, and its reduction over TP). If recomputation has to draw the same random numbers again,
compiled blocks are recomputed from outside: torch 2.13 loses the state of the generators where weights are DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titan.base.untrusted import InputError
from titan.config.model import frozen_names, tensor_plan_of
from titan.config.schema import (
    ActivationCheckpointSection,
    CompileSection,
)
from titan.models.common.attention import InnerAttention
from titan.models.common.moe import MoE
from titan.parallel.activation import apply_ac
from titan.parallel.compile import CompileLog, apply_compile
from titan.parallel.context import Method, apply_cp, mask_over_ranks, sequence_part
from titan.parallel.documents import DocumentMask, choose_form, mask_of, share_document_mask
from titan.parallel.expert import RoundRobin, apply_ep, keep_routes
from titan.parallel.fsdp import apply_ddp, apply_fsdp, set_gradient_sync
from titan.parallel.grouped_float8 import apply_grouped_float8
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import submesh
from titan.parallel.module_kinds import (
    ExpertModule,
    GroupedExperts,
    RoutedExperts,
    modules_of,
    stacked_experts,
)
from titan.parallel.random_numbers import drawing_modules
from titan.parallel.sac_save_list import parse_blocks
from titan.parallel.tensor import apply_tp
from titan.parallel.traits import ends_of
from titan.step.resolved import ResolvedJob

# How the TOML names the methods. "alltoall" is TorchTitan's ring, which rotates by all-to-all.
_CONTEXT_METHODS: dict[str, Method] = {
    "allgather": "allgather",
    "alltoall": "ring",
    "ring": "ring",
    "ulysses": "ulysses",
}


def parallelize(
    model: nn.Module,
    *,
    job: ResolvedJob,
    mesh: DeviceMesh,
    sparse_mesh: DeviceMesh | None = None,
) -> None:
    """Apply all techniques to a model, or to one pipeline stage of it, in place.

    Args:
        model: its blocks are the children of its `layers`. Encoders before it, with `layers` of their own, are laid out block by block too.
        job: says which techniques apply, and how.
        mesh: built by `titan.parallel.build_mesh`.
        sparse_mesh: the experts' mesh, built by `build_sparse_mesh`; None: experts are laid out like everything else.
    """
    config, techniques = job.config, job.techniques
    parallel = config.parallelism
    if (tp := submesh(mesh, "tp")) is not None:
        apply_tp(
            model,
            mesh=tp,
            plan=tensor_plan_of(model, job.family),
            num_kv_heads=job.sizes.n_kv_heads,
            loss_parallel=techniques.loss_parallel,
            output_in_loss=techniques.output_in_loss,
        )
    blocks = list(model.get_submodule("layers").children())
    cp = submesh(mesh, "cp")
    method = _CONTEXT_METHODS[parallel.context_parallel_rotate_method]
    balanced = parallel.splits_from_both_ends
    if cp is not None and blocks:  # a pipeline stage of the embedding alone has no attention
        apply_cp(
            model, mesh=cp, attention_type=InnerAttention, method=method, balanced=balanced
        )
    if config.data.document_mask:
        make: Callable[..., DocumentMask] = mask_of
        if cp is not None:
            part = sequence_part(cp, balanced=balanced)
            make = partial(mask_over_ranks, part=part, method=method)
        form = choose_form(
            mesh.device_type,
            torch_dtype(config.training.compute_dtype),
            whole=cp is None or method == "ulysses",
        )
        share_document_mask(model, partial(make, form=form))
    _lay_out_experts(model, job, mesh=mesh, sparse_mesh=sparse_mesh)
    # What follows leaves out pipeline stages that have nothing for it: without experts, without blocks, or with one block.
    if techniques.grouped is not None:
        recipe, section = techniques.grouped
        names = modules_of(model, GroupedExperts)
        if any(part in name for name in names for part in section.fqns):
            apply_grouped_float8(
                model, recipe=recipe, fqns=section.fqns, emulate=section.emulate
            )
    _recompute_and_compile(
        model,
        config.activation_checkpoint,
        config.compile if techniques.compiles_blocks else None,
        splits_backward=techniques.splits_backward,
    )
    # Ranks that hold the same experts shard them among themselves. They are fewer than those that
    # share the rest of the model.
    own_mesh: dict[nn.Module, DeviceMesh] = {}
    if sparse_mesh is not None:
        axes = sparse_mesh.mesh_dim_names or ()
        names = tuple(axis for axis in ("dp_replicate", "efsdp") if axis in axes)
        dispatching = modules_of(model, ExpertModule).values()
        own_mesh = {stacked_experts(moe): sparse_mesh[names] for moe in dispatching}
    _apply_data_parallel(model, job, mesh=mesh, own_mesh=own_mesh)


def moes_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's modules that count their experts' loads, by name: mixtures of experts, or a foreign model's experts."""
    found = modules_of(model, RoutedExperts)
    return {canonical_name(name): moe for name, moe in found.items()}


def _lay_out_experts(
    model: nn.Module, job: ResolvedJob, *, mesh: DeviceMesh, sparse_mesh: DeviceMesh | None
) -> None:
    """Distribute experts over ranks, and set how mixtures of experts route and compute."""
    config = job.config
    # Before FSDP, which shards the experts that a rank keeps.
    has_experts = bool(modules_of(model, ExpertModule))
    if (
        sparse_mesh is not None
        and has_experts
        and (ep := submesh(sparse_mesh, "ep")) is not None
    ):
        apply_ep(model, mesh=ep, moe_type=nn.Module)
    sequence = submesh(mesh, "cp", "tp", flatten=True)
    for moe in moes_of(model).values():
        stacked_experts(moe).chunk_tokens = config.moe.expert_chunk_rows
        if not isinstance(moe, MoE):
            continue
        if sequence is not None:
            moe.sum_over_sequence = partial(_sum_over, sequence.get_group())
        if config.debug.moe_force_load_balance:
            moe.route_sources.append(
                RoundRobin(mesh, balanced=config.parallelism.splits_from_both_ends)
            )


def _sum_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value


def _recompute_and_compile(
    model: nn.Module,
    section: ActivationCheckpointSection,
    compiler: CompileSection | None,
    *,
    splits_backward: bool,
) -> None:
    every = _recompute_every(section)
    preserves = section.preserve_rng_state or bool(drawing_modules(model))
    by_op = section.mode == "selective" and section.selective_ac_option == "op"
    op_keep = section.op_keep if by_op else ()
    containers = containers_of(model)
    # The results that blocks keep, if blocks keep different ones.
    kept: list[tuple[str, Container[int], Sequence[str]]] = []
    for container in containers:
        rest = recomputed = _blocks_with_gradient(model, container)
        # Its numbers, and names of modules, are those of the model's own blocks.
        lines = section.op_keep_by_block if container == "layers" else ()
        for blocks, entries in map(parse_blocks, lines):
            rest = {n for n in rest if n not in blocks}
            if entries is not None:
                kept.append((container, {n for n in recomputed if n in blocks}, entries))
        kept.append((container, rest, op_keep))

    def recompute() -> None:
        for container, blocks, keep in kept:
            names = [name for name, _ in model.get_submodule(container).named_children()]
            if not any(int(name) in blocks for name in names[every - 1 :: every]):
                continue
            apply_ac(
                model,
                container=container,
                every=every,
                blocks=blocks,
                keep=keep,
                by_op=by_op,
                preserve_rng_state=preserves,
                contexts=keep_routes,
            )

    # Recomputation that must draw the same random numbers goes around the compiled blocks (see above).
    from_outside = compiler is not None and preserves and not by_op
    if every and not from_outside:
        recompute()
    with_blocks = [name for name in containers if any(model.get_submodule(name).children())]
    if compiler is not None and with_blocks:
        apply_compile(
            model,
            container=with_blocks,
            backend=compiler.backend,
            mode=compiler.mode,
            memory_budget=section.memory_budget if section.mode == "memory_budget" else 1.0,
            preserve_rng_state=preserves,
            kinds=len(kept),
            splits_backward=splits_backward,
        )
    if every and from_outside:
        recompute()


def containers_of(model: nn.Module) -> list[str]:
    """Return the names of the containers of blocks, each a ModuleDict `layers`: that of the model, and those of its encoders."""
    modules = model.named_modules()
    found = [name for name, module in modules if isinstance(module, nn.ModuleDict)]
    return [name for name in found if name.rpartition(".")[2] == "layers"]


def _blocks_with_gradient(model: nn.Module, container: str) -> set[int]:
    """Return the numbers of the blocks that need a backward pass.

    Those are all blocks, without the first ones if no parameter up to them is trained. Such blocks keep no activations, and torch
    cannot compile them to be recomputed.
    """
    before = _before_blocks(model.get_submodule(container.rpartition(".")[0])).values()
    blocks = {
        int(name): block for name, block in model.get_submodule(container).named_children()
    }
    is_trained = not before or any(p.requires_grad for m in before for p in m.parameters())
    found = set()
    for number, block in blocks.items():
        is_trained = is_trained or any(p.requires_grad for p in block.parameters())
        if is_trained:
            found.add(number)
    return found


def _before_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that come before its `layers`, and so run before them."""
    children = dict(model.named_children())
    return {name: children[name] for name in [*children][: [*children].index("layers")]}


def _encoders(model: nn.Module, embedding: str) -> list[nn.Module]:
    """Return the modules that run before the blocks, without the embedding: each part, followed by its own blocks."""
    found = []
    for name, part in _before_blocks(model).items():
        if name != embedding and any(True for _ in part.parameters()):
            blocks = [
                part.get_submodule(container).children() for container in containers_of(part)
            ]
            found += [part, *chain(*blocks)]
    return found


def _recompute_every(section: ActivationCheckpointSection) -> int:
    """Return 1 if each block is recomputed, n if every n-th is, 0 if none is."""
    option = section.selective_ac_option
    if section.mode in ("none", "memory_budget"):
        return 0
    return 1 if section.mode == "full" or option == "op" else int(option)


def _apply_data_parallel(
    model: nn.Module,
    job: ResolvedJob,
    *,
    mesh: DeviceMesh,
    own_mesh: Mapping[nn.Module, DeviceMesh],
) -> None:
    """Apply FSDP over dp_shard x cp, replicated over dp_replicate (HSDP), or DDP if nothing is sharded.

    A single rank without mixed precision stays a plain module. With it, the model is wrapped even for one
    rank: FSDP does the casting, so one process and many compute in the same precision.
    """
    training, parallel, ends = job.config.training, job.config.parallelism, ends_of(job.sizes)
    # FSDP shards over context parallelism too: its ranks hold the same weights.
    shard = submesh(mesh, "dp_shard", "cp", flatten=True)
    replicas = submesh(mesh, "dp_replicate")
    offload = training.enable_cpu_offload
    casts = training.compute_dtype != training.dtype
    # A pipeline stage may lack some of them.
    last = [getattr(model, name) for name in ends.last if not name.startswith("layers.")]
    options: Any = {
        "blocks": list(model.get_submodule("layers").children()),
        "gradients": "sum",
        "encoders": _encoders(model, ends.embedding),
        "first": list(filter(None, [getattr(model, ends.embedding)])),
        "last": list(filter(None, last)),
        "param_dtype": torch_dtype(training.compute_dtype) if casts else None,
        "reduce_dtype": torch_dtype(training.mixed_precision_reduce),
        "cast_forward_inputs": False,
    }
    # DDP keeps whole parameters, so it can neither shard nor offload them.
    if shard is None and replicas is not None and not offload and not own_mesh:
        apply_ddp(model, mesh=replicas, **options)
    elif shard is not None or casts or offload or own_mesh:
        fsdp_mesh = shard or mesh["dp_shard"]
        if replicas is not None:
            # The sharding axis may be a joined one, named after its parts.
            names = fsdp_mesh.mesh_dim_names
            assert names is not None
            fsdp_mesh = mesh["dp_replicate", names[-1]]
        apply_fsdp(
            model,
            mesh=fsdp_mesh,
            reshard_after_forward=not job.techniques.keeps_weights,
            kept_blocks=parallel.fsdp_kept_blocks,
            blocks_per_unit=parallel.fsdp_blocks_per_unit,
            cpu_offload=offload,
            prefetch=parallel.fsdp_prefetch,
            own_mesh=own_mesh,
            **options,
        )


def backward_preparer(job: ResolvedJob) -> Callable[..., None]:
    """Return a function that sets when FSDP reduces and reshards. It takes the model before each micro-batch, and `is_last` of the step."""
    # Sharded gradients are small, whole ones are the size of the model: reduce those of each micro-batch, unless
    # the whole ones are there anyway, or the job has memory for them.
    each = job.config.parallelism.fsdp_reduce_gradients == "microbatch"
    each = each and job.layout.dp_shard * job.layout.cp > 1
    # Shards that wait for their sum over replicas wait on the device, which offloading spares.
    at_once = job.config.training.enable_cpu_offload
    keeps = job.techniques.keeps_weights

    def prepare(model: nn.Module, *, is_last: bool) -> None:
        reduce, all_reduce = is_last or each, is_last or at_once
        if isinstance(model, FSDPModule):
            set_gradient_sync(
                model, reduce, all_reduce=all_reduce, reshard=is_last or not keeps
            )

    return prepare


def compile_log_of(section: CompileSection, num_blocks: int) -> CompileLog | None:
    """Return the log of the compilations of a model with so many blocks, or None if nothing is compiled."""
    names = {"model": f"{num_blocks} blocks", "loss": "the loss", "optimizer": "the update"}
    *what, last = [names[component] for component in section.components] or [""]
    text = f"{', '.join(what)} and {last}" if what else last
    return CompileLog(text) if section.enable and last else None


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match a pattern from training.

    Raises:
        InputError: as `titan.config.model.frozen_names`.
    """
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, patterns):
        parameters[name].requires_grad_(False)


def require_trained(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Raise InputError, on all ranks, if a pipeline stage has no parameter to train.

    Args:
        model: the whole model, after `freeze`.
        stages: names of the modules of each stage.
    """
    for number, names in enumerate(stages):
        modules = [model.get_submodule(name) for name in names]
        if not any(p.requires_grad for module in modules for p in module.parameters()):
            raise InputError(
                f"model.freeze: nothing is left to train in pipeline stage {number} ({', '.join(names)}): choose fewer stages, or a split in "
                "which each has something to train (parallelism.module_fqns_per_model_part)"
            )


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name: torch.bfloat16 for "bfloat16"."""
    return getattr(torch, name)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating-point tensors in a dtype within a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
