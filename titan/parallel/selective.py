"""Selective activation checkpointing: contexts that decide about each operation's result.

They wrap torch's own contexts, which keep or recompute each result that they see, and add two things:

    outside     a function may be left out of the decisions, such as FSDP's all-gather hooks, which may do something in the
                recomputation that they did not do in the forward pass, or the reverse
    programs    a compiled program counts as one operation, whose results are all kept

An example: a block runs aten.mm twice and has an FSDP hook that runs an all-gather in between. `keeps` is called with
("aten.mm", False) for each matmul of the forward pass, and not for the hook's all-gather. If it returns True and then
False, the first result is kept. The recomputation calls it with ("aten.mm", True) twice. The first call returns the kept
result, and the second matmul runs again.

This file uses private names of torch: the modes, to which torch dispatches, and the name of a compiled program's operation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, ClassVar

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .torch_compat import draws


class _Outside(threading.local):
    """Whether this thread runs a function that is no part of the checkpointed block around it."""

    def __init__(self) -> None:
        # An attribute of the object, not of the class: Dynamo guards where it found it, and `+=` would move it.
        self.depth = 0


_outside = _Outside()


def outside_selection(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that a selective checkpoint around it neither keeps nor counts its operations.

    FSDP's hooks within a checkpointed block need it: in the recomputation they all-gather parameters that were gathered already in
    the forward pass, or the reverse. torch from 2.12 on refuses a recomputation with other operations.

    Compile a function before wrapping it. A compiler that traces the wrapper delays the wrapper's effect until the end.

    Args:
        function: any function.

    Returns:
        The wrapped function, with the attribute `is_outside_selection`.
    """

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        _outside.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _outside.depth -= 1

    setattr(outside, "is_outside_selection", True)  # noqa: B010
    return outside


def show_programs_to_checkpoints() -> None:
    """Show a selective checkpoint each program that inductor compiles from now on as one operation.

    Otherwise it would see some calls within the program, which write into buffers that the program reuses, and would keep
    these buffers.
    """
    from torch._inductor import config

    config.wrap_inductor_compiled_regions = True


def call_program(program: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
    """Call a compiled forward program as inductor does after `show_programs_to_checkpoints`.

    For compilers other than inductor. A selective checkpoint keeps the results.

    Args:
        program: compiled function that takes a list of inputs.
        inputs: the inputs.
    """
    # torch puts a mode that checks aliasing around a program's first call, so titan's may not be the innermost mode.
    modes = [
        mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _SeesPrograms)
    ]
    if _outside.depth or not modes:
        return program(inputs)
    mode = modes[-1]
    return mode.__torch_dispatch__(_Program(program), (), (inputs,))


class _SeesPrograms:
    """Base of a selective checkpoint's modes, to find them among all dispatch modes."""


@dataclass(frozen=True)
class _Program:
    """A compiled program, as one of the operations that a selective checkpoint sees."""

    run: Callable[[list[Any]], Any]
    # torch 2.11 looks here for results that share memory with arguments. A program has none.
    _schema: ClassVar[Any] = SimpleNamespace(returns=())

    def __call__(self, inputs: list[Any]) -> Any:
        return outside_selection(self.run)(inputs)


watch_selected_calls: Callable[[str, int], AbstractContextManager[Any]] | None = None
"""Entered around every operation of a selective checkpoint, with its name ("aten.mm") and its place among the block's
operations of that name. The simulator sets it, to label what it records."""


def selective_checkpoint_contexts(keeps: Callable[[str, bool], bool]) -> Any:
    """Return the contexts of a selective checkpoint's forward pass and recomputation.

    They ignore functions that `outside_selection` wrapped, and keep all results of a compiled program (see
    `show_programs_to_checkpoints`).

    Args:
        keeps: whether to keep a result; called with the operation's name ("aten.mm") and whether this is the recomputation.
    """
    # PREFER, not MUST: a compiler may still keep a result that is cheaper to keep.
    policies = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE)
    is_kept = [False]  # of the call that is running
    contexts = create_selective_checkpoint_contexts(lambda *_, **__: policies[is_kept[0]])

    def selects(recomputes: bool) -> Callable[..., Any]:
        places: Counter[str] = Counter()

        def call(
            dispatch: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any
        ) -> Any:
            # str(func) is "aten.mm.default". Remove the overload.
            name = str(func).rsplit(".", 1)[0]
            if isinstance(func, _Program) or name == "inductor_compiled_code":
                # The results of a program include the tensors that its backward pass needs.
                is_kept[0] = True
                return dispatch(func, types, args, kwargs)
            # `keeps` counts each call. A recomputation that left out a draw would give its random numbers to the next one.
            is_kept[0] = keeps(name, recomputes) and not draws(func, args, kwargs)
            if watch_selected_calls is None:
                return dispatch(func, types, args, kwargs)
            places[name] += 1
            with watch_selected_calls(name, places[name] - 1):
                return dispatch(func, types, args, kwargs)

        return call

    for recomputes, context in enumerate[Any](contexts):
        context.titan_call = selects(bool(recomputes))
        context.__class__ = _passes_over(type(context))
    return contexts


@cache
def _passes_over(mode: type) -> type:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _outside.depth:
            return func(*args, **(kwargs or {}))
        # An argument, not an attribute, which would make a cycle that keeps the results alive.
        return self.titan_call(
            partial(mode.__torch_dispatch__, self), func, types, args, kwargs or {}
        )

    members = {"__torch_dispatch__": dispatch, "supports_higher_order_operators": True}
    return type(mode.__name__, (mode, _SeesPrograms), members)
