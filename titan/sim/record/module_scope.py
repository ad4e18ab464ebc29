"""Scope tracker: the phase, module and pipeline action that the host runs now.

Calls of modules are wrapped from outside, at the attribute where torch looks for a compiled call.
Hooks would be compiled along with the module. A module's backward pass is recognised by numbers:
autograd numbers its nodes as a forward pass makes them, so a node belongs to the module that was
running when it got its number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from titan.parallel.init_weights import canonical_name
from titan.sim.record import torch_compat
from titan.sim.record.trace import Phase, Scope

_NO_NUMBER = 2**63  # nodes that accumulate gradients are numbered from here on


class ScopeTracker:
    """Current scope of a recording.

    Attributes:
        phase: phase of the step.
        action: pipeline action, such as "2F0".
        call: operation of a block that is recomputed operation by operation.
        fsdp: module that FSDP communicates for, and whether it reduces gradients.
        on_backward: called when a backward pass begins.
    """

    def __init__(self, on_backward: Callable[[], None]) -> None:
        """Track nothing yet.

        Args:
            on_backward: called when a backward pass begins.
        """
        self.phase: Phase = "setup"
        self.action = ""
        # The id of an error (the error itself would keep its frames alive), and the innermost module.
        self._failure = (0, "")
        self.on_backward = on_backward
        self.call = ""
        self.path: list[str] = [""]
        self.recomputing = 0
        # Parallel lists, in ascending order: numbers of autograd nodes, and the module that makes the
        # nodes from each number on.
        self.numbers: list[int] = []
        self.modules: list[str] = []
        self.in_backward = False
        self.compiled: tuple[str, bool] = ("", False)
        self.fsdp: tuple[str, bool] | None = None
        self.backward_module = ""
        self._scopes: dict[tuple[Phase, str, str, str], Scope] = {}

    def begin(self) -> None:
        """Start over for another program."""
        self.phase, self.action = "setup", ""
        self.in_backward = False

    def current(self) -> Scope:
        """Return the scope of the running operation."""
        phase, module = self.phase, self.path[-1]
        in_backward = torch_compat.in_backward()
        if in_backward is not self.in_backward:
            self.in_backward = in_backward
            if in_backward:
                self.on_backward()
        # The optimizer may run within the backward pass (early_step_in_backward).
        if in_backward and phase != "optimizer":
            phase = "recompute" if self.recomputing else "backward"
            if not self.recomputing:
                module = self._module_of_backward()
        # FSDP works for a module that does not run itself: prefetches, and work that a pipeline leaves
        # between actions.
        if self.fsdp is not None and not (in_backward or module):
            module, reduces = self.fsdp
            if reduces and phase == "forward":  # a pipeline leaves it for the end
                phase = "backward"
        # Compiled code reports its inner modules by itself (`enter_compiled`).
        inner, recomputes = self.compiled
        if inner:
            module = f"{module}.{inner}"
        if recomputes and phase == "backward":
            phase = "recompute"
        return self._shared(phase, module, self.call)

    def in_action(self, scope: Scope) -> Scope:
        """Return the same scope in the current pipeline action."""
        return self._shared(scope.phase, scope.module, scope.call)

    def _shared(self, phase: Phase, module: str, call: str) -> Scope:
        """Return a scope of the current action. Equal scopes are one object."""
        key = (phase, module, self.action, call)
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(*key)
        return scope

    def _module_of_backward(self) -> str:
        """Return the module of the autograd node that runs."""
        node = torch_compat.running_node()
        if node is not None:
            number = node._sequence_nr()
            # A node's number says when the forward pass made it; the last module that had begun by
            # then made it.
            if number < _NO_NUMBER:
                index = bisect_right(self.numbers, number) - 1
                self.backward_module = self.modules[index] if index >= 0 else ""
        # Nodes that accumulate gradients count as the module of the node before them.
        return self.backward_module

    def enter_compiled(self, inner: str, recomputes: bool) -> None:
        """Set the module, within the running module, that compiled code has reached, and whether it recomputes there."""
        self.compiled = (inner, recomputes)

    def begin_step(self) -> None:
        """Begin a step with the forward pass."""
        self.phase = "forward"
        # Numbers of the step before would be mistaken for this one's.
        self.numbers.clear()
        self.modules.clear()

    @contextmanager
    def within(self, **values: Any) -> Iterator[None]:
        """Set attributes within the context: phase, action, call, or fsdp."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def in_module(self, name: str) -> Iterator[None]:
        """Count as a module what runs within the context: its call, or the update of its parameters."""
        recomputing = torch_compat.in_backward()
        self.path.append(name)
        self.recomputing += recomputing
        self._note(recomputing)
        try:
            yield
        finally:
            self.path.pop()
            self.recomputing -= recomputing
            self._note(recomputing)

    def watch_fsdp(self) -> None:
        """Track the module for which FSDP communicates while no module runs: between a pipeline's actions."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def communicate(group: Any, *args: Any, **kwargs: Any) -> Any:
                first = (group._module_fqn or "").partition(",")[0]  # of the unit's modules
                module = canonical_name(f"{first}.").rstrip(".")
                with self.within(fsdp=(module, method.__name__ == "post_backward")):
                    return method(group, *args, **kwargs)

            return communicate

        module = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            torch_compat.replace(module, f"FSDPParamGroup.{name}", wrap)

    def module_that_raised(self, error: BaseException | None) -> str:
        """Return the innermost module of an error, or of an error that caused it."""
        failure, name = self._failure
        while error is not None:
            if id(error) == failure:
                return name
            error = error.__cause__ or error.__context__
        return ""

    # ---- modules -------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Wrap the model's modules. Submodules of a compiled module are not seen here."""
        compiled: list[str] = []
        for name, module in model.named_modules():
            # A compiled module runs its children inside, where no call of theirs is seen.
            if any(name.startswith(f"{outer}.") for outer in compiled):
                continue
            if module._compiled_call_impl is not None:
                compiled.append(name)
            self._enclose(module, canonical_name(f"{name}.").rstrip("."))

    def _enclose(self, module: nn.Module, name: str) -> None:
        """Wrap the calls of a module."""
        call: Callable[..., Any] = module._compiled_call_impl or module._call_impl

        def enclosed(*args: Any, **kwargs: Any) -> Any:
            # The module is inside a compiled function without knowing it: tracking would break the graph.
            if torch.compiler.is_compiling():
                return call(*args, **kwargs)
            with self.in_module(name):
                try:
                    return call(*args, **kwargs)
                except Exception as error:
                    # The error passes through all enclosing modules. The first to see it is the
                    # innermost.
                    if self._failure[0] != id(error):
                        self._failure = (id(error), name)
                    raise

        # nn.Module calls this attribute in place of its own _call_impl if it is set.
        module.__dict__["_compiled_call_impl"] = enclosed

    def _note(self, recomputing: bool) -> None:
        """Note the module that makes autograd nodes from the next number on."""
        # Nodes that a recomputation makes are not looked up: it runs under its own phase.
        if not recomputing:
            self.numbers.append(torch_compat.sequence_number())
            self.modules.append(self.path[-1])
