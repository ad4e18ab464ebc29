"""What torch 2.6 made of a program, where a later one does better: for runs that were published in its time.

Read off its sources:

    pipelining/stage.py                  every stage keeps the outputs of all microbatches until the next step (`output_chunks`), and
                                         since `run_post_backward` never ends FSDP's backward pass, what its last block's reduce-scatter
                                         sends is kept until the next reduce-scatter, a step later
    _functional_collectives.py           a collective that a compiler traces is awaited where it starts (`_maybe_wrap_tensor`): compiled
                                         ring attention, which there was traced collective by collective, hides none behind its blocks

With torch 2.15 this is an approximation: it reduces the root's gradients last, not the last block's, and its compiler moves waits.

Not here: torch 2.6 had no fused RMSNorm. The published runs had a module of their own, of which docs/simulator_accuracy.md tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.parallel import ring

from .torch_compat import find, replace


def go_back(config: JobConfig, layout: Layout) -> None:
    """Change torch, for the life of the process, which makes recordings of this job."""
    if layout.pp > 1:
        _hold_outputs()
        _hold_reductions()
    if layout.cp > 1 and config.compile.enable and "model" in config.compile.components:
        _await_at_once()


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
