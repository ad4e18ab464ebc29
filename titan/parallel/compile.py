"""Compilation by block: torch.compile for each block, so that equal blocks share one compiled program.

All blocks of a shape cost one compilation, whatever the depth of the model. FSDP's all-gathers, which run between blocks, stay
outside of the compiled graphs.

torch's own record of compilations tells how many there were, how long they took, and why a block was compiled again or
in pieces (a graph break). Either costs speed without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan.base.failure import UserError

from .activation import selection_of, unwrapped
from .random_numbers import require_restored
from .selective import outside_selection, show_programs_to_checkpoints
from .split_backward import splitting_backend
from .torch_compat import (
    CompileEvent,
    allow_programs,
    compile_events,
    keep_random_state_in_graphs,
    set_memory_budget,
)
from .traits import BlockTraits, blocks_in

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


class BackendError(UserError, ValueError):
    """Name of a compiler backend that torch does not have. The message is for the user."""


def apply_compile(
    model: nn.Module,
    *,
    container: str | Sequence[str] = "layers",
    backend: str = "inductor",
    mode: CompileMode = "default",
    memory_budget: float = 1.0,
    fullgraph: bool = False,
    preserve_rng_state: bool = True,
    kinds: int = 1,
    splits_backward: bool = False,
) -> None:
    """Compile every block of the containers in place, at its first forward and backward pass. Names do not change.

    Call it after `apply_tp` and before FSDP. If a block's `traits` (traits.py) name functions, these are compiled instead of the
    block. In a block that is recomputed selectively, each function decides what to keep, and only those named as recomputed run
    again.

    Args:
        model: the model.
        container: name of one or several containers of blocks (a ModuleDict or ModuleList).
        backend: backend of torch.compile.
        mode: for inductor: "max-autotune-no-cudagraphs" measures kernels.
        memory_budget: share of the activations, 0 to 1, that a block keeps for its backward pass; the compiler chooses what to
            recompute. It applies to everything that this process compiles from now on.
        fullgraph: raise an error instead of running slower code if a block cannot be compiled whole.
        preserve_rng_state: graphs restore the random generators' state for recomputed operations. Use False if blocks draw no
            random numbers, and under tensor parallelism, for which torch up to 2.13 fails.
        splits_backward: compile each backward pass in two parts, for pipeline schedules that compute gradients of inputs and of
            weights at different times. Without it, such a schedule computes both at once.
        kinds: number of kinds of blocks, by what they keep. Beyond torch's limit of programs, blocks would run uncompiled.

    Raises:
        BackendError: torch does not have the backend.
        ValueError: a container does not exist, or has no block.
    """
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch._dynamo.list_backends())
        raise BackendError(f'torch has no compiler backend "{backend}"; there are {known}')
    require_restored(model, preserve_rng_state=preserve_rng_state)
    keep_random_state_in_graphs(preserve_rng_state)
    allow_programs(kinds)
    settings: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph}
    settings |= {} if mode == "default" else {"mode": mode}
    if splits_backward:
        settings["backend"] = splitting_backend(backend, settings.pop("mode", None))
    set_memory_budget(memory_budget)
    containers = [container] if isinstance(container, str) else container
    if len(containers) > 1:
        # torch keeps programs by code object, which all modules share. It would take another container's shape for a varying one.
        settings["dynamic"] = False
    blocks = [block for name in containers for block in blocks_in(model, name)[1].values()]
    # See `detach_collective`: the fault occurs if an output from outside goes into a compiled block.
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside and _leaves_collective(module):
            detach_collective(module)
    # Each call of a block looks up the program that the first block of its shape compiled.
    for block in blocks:
        inner: Any = unwrapped(block)
        traits = getattr(inner, "traits", BlockTraits())
        select = selection_of(block) if traits.compiled else None
        if select is not None:
            show_programs_to_checkpoints()
        for path in traits.compiled:
            inside_of, _, name = path.rpartition(".")
            owner = inner.get_submodule(inside_of)
            function = getattr(owner, name)
            passed_over = getattr(function, "is_outside_selection", False)
            if passed_over:
                function = function.__wrapped__
            elif select is not None:
                passed_over = path in traits.recomputed
                function = function if passed_over else select(function)
            compiled = torch.compile(function, **settings)
            if path in traits.varying:
                compiled = _with_any_rows(compiled)
            setattr(owner, name, outside_selection(compiled) if passed_over else compiled)
        if not traits.compiled:
            block.compile(**settings)


def _with_any_rows(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with one program for any number of tokens, not a separate one for the first number."""

    @wraps(compiled)
    def call(rows: Tensor, *args: Tensor, **options: Any) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(rows, *args, **options)

    return call


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module, or a function of it, was compiled.

    Args:
        module: any module, wrapped or not.
    """
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return True
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in vars(module).values())


class CompileLog:
    """Record of this process's compilations since the construction.

    Attributes:
        what: the compiled things, in words ("8 blocks, the loss and the update").
        events: the compilations so far.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        # Earlier compilations belong to other logs.
        self._seen = {key for key, _ in compile_events()}
        self._said: set[str] = set()
        self.events: list[CompileEvent] = []

    def summary(self) -> str:
        """Return one line about all compilations so far."""
        self._update()
        # Forward and backward pass of a program are two events.
        programs = [event for event in self.events if event.is_forward]
        cached = sum(event.from_cache for event in programs)
        line = (
            f"compiled {self.what}: {len(programs)} program{'s'[: len(programs) != 1]}, "
            f"{sum(event.seconds for event in self.events):.1f} s"
        )
        return f"{line}, {cached} from the cache" if cached else line

    def warnings(self) -> Iterator[str]:
        """Yield new events that cost speed, once each: graph breaks, recompilations and failures."""
        self._update()
        for event in self.events:
            # torch does not name the function of a program beyond its limit.
            name = event.name or f"a part of {self.what}"
            lines = [
                f"graph break in {name}: {_first_lines(reason)}"
                for reason in event.graph_breaks
            ]
            # An optimizer's update is one program for each kind of parameter, by intent.
            if event.recompile_reason and event.file.stem != "optimizer":
                lines.append(f"recompiled {name}: {_first_lines(event.recompile_reason)}")
            if event.failure:
                lines.append(f"not compiled: {name}: {_first_lines(event.failure)}")
            for line in lines:
                if line not in self._said:
                    self._said.add(line)
                    yield line

    def _update(self) -> None:
        for key, event in compile_events():
            if key not in self._seen:
                self._seen.add(key)
                self.events.append(event)


def _first_lines(reason: str) -> str:
    """Return the first line and the explanation, if there is one. torch's text continues with advice and links."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explained = [line for line in lines[1:] if line.startswith("Explanation:")]
    return "; ".join([*lines[:1], *(line.removeprefix("Explanation: ") for line in explained)])


def _leaves_collective(module: nn.Module) -> bool:
    """Return whether a module's output under tensor parallelism is a reduction that may still be under way.

    This is so if its weight is split along the dimension that a matmul or look-up sums over.
    """
    if not isinstance(module, nn.Embedding | nn.Linear) or not isinstance(
        module.weight, DTensor
    ):
        return False
    return isinstance(module, nn.Embedding) or module.weight.placements == (Shard(1),)


def detach_collective(module: nn.Module) -> None:
    """Make `module` return a plain tensor instead of a collective that may still be under way.

    torch 2.13 and 2.15 silently lose the gradient of a vocabulary-parallel embedding if its output, such a tensor, goes
    straight into a compiled block: the unwrapping there forgets requires_grad (pytorch PR 179849). A copy is a plain
    tensor. tests/parity compares every gradient under compile x TP and would see the fault again.

    Args:
        module: module outside of compiled blocks, whose output goes into one.
    """

    def copy(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.clone()

    module.register_forward_hook(copy)
