"""Imitate what published runs had and titan has not: torch 2.6, and a model that repeats keys and values.

scripts/sim_accuracy.py gives `emulate` to the simulator, which calls it in the processes that trace a job. Nothing else
uses it. Differences, by the sources of torch 2.6 and of the published model:

    pipelining/stage.py          Every stage keeps the outputs of all microbatches until the next step (`output_chunks`).
                                 `run_post_backward` never ends FSDP's backward pass, so what its last block's
                                 reduce-scatter sends is kept until the next reduce-scatter, a step later.
    _functional_collectives.py   A collective that a compiler traces is awaited where it starts (`_maybe_wrap_tensor`).
                                 Compiled ring attention, traced collective by collective, hides none behind its blocks.
    model.py                     Keys and values are copied to every query head before attention. The numbers are the
                                 same, but need more memory and, under context parallelism, more bytes.

With torch 2.15 this is an approximation: it reduces the root's gradients last, not the last block's, and its compiler
moves waits. Not imitated: torch 2.6 had no fused RMSNorm (docs/simulator_accuracy.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.models.llama3 import model
from titan.parallel import ring
from titan.sim.torch_compat import find, replace


def emulate(config: JobConfig, layout: Layout) -> None:
    """Change torch and the model for the life of a process that traces this job."""
    _repeat_keys_and_values()
    emulate_torch_2_6(config, layout)


def emulate_torch_2_6(config: JobConfig, layout: Layout) -> None:
    """Change torch alone."""
    if layout.pp > 1:
        _hold_outputs()
        _hold_reductions()
    if layout.cp > 1 and config.compile.enable and "model" in config.compile.components:
        _await_at_once()


def _repeat_keys_and_values() -> None:
    """Copy each key and value head to its query heads. Models without grouped heads stay as they are."""

    def forward(self: model.Attention, x_BSD: Any, cos_sin: Any, document_ids_BS: Any) -> Any:
        # As titan's own, except for the two lines that repeat.
        q_BHSK, k_BHSK, v_BHSK = (x.transpose(1, 2) for x in self.heads(x_BSD))
        q_BHSK, k_BHSK = model.rotate(q_BHSK, cos_sin), model.rotate(k_BHSK, cos_sin)
        if (times := q_BHSK.shape[1] // k_BHSK.shape[1]) > 1:
            k_BHSK, v_BHSK = (x.repeat_interleave(times, dim=1) for x in (k_BHSK, v_BHSK))
        o_BHSK = self.inner_attention(q_BHSK, k_BHSK, v_BHSK, document_ids_BS)
        return self.wo(o_BHSK.transpose(1, 2).flatten(-2))

    model.Attention.forward = forward


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
    names = ("_end_backward_iteration", "_root_post_backward_final_callback")  # since 2.15, before
    name = next((n for n in names if hasattr(find(module, state), n)), names[-1])
    replace(module, f"{state}.{name}", keep)


def _await_at_once() -> None:
    wait = ring.wait

    def at_once(start: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: wait(start(*args, **kwargs))

    for name in ("start_all_gather", "start_all_to_all", "start_reduce_scatter"):
        setattr(ring, name, at_once(getattr(ring, name)))
    ring.wait = lambda x: x
