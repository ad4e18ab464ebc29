"""Imitate what published runs had and titan has not: torch 2.6, and TorchTitan's models of 2024 and 2025.

scripts/sim_accuracy.py gives `imitation(run)` to the simulator, which calls it in the processes that trace a job. Nothing
else uses it. Differences, by the sources of torch 2.6 and of TorchTitan at the commits that the rows name:

    pipelining/stage.py          Every stage keeps the outputs of all microbatches until the next step (`output_chunks`).
                                 `run_post_backward` never ends FSDP's backward pass, so what its last block's
                                 reduce-scatter sends is kept until the next reduce-scatter, a step later.
    _functional_collectives.py   A collective that a compiler traces is awaited where it starts (`_maybe_wrap_tensor`).
                                 Compiled ring attention, traced collective by collective, hides none behind its blocks.
    models/llama/model.py        Keys and values are copied to every query head before attention. The numbers are the
                                 same, but need more memory and, under context parallelism, more bytes. Queries and keys
                                 are rotated as complex numbers, which Inductor fuses with nothing.
    parallelize_llama.py         Until July 2025 (83e6941) embedding, norm and output were one unit, the root's.
    models/norms.py              RMSNorm in single operations: "rmsnorm" from July 2024 (9dec370 in December) to March
                                 2025 (#985). The page of April 2024 (A) had "fused_rmsnorm", one kernel.
    experiments/qwen3            In September 2025 (d66b72a), norms of queries and keys are `NoParallel` under TP: what
                                 they return is gathered over the heads, rotated whole on every rank in bf16, and each
                                 rank cuts its heads out again. Gradients stay cut.

With torch 2.15 this is an approximation: it reduces the root's gradients last, not the last block's, and its compiler
moves waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor

from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.models.llama3 import model
from titan.parallel import fsdp, ring
from titan.sim.record.torch_compat import find, replace
from titan.sim.record.trace_jobs import Prepare

_SINGLE_OPERATIONS = ("torchtitan-2024-08", "torchtitan-2024-12", "paper-2410.06511", "torchtitan-pr-822", "torchtitan-pr-833")  # fmt: skip
"""Sources of the time when TorchTitan's RMSNorm was made of single operations."""


def imitation(run: dict[str, Any]) -> Prepare | None:
    """Return what makes a process trace a row of runs.toml as it was; None: it is traced as today."""
    source = run["source"]
    if "ep" in run or not source.startswith(("torchtitan", "paper", "trainy", "torchao")):
        return None  # experts came later, and others have other models
    grouped = source == "torchtitan-graph"
    return partial(emulate, single_norms=source in _SINGLE_OPERATIONS, grouped=grouped)


def emulate(
    config: JobConfig, layout: Layout, *, single_norms: bool = False, grouped: bool = False
) -> None:
    """Change torch and the model for the life of a process that traces this job.

    single_norms: RMSNorm is made of single operations. grouped: keys and values are not copied, as since 2026.
    """
    if not grouped and config.model.name != "qwen3":  # those are of September 2025 and later
        units_of = fsdp.units_of
        fsdp.units_of = lambda model, blocks, **_: units_of(model, blocks, first=(), last=())
    llama = _forward_grouped if grouped else _forward_llama
    model.Attention.forward = _forward_qwen3 if config.model.name == "qwen3" else llama
    if single_norms:
        nn.RMSNorm.forward = _norm_in_operations
    emulate_torch_2_6(config, layout)


def emulate_torch_2_6(config: JobConfig, layout: Layout) -> None:
    """Change torch alone."""
    if layout.pp > 1:
        _hold_outputs()
        _hold_reductions()
    if layout.cp > 1 and config.compile.enable and "model" in config.compile.components:
        _await_at_once()


def _norm_in_operations(self: nn.RMSNorm, x: Tensor) -> Tensor:
    whole = x.float()
    scale = torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + (self.eps or 0.0))
    return (whole * scale).type_as(x) * self.weight


def _forward_llama(self: Any, x_BSD: Tensor, cos_sin: Any, document_ids_BS: Any) -> Tensor:
    q_BSHK, k_BSGK, v_BSGK = _rotated(self, x_BSD, cos_sin)
    k_BSHK, v_BSHK = (_repeat(x, q_BSHK.shape[2] // x.shape[2]) for x in (k_BSGK, v_BSGK))
    return _attend(self, q_BSHK, k_BSHK, v_BSHK, document_ids_BS)


def _forward_grouped(self: Any, x_BSD: Tensor, cos_sin: Any, document_ids_BS: Any) -> Tensor:
    return _attend(self, *_rotated(self, x_BSD, cos_sin), document_ids_BS)


def _rotated(self: Any, x_BSD: Tensor, cos_sin: Any) -> tuple[Tensor, Tensor, Tensor]:
    q_BSHK, k_BSGK, v_BSGK = self.heads(x_BSD)
    turns = torch.complex(*(x.chunk(2, dim=-1)[1] for x in cos_sin))
    return _rotate_complex(q_BSHK, turns), _rotate_complex(k_BSGK, turns), v_BSGK


def _rotate_complex(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def _attend(self: Any, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, ids: Any) -> Tensor:
    o_BHSK = self.inner_attention(*(x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK)), ids)
    return self.wo(o_BHSK.transpose(1, 2).flatten(-2))


def _repeat(x: Tensor, times: int) -> Tensor:
    """Copy each key and value head to its query heads."""
    return x if times == 1 else x.repeat_interleave(times, dim=2)


def _forward_qwen3(self: Any, x_BSD: Tensor, cos_sin: Any, document_ids_BS: Any) -> Tensor:
    q_BSHK, k_BSGK, v_BSGK = self.heads(x_BSD)
    times = q_BSHK.shape[2] // k_BSGK.shape[2]
    cos, sin = (torch.cat(2 * x.chunk(2, dim=-1)[1:], dim=-1).to(q_BSHK.dtype) for x in cos_sin)
    q_BSHK, k_BSHK = (
        _Rotation.apply(x, cos, sin, self.q_norm.weight, times)
        for x, times in ((q_BSHK, 1), (k_BSGK, times))
    )
    return _attend(self, q_BSHK, k_BSHK, _repeat(v_BSGK, times), document_ids_BS)


class _Rotation(torch.autograd.Function):
    """Gather heads, rotate and repeat them all, and cut out those of this rank."""

    @staticmethod
    def forward(
        ctx: Any, x_BSHK: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, times: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.times = times
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        if mesh is None:
            return _repeat(_rotate_halves(x_BSHK, cos, sin), times)
        whole = collectives.all_gather_tensor(x_BSHK, 2, mesh.get_group())
        whole = _repeat(_rotate_halves(whole, cos, sin), times)
        return whole.chunk(mesh.size(), dim=2)[mesh.get_local_rank()].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        [gradient] = gradients
        if ctx.times > 1:
            gradient = gradient.unflatten(2, (-1, ctx.times)).sum(3)
        return _rotate_halves(gradient, cos, -sin), None, None, None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _hold_outputs() -> None:
    def keep(forward: Callable[..., Any]) -> Callable[..., Any]:
        def keeping(stage: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(stage, *args, **kwargs)
            stage.__dict__.setdefault("kept_outputs", []).append(output)
            return output

        return keeping

    def drop(clear: Callable[[Any], None]) -> Callable[[Any], None]:
        def clearing(stage: Any) -> None:
            stage.__dict__.pop("kept_outputs", None)
            clear(stage)

        return clearing

    module, stage = "torch.distributed.pipelining.stage", "_PipelineStageBase"
    replace(module, f"{stage}.forward_one_chunk", keep)
    replace(module, f"{stage}.clear_runtime_states", drop)


def _hold_reductions() -> None:
    def keep(end: Callable[[Any], None]) -> Callable[[Any], None]:
        def ending(state: Any) -> None:
            context = state._comm_ctx
            if hasattr(context, "reduce_scatter_state"):  # until 2.11
                kept = context.reduce_scatter_state
                end(state)
                context.reduce_scatter_state = kept
            else:
                several = [*context.reduce_scatter_states]
                end(state)
                context.reduce_scatter_states += several

        return ending

    module, state = "torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"
    names = (
        "_end_backward_iteration",
        "_root_post_backward_final_callback",
    )  # since 2.15, before
    name = next((n for n in names if hasattr(find(module, state), n)), names[-1])
    replace(module, f"{state}.{name}", keep)


def _await_at_once() -> None:
    patched: Any = ring
    wait = ring.wait

    def at_once(start: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: wait(start(*args, **kwargs))

    for name in ("start_all_gather", "start_all_to_all", "start_reduce_scatter"):
        setattr(ring, name, at_once(getattr(ring, name)))
    patched.wait = lambda x: x
