"""The one place that says in which order techniques are applied to a model.

    float8 -> pipeline split -> TP/SP -> CP -> EP -> AC -> compile -> FSDP / HSDP / DDP

Inner to outer: what changes a layer's computation comes first, what changes how a block is run (recomputed,
compiled) next, and the wrapper that gathers parameters around a block's run is last, so that it sees everything
below it as one unit. EP takes its place here as it lands.

Float8 comes before the split, in titan/program.py and not here: tensor parallelism and FSDP must find layers and weights that know
how to cast themselves, and the decision which layers are converted is one for the whole model.

Compile goes around AC: the compiler sees what is recomputed, fuses it with the backward pass, and leaves out what that pass does
not need (the last product of a block, and its reduction over TP). Where recomputation has to draw the same random numbers
again, whole blocks are recomputed from outside, compiled: torch 2.13 loses the state of the generators where weights are DTensors.
Offloading of activations goes around both: it moves what they leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .activation import apply_ac
from .compile import CompileMode, apply_compile
from .context import Method, apply_cp
from .fsdp import apply_ddp, apply_fsdp
from .mesh import submesh
from .offload import apply_offload
from .tensor import apply_tp


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What to apply. param_dtype: precision of forward and backward; None: that of the parameters."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    prefetch: int = 0
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    num_kv_heads: int = 1
    loss_parallel: bool = True
    output_in_loss: bool = False
    attention_type: type[nn.Module] = nn.Module
    context_method: Method = "allgather"
    context_balanced: bool = True
    recompute_every: int = 0  # blocks; 0: none
    recompute_keep: tuple[str, ...] = ()  # operations; (): whole blocks are recomputed
    recompute_keep_modules: tuple[str, ...] = ()
    preserve_rng_state: bool = False
    offload_activations: bool = False
    compile_backend: str = ""  # "": not compiled
    compile_mode: CompileMode = "default"
    memory_budget: float = 1.0


def parallelize(model: nn.Module, *, mesh: DeviceMesh, plan: ParallelPlan) -> nn.Module:
    """Apply `plan` to a model, or to one pipeline stage of it, in place over `mesh` (built by `build_mesh`).

    The model's blocks are the children of its `layers`.
    """
    tp = submesh(mesh, "tp")
    if tp is not None:
        apply_tp(
            model,
            mesh=tp,
            plan=plan.tensor_plan,
            num_kv_heads=plan.num_kv_heads,
            loss_parallel=plan.loss_parallel,
            output_in_loss=plan.output_in_loss,
        )
    cp = submesh(mesh, "cp")
    has_blocks = any(True for _ in model.get_submodule("layers").children())
    if cp is not None and has_blocks:  # a pipeline stage of the embedding alone has no attention
        apply_cp(
            model,
            mesh=cp,
            attention_type=plan.attention_type,
            method=plan.context_method,
            balanced=plan.context_balanced,
        )
    by_op = bool(plan.recompute_keep or plan.recompute_keep_modules)
    recompute = partial(
        apply_ac,
        model,
        every=plan.recompute_every,
        keep=plan.recompute_keep,
        keep_modules=plan.recompute_keep_modules,
        preserve_rng_state=plan.preserve_rng_state,
    )
    recompute_compiled = bool(plan.compile_backend) and plan.preserve_rng_state and not by_op
    if plan.recompute_every and not recompute_compiled:
        recompute()
    if plan.compile_backend:
        apply_compile(
            model,
            backend=plan.compile_backend,
            mode=plan.compile_mode,
            memory_budget=plan.memory_budget,
            preserve_rng_state=plan.preserve_rng_state,
        )
    if plan.recompute_every and recompute_compiled:
        recompute()
    if plan.offload_activations:
        apply_offload(model)
    blocks = list(model.get_submodule("layers").children())
    _apply_data_parallel(model, mesh=mesh, blocks=blocks, plan=plan)
    return model


def _apply_data_parallel(
    model: nn.Module, *, mesh: DeviceMesh, blocks: list[nn.Module], plan: ParallelPlan
) -> None:
    """FSDP over dp_shard x cp, replicated over dp_replicate (HSDP); DDP where nothing is sharded.

    A single rank without mixed precision stays a plain module. With it, the model is wrapped even for one
    rank: FSDP does the casting, so that one process and many compute in the same precision.
    """
    shard = submesh(mesh, "dp_shard", "cp", flatten=True)
    replicas = submesh(mesh, "dp_replicate")
    if shard is None and replicas is not None and not plan.cpu_offload:
        apply_ddp(
            model,
            mesh=replicas,
            blocks=blocks,
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            cast_forward_inputs=False,
        )
    elif shard is not None or plan.param_dtype is not None or plan.cpu_offload:
        fsdp_mesh = shard or mesh["dp_shard"]
        if replicas is not None:
            names = fsdp_mesh.mesh_dim_names
            assert names is not None
            fsdp_mesh = mesh["dp_replicate", names[-1]]
        apply_fsdp(
            model,
            mesh=fsdp_mesh,
            blocks=blocks,
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            reshard_after_forward=plan.reshard_after_forward,
            cpu_offload=plan.cpu_offload,
            prefetch=plan.prefetch,
            cast_forward_inputs=False,
        )
