"""Repetition of microbatches: a pipeline stage runs few of them, and the recorded events are copied for all others.

A microbatch passes through a stage in parts: forward (F), the loss (L), backward (B). In the first
step, the first, second, third and last microbatch of each part run. The second and the third must
record the same events, to every number and every reference, and the others repeat the third. In
later steps, only the first and the last run: the first allocates memory that others add to, such as
gradients, and the last may finish it. Everything around the parts runs each time: torch's schedule,
its sends and receives.

Example: a stage gets 6 microbatches, 0 to 5. In the first step 0, 1, 2 and 5 run, and 3 and 4
repeat the events of 2. In the second step 0 and 5 run, and 1, 2, 3 and 4 repeat the events of 2.
Events are compared by numbers that count from the beginning of a microbatch. Suppose that F of
microbatch 1 allocates blocks 71 and 72 and frees 72, and that B frees 71:

    F    Allocate 71 -> 0, Launch -> -1, Allocate 72 -> 1, Free 72 -> 1        (-1: the event has no number)
    B    Free 71 -> 0

Microbatch 2 allocates blocks 93 and 94 in their place, which have the numbers 0 and 1, too: the two
are equal.

If microbatches differ, the program is recorded again, and all of them run. Zero-bubble schedules
are left out: torch goes through the two halves of a backward pass in the order of sets, which are
ordered by addresses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from titan.sim.record import torch_compat
from titan.sim.record.compiled_replay import Repetition, Shape
from titan.sim.record.repeat import CannotRepeat
from titan.sim.record.torch_compat import FakeTensor
from titan.sim.record.trace import (
    BEGINS,
    Allocate,
    AwaitEvent,
    AwaitWork,
    Event,
    Free,
    compared_fields,
    number_of,
    scope_of,
)

if TYPE_CHECKING:
    from titan.sim.record.tracer import Tracer


class _Output(NamedTuple):
    """Placeholder of a tensor that a part returned.

    Attributes:
        number: Number of its block of memory, counted from the microbatch's beginning; -1 for
            memory from elsewhere.
        shape: Its shape and layout.
        requires_grad: Whether it requires a gradient.
    """

    number: int
    shape: Shape
    requires_grad: bool


class _Part(NamedTuple):
    """Record of one part of a microbatch.

    Attributes:
        events: Events, each with the number of its block, event or work, counted from the
            microbatch's beginning.
        described: Everything that microbatches must have in common.
        outputs: Return value of the part, with _Outputs in place of tensors.
    """

    events: list[tuple[Event, int]]
    described: list[Any]
    outputs: Any


class _Repeated(Repetition):
    """Microbatch that repeats another, by numbers counted from the beginning.

    Attributes:
        held: Tensors that autograd would keep for the backward pass, by number, each with the entry
            that follows its memory.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer, tracer.transfers.shift)
        self.held: dict[int, tuple[Any, Tensor]] = {}


class Microbatches:
    """Repetition of the microbatches of one program's stages.

    Attributes:
        failure: Reason why the program cannot be recorded like this, or an empty text.
        turns: Microbatches in their order, by stage and part.
    """

    def __init__(self, tracer: Tracer, order: Sequence[Any]) -> None:
        """Begin to record a program.

        Args:
            tracer: The tracer that records the program.
            order: The rank's actions in a step. Each has a stage, a kind and a microbatch.
        """
        self.tracer, self.failure = tracer, ""
        # Microbatches in order, by stage and part.
        self.turns: dict[tuple[int, str], list[int]] = {}
        for action in order:
            for part in "FL" if action.kind == "F" else action.kind:
                self.turns.setdefault((action.stage, part), []).append(action.microbatch)
        self._first_step = True
        self._counted: dict[tuple[int, int], dict[tuple[str, int], int]] = {}
        self._parts: dict[tuple[int, int, str], _Part] = {}  # by stage, microbatch, part
        self._alike: set[tuple[int, str]] = set()  # stages and parts that were compared
        self._repeated: dict[tuple[int, int], _Repeated] = {}
        self._categories: list[tuple[Allocate, Allocate]] = []

    def run(self, part: str, function: Callable[[], Any]) -> Any:
        """Run or repeat a part of the microbatch that the current scope names.

        Args:
            part: "F", "L" or "B".
            function: Runs the part.

        Raises:
            CannotRepeat: The microbatches of this stage differ.
        """
        match = re.fullmatch(r"(\d+)\D(\d+)", self.tracer.scopes.action)
        # Without an action, torch learns the shapes that stages exchange.
        if match is None:
            return function()
        stage, number = int(match[1]), int(match[2])
        if part == "F":
            self._repeated.pop((stage, number), None)
            if not self._runs(stage, number):
                self._repeated[stage, number] = _Repeated(self.tracer)
        if (stage, number) in self._repeated:
            self._compare(stage, part)
            return self.repeat(stage, number, part)
        start = len(self.tracer.events)
        result = function()
        if (
            self._first_step
            and (stage, number, part) not in self._parts
            and self._runs(stage, number)
        ):
            self._parts[stage, number, part] = self._described(stage, number, start, result)
        return result

    def _runs(self, stage: int, number: int) -> bool:
        """Return whether a microbatch runs in this step."""
        early = 3 if self._first_step else 1
        parts = [turns for (of, _), turns in self.turns.items() if of == stage]
        return any(number in (*turns[:early], turns[-1]) for turns in parts)

    def end_step(self) -> None:
        """End a step: set categories that became known, and compare the microbatches of the first step.

        Raises:
            CannotRepeat: The microbatches of a stage differ.
        """
        for copy, event in self._categories:  # which are known late
            copy.category = event.category
        self._categories.clear()
        self._repeated.clear()
        if not self._first_step:
            return
        self._first_step = False
        for stage, part in self.turns:
            if part != "L":  # only the last stage has one
                self._compare(stage, part)

    def _compare(self, stage: int, part: str) -> None:
        """Raise CannotRepeat if this part of a stage cannot be repeated."""
        if (stage, part) not in self._alike:
            self.failure = self._difference(stage, part)
            if self.failure:
                raise CannotRepeat(self.failure)
            self._alike.add((stage, part))

    # ---- parts that ran

    def _described(self, stage: int, number: int, start: int, result: Any) -> _Part:
        """Return the record of a part that has run."""
        counted = self._counted.setdefault((stage, number), {})
        events: list[tuple[Event, int]] = []
        described: list[Any] = []
        for event in self.tracer.events[start:]:
            key, count = (
                number_of(event),
                -1,
            )  # -1: it refers to something before the microbatch
            if key is not None:
                is_new = isinstance(event, BEGINS)
                count = (
                    counted.setdefault(key, len(counted)) if is_new else counted.get(key, -1)
                )
                if isinstance(event, Free) and count >= 0:
                    counted["freed", key[1]] = counted.pop(key)
            scope = scope_of(event)
            where = scope and (scope.phase, scope.module, scope.call)
            names = compared_fields(type(event))
            # The category is known late.
            values = [getattr(event, name) for name in names if name != "category"]
            events.append((event, count))
            described.append([type(event), count, where, *values])

        def output(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Another kind of tensor has no memory here: then nothing repeats it.
            block = self.tracer.storages.block_of(value) if type(value) is FakeTensor else -1
            return _Output(
                counted.get(("block", block), -1), Shape.of(value), value.requires_grad
            )

        outputs = tree_map(output, result)
        described += _outputs(outputs)
        return _Part(events, described, outputs)

    def _difference(self, stage: int, part: str) -> str:
        """Return the reason why this part of a stage cannot be repeated, or an empty text."""
        if len(self.turns[stage, part]) < 4:  # all run
            return ""
        before, like = self.turns[stage, part][1:3]
        for earlier in "FLB"[: "FLB".index(part) + 1]:
            if (stage, like, earlier) not in self._parts:
                continue  # only the last stage has a loss
            template = self._parts[stage, self.turns[stage, earlier][2], earlier]
            for number in (before, like):
                recorded = self._parts[stage, number, earlier]
                if recorded.described != template.described:
                    return f"microbatches of stage {stage} differ in {earlier}"
                before_it = [event for event, count in recorded.events if count < 0]
                refers = any(isinstance(e, Free | AwaitEvent | AwaitWork) for e in before_it)
                if refers or any(output.number < 0 for output in _outputs(recorded.outputs)):
                    return (
                        f"microbatches of stage {stage} need what was before them in {earlier}"
                    )
        if part == "B":
            # Memory that neither ends within the microbatch nor is returned ends outside of it, which is not repeated.
            left = [n for (kind, _), n in self._counted[stage, like].items() if kind == "block"]
            parts = filter(None, (self._parts.get((stage, like, p)) for p in "FLB"))
            returned = [output.number for p in parts for output in _outputs(p.outputs)]
            if {*left} - {*returned} or len({*returned}) < len(returned):
                return f"stage {stage} keeps memory of its microbatches"
        return ""

    # ---- parts that repeat others

    def repeat(self, stage: int, number: int, part: str) -> Any:
        """Emit the events of a part again, and return equal outputs."""
        tracer, own = self.tracer, self._repeated[stage, number]
        recorded = self._parts[stage, self.turns[stage, part][2], part]
        if part == "B":  # as at the beginning of a real one
            tracer.storages.categorize_new("activations")
        scopes: dict[Any, Any] = {None: None}
        for event, count in recorded.events:
            scope = scope_of(event)
            if scope not in scopes:
                scopes[scope] = tracer.scopes.in_action(scope)
            # The tensor's memory ends here, even if it has other references.
            if isinstance(event, Free) and count in own.held:
                own.held.pop(count)[0].event = None
            own.emit(event, count, scopes[scope])
            if isinstance(event, Allocate):
                self._categories.append((own.made[count], event))
        if part == "B":
            own.held.clear()

        def tensor(output: Any) -> Any:
            if not isinstance(output, _Output):
                return output
            with tracer.pause():
                made = output.shape.allocated()
            entry = tracer.storages.adopt(made, own.made[output.number])
            if part != "B":
                own.held[output.number] = (entry, made)
            return made.requires_grad_() if output.requires_grad else made

        return tree_map(tensor, recorded.outputs, is_leaf=_is_output)


def _is_output(value: Any) -> bool:
    """Return whether a value is a placeholder."""
    return isinstance(value, _Output)


def _outputs(outputs: Any) -> list[_Output]:
    """Return all placeholders in nested outputs."""
    return [output for output in tree_leaves(outputs, is_leaf=_is_output) if _is_output(output)]


# ---- wrappers of torch's methods


def wrap_part(tracer: Tracer, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function that runs one part of a microbatch, so that the part may be repeated."""

    def running(*args: Any, **kwargs: Any) -> Any:
        if tracer.microbatches is None:
            return method(*args, **kwargs)
        return tracer.microbatches.run(name, partial(method, *args, **kwargs))

    return running


def track_actions(tracer: Tracer) -> None:
    """Set the scope's pipeline action ("0F3") while methods of torch's stages perform it."""
    scopes = tracer.scopes

    def action(letter: Callable[..., str]) -> Callable[[Any], Any]:
        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def acting(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
                with scopes.within(action=f"{stage.stage_index}{letter(kwargs)}{chunk}"):
                    return method(stage, chunk, *args, **kwargs)

            return acting

        return wrap

    stage = "torch.distributed.pipelining.stage"
    base = "_PipelineStageBase"
    torch_compat.replace(stage, f"{base}.forward_one_chunk", action(lambda _: "F"))
    torch_compat.replace(
        stage,
        f"{base}.backward_one_chunk",
        action(lambda k: "B" if k.get("full_backward", True) else "I"),
    )
    torch_compat.replace(stage, f"{base}.backward_weight_one_chunk", action(lambda _: "W"))
    torch_compat.replace(
        stage, f"{base}.forward_maybe_with_nosync", lambda m: wrap_part(tracer, m, "F")
    )
    torch_compat.replace(
        stage, f"{base}.backward_maybe_with_nosync", lambda m: wrap_part(tracer, m, "B")
    )

    def with_loss(method: Callable[..., Any]) -> Callable[..., Any]:
        def losing(self: Any, s: Any, output: Any, targets: Any, chunk: int, *rest: Any) -> Any:
            with scopes.within(action=f"{s.stage_index}F{chunk}"):
                return method(self, s, output, targets, chunk, *rest)

        return losing

    torch_compat.replace(
        "torch.distributed.pipelining.schedules",
        "_PipelineSchedule._maybe_compute_loss",
        with_loss,
    )
