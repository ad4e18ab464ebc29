"""Overlap of two micro-batches: one computes while the other's tokens travel to their experts or back.

Each micro-batch runs in a thread. Only one thread runs at a time, and it hands over where it would wait for an exchange of tokens, in
the forward pass, in the backward pass, and in a recomputation. So the order of all operations is fixed: nothing depends on timing.

An example with two blocks (a attention, d dispatch, e experts, c combine):

    computes    a1  a2  e1  e2  a1' a2' e1' e2'
    travels         d1  d2  c1  c2  d1' d2' c1' c2'

The numbers are those of two micro-batches one after the other. FSDP knows one pass at a time, so `Overlap` adds what two need: a unit
is gathered once for both and freed when both have left it, and each micro-batch's gradients are reduced alone, the first one's first.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from titan.parallel.collectives import turns
from titan.parallel.fsdp_compat import data_parallel_groups
from titan.parallel.random_numbers import drawing_modules
from titan.parallel.torch_compat import also_forget


class _Abort(Exception):
    """End of a micro-batch whose partner failed."""


class _Pair:
    """Two threads that take turns, numbered 0 and 1. The first one begins."""

    def __init__(self) -> None:
        self.may_run = threading.Semaphore(0), threading.Semaphore(0)
        self.done, self.failed = [False, False], False

    def hand_over(self, own: int) -> None:
        """Run the other micro-batch until it hands over or ends."""
        if not self.done[1 - own]:
            self.may_run[1 - own].release()
            self.may_run[own].acquire()
        if self.failed:
            raise _Abort

    @contextmanager
    def turn(self, own: int) -> Iterator[None]:
        """Run as one of the two, from the first turn to the last."""
        if own:
            self.may_run[own].acquire()
        turns.number, turns.hand_over = own, partial(self.hand_over, own)
        try:
            if self.failed:
                raise _Abort
            yield
        except BaseException:
            self.failed = True
            raise
        finally:
            turns.number, turns.hand_over = None, None
            self.done[own] = True
            self.may_run[1 - own].release()


@cache
def _worker() -> ThreadPoolExecutor:
    # One thread for the whole run: torch keeps caches for each thread.
    return ThreadPoolExecutor(1, "second micro-batch")


also_forget.append(_worker.cache_clear)


def _contexts_of_thread() -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Yield functions that make the contexts of torch which this thread has entered, and which another thread does not inherit."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        yield partial(saved_tensors_hooks, *hooks)
    if not torch.is_grad_enabled():
        yield torch.no_grad
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype, keeps = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            yield partial(torch.autocast, kind, dtype=dtype, cache_enabled=keeps)
    yield partial(_under, _get_current_function_mode_stack())
    yield from ((lambda mode=mode: mode) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def _under(modes: Sequence[Any]) -> Iterator[None]:
    """Push function modes. To enter torch.device's mode twice would leave its device behind."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def take_turns(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run two functions, which hand over to each other where they wait for tokens, and return their results.

    Args:
        first: runs in this thread.
        second: runs in another thread, under this thread's modes of torch, autocast among them, and context variables.
    """
    pair, contexts = _Pair(), [*_contexts_of_thread()]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(own: int, function: Callable[[], Any]) -> Any:
        # Else a GPU's backward pass would run in one thread for both.
        with (
            torch.autograd.set_multithreading_enabled(False),
            pair.turn(own),
            ExitStack() as stack,
        ):
            for context in contexts if own else ():
                stack.enter_context(context())
            return function()

    def run_second() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        return run(1, second)

    other = _worker().submit(contextvars.copy_context().run, run_second)
    try:
        result = run(0, first)
    except _Abort:
        other.result()  # raises the partner's error
        raise
    except BaseException:
        other.exception()  # the partner has ended
        raise
    return result, other.result()


class Overlap:
    """Forward and backward passes of two micro-batches of one model, which take turns at each exchange of tokens.

    Example of a trainer's own, with expert parallelism and FSDP:

        overlap = Overlap(model)                     # after apply_ep and apply_fsdp
        losses = overlap.forward([partial(loss_of, batch) for batch in two])
        overlap.backward(losses, prepare=lambda is_last: set_gradient_sync(model, is_last))
    """

    def __init__(self, model: Any, *, reduce_once: bool = False) -> None:
        """Prepare a model, after all other helpers.

        Args:
            model: the model.
            reduce_once: add the two gradients of a unit before their reduction, for half of the communication. Sums then have another
                order, and round differently.

        Raises:
            ValueError: no tokens travel, FSDP shards modules of the model, and not the model itself, or a module draws random numbers.
        """
        if names := drawing_modules(model):
            raise ValueError(
                f"module '{names[0]}' draws random numbers, and two micro-batches at a time would draw others than one after the other: "
                "let it draw none, or do not overlap"
            )
        self.reduce_once = reduce_once
        self.units = [_Unit(group) for group in data_parallel_groups(model)]
        self.root = getattr(model, "_get_fsdp_state", lambda: None)()
        if self.units and self.root is None:
            raise ValueError("FSDP shards parts of the model: shard the model itself, too")
        if not any(
            hasattr(getattr(m, "dispatcher", None), "dispatch") for m in model.modules()
        ):
            raise ValueError(
                f"no module of {type(model).__name__} has a `dispatcher` behind which another micro-batch could run: call "
                "apply_ep first"
            )

    def forward(self, functions: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Return the results of two functions that call the model."""
        return [*take_turns(*functions)]

    def backward(
        self, losses: Sequence[Tensor], *, prepare: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Add the gradients of two losses of `forward`, the first one's first.

        Args:
            losses: scalars.
            prepare: sets, for the first and for the second micro-batch, what FSDP does with gradients (`set_gradient_sync`). It is
                called with whether the micro-batch is the second.
        """
        for number in (0, 1):
            prepare(bool(number))
            for unit in self.units:
                unit.begin_backward(number, waits=self.reduce_once and not number)
        if self.root is not None:
            # FSDP would end the pass of both when the first one ends.
            self.root._state_ctx.post_backward_final_callback_queued = True
        take_turns(*(loss.backward for loss in losses))
        for number in (0, 1):
            turns.number = number
            for unit in self.units:
                unit.end_backward(number)
        turns.number = None
        if self.root is not None:
            self.root._root_post_backward_final_callback()


class _Unit:
    """FSDP's group of parameters, through which two micro-batches pass. Each has a state, settings and gradients of its own there.

    Attributes:
        states: what FSDP does for each micro-batch.
        settings: what FSDP does with the gradients of each micro-batch.
        gradients: gradients of each micro-batch that wait for their reduction, by parameter.
        reduced: micro-batches whose gradients are reduced.
    """

    SETTINGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")

    def __init__(self, group: Any) -> None:
        self.group, self.idle = group, group._training_state
        self.states = [self.idle, self.idle]
        self.settings: list[dict[str, bool]] = [{}, {}]
        self.gradients: tuple[dict[Tensor, Tensor], ...] = ({}, {})
        self.reduced: set[int] = set()
        self.hooked: set[Tensor] = set()
        for name in ("pre_forward", "post_forward", "pre_backward"):
            setattr(group, name, partial(self._in_turn, getattr(group, name)))
        group.post_backward = partial(self._post_backward, group.post_backward)
        group.reshard = partial(self._reshard, group.reshard)

    def _in_turn(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the group in the state of the micro-batch that runs."""
        number = turns.number
        if number is None:
            return method(*args)
        self.group._training_state = self.states[number]
        result = method(*args)
        self.states[number] = self.group._training_state
        for parameter in self.group.fsdp_params:
            leaf = getattr(parameter, "_unsharded_param", None)  # None: never gathered
            if leaf is not None and leaf.requires_grad and leaf not in self.hooked:
                self.hooked.add(leaf)
                leaf.register_post_accumulate_grad_hook(self._keep_apart)
        return result

    def _reshard(self, method: Callable[[], None]) -> None:
        if turns.number != 0:  # the second one still needs the parameters
            method()

    def _keep_apart(self, leaf: Tensor) -> None:
        """Take a gradient that a micro-batch has just accumulated, before the other one adds to it."""
        if turns.number is None or leaf.grad is None:
            return
        waiting = self.gradients[turns.number]
        waiting[leaf] = waiting[leaf].add_(leaf.grad) if leaf in waiting else leaf.grad
        leaf.grad = None

    def _post_backward(self, method: Callable[..., None], *args: Any) -> None:
        number = turns.number
        if number is None:
            return method(*args)
        for leaf, gradient in self.gradients[number].items():
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
        self.gradients[number].clear()
        self.reduced.add(number)
        vars(self.group).update(self.settings[number])
        self._in_turn(method, *args)

    def begin_backward(self, number: int, *, waits: bool) -> None:
        """Note the settings for a micro-batch. If it waits, the other one reduces its gradients."""
        self.settings[number] = {name: getattr(self.group, name) for name in self.SETTINGS}
        self.settings[number]["reduce_grads"] &= not waits
        self.reduced.discard(number)

    def end_backward(self, number: int) -> None:
        """Reduce the gradients of a micro-batch, unless its backward pass did when it left the unit."""
        if number not in self.reduced:
            self.group.post_backward()
        self.states[number] = self.idle
