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
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from titan.sim.record import torch_compat
from titan.sim.record.compiled_replay import Output, Repetition, Shape
from titan.sim.record.repeat import CannotRepeat
from titan.sim.record.torch_compat import FakeTensor
from titan.sim.record.trace import (
    BEGINS,
    Allocate,
    Event,
    left,
    number_of,
    outer_numbers,
    scope_of,
)

if TYPE_CHECKING:
    from titan.sim.record.tracer import Tracer


@dataclass
class _Part:
    """Record of one part of a microbatch.

    Attributes:
        events: events, with numbers that count from the microbatch's beginning, outside of actions
            and categories.
        returned: return value of the part, with Outputs in place of tensors.
        recorded: allocations as they were recorded, whose categories are known late.
    """

    events: list[Event]
    returned: Any
    recorded: list[Allocate]

    @property
    def outputs(self) -> list[Output]:
        """All outputs in the return value."""
        return [leaf for leaf in tree_leaves(self.returned) if isinstance(leaf, Output)]


class Microbatches:
    """Repetition of the microbatches of one program's stages.

    Attributes:
        failure: reason why the program cannot be recorded like this, or an empty text.
        turns: microbatches in their order, by stage and part.
    """

    def __init__(self, tracer: Tracer, order: Sequence[Any]) -> None:
        """Begin to record a program.

        Args:
            tracer: the tracer that records the program.
            order: the rank's actions in a step. Each has a stage, a kind and a microbatch.
        """
        self.tracer, self.failure = tracer, ""
        self.turns: dict[tuple[int, str], list[int]] = {}
        for action in order:
            for part in "FL" if action.kind == "F" else action.kind:
                self.turns.setdefault((action.stage, part), []).append(action.microbatch)
        self._first_step = True
        # By stage and microbatch: numbers that count from its beginning, and parts that ran.
        self._numbers: dict[tuple[int, int], dict[tuple[str, int], int]] = {}
        self._parts: dict[tuple[int, int], dict[str, _Part]] = {}
        self._alike: set[tuple[int, str]] = set()  # stages and parts that were compared
        self._repeated: dict[tuple[int, int], Repetition] = {}
        self._categories: list[tuple[Allocate, Allocate]] = []

    def run(self, part: str, function: Callable[[], Any]) -> Any:
        """Run or repeat a part of the microbatch that the current scope names.

        Args:
            part: "F", "L" or "B".
            function: runs the part.

        Raises:
            CannotRepeat: The microbatches of this stage differ.
        """
        match = re.fullmatch(r"(\d+)\D(\d+)", self.tracer.scopes.action)
        # Without an action, torch learns the shapes that stages exchange.
        if match is None:
            return function()
        stage, number = int(match[1]), int(match[2])
        runs = self._runs(stage, number)
        if part == "F" and not runs:
            self._repeated[stage, number] = Repetition(self.tracer, self.tracer.transfers.shift)
        if (stage, number) in self._repeated:
            self._compare(stage, part)
            return self.repeat(stage, number, part)
        start = len(self.tracer.events)
        result = function()
        parts = self._parts.setdefault((stage, number), {})
        if self._first_step and runs and part not in parts:
            numbers = self._numbers.setdefault((stage, number), {})
            parts[part] = self._recorded(self.tracer.events[start:], numbers, result)
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
        if self._first_step:
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

    def _recorded(
        self, events: Sequence[Event], numbers: dict[tuple[str, int], int], result: Any
    ) -> _Part:
        """Return the record of a part that has run.

        Args:
            events: its events.
            numbers: numbers within the microbatch so far, by those within the program. New ones are
                added.
            result: return value of the part.
        """
        local: list[Event] = []
        for event in events:
            changes: dict[str, Any] = {}
            if (key := number_of(event)) is not None:
                if isinstance(event, BEGINS):
                    numbers.setdefault(key, len(numbers))
                # -1: it refers to something before the microbatch.
                changes[key[0]] = numbers.get(key, -1)
            if (scope := scope_of(event)) is not None:
                changes["scope"] = replace(scope, action="")
            if isinstance(event, Allocate):
                changes["category"] = "temporary"
            local.append(replace(event, **changes))

        def output(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Another kind of tensor has no memory here: then nothing repeats it.
            block = self.tracer.storages.block_of(value) if type(value) is FakeTensor else -1
            number = numbers.get(("block", block), -1)
            return Output(("block", number), Shape.of(value), value.requires_grad)

        allocations = [event for event in events if isinstance(event, Allocate)]
        return _Part(local, tree_map(output, result), allocations)

    def _difference(self, stage: int, part: str) -> str:
        """Return the reason why this part of a stage cannot be repeated, or an empty text."""
        if len(self.turns[stage, part]) < 4:  # all run
            return ""
        before, like = self.turns[stage, part][1:3]
        # Only the last stage has a loss.
        parts = [p for p in "FLB"[: "FLB".index(part) + 1] if p in self._parts[stage, like]]
        for earlier in parts:
            template = self._parts[stage, self.turns[stage, earlier][2]][earlier]
            for number in (before, like):
                other = self._parts[stage, number][earlier]
                if (other.events, other.outputs) != (template.events, template.outputs):
                    return f"microbatches of stage {stage} differ in {earlier}"
        passed = [self._parts[stage, like][earlier] for earlier in parts]
        events = [event for one in passed for event in one.events]
        outputs = [output.memory for one in passed for output in one.outputs]
        if any(number < 0 for _, number in (*outer_numbers(events), *outputs)):
            return f"microbatches of stage {stage} need what was before them in {part}"
        # Memory that neither ends within the microbatch nor is returned ends outside of it, which is not repeated.
        kept = {number_of(event) for event in left(events)}
        if part == "B" and (kept - {*outputs} or len({*outputs}) < len(outputs)):
            return f"stage {stage} keeps memory of its microbatches"
        return ""

    # ---- parts that repeat others

    def repeat(self, stage: int, number: int, part: str) -> Any:
        """Emit the events of a part again, and return equal outputs."""
        tracer, own = self.tracer, self._repeated[stage, number]
        template = self._parts[stage, self.turns[stage, part][2]][part]
        if part == "B":  # as at the beginning of a real one
            tracer.storages.categorize_new("activations")
            del self._repeated[stage, number]
        start = len(tracer.events)
        for event in template.events:
            scope = scope_of(event)
            own.emit(event, scope and tracer.scopes.in_action(scope))
        copies = [event for event in tracer.events[start:] if isinstance(event, Allocate)]
        self._categories += zip(copies, template.recorded, strict=True)

        def tensor(output: Any) -> Any:
            if not isinstance(output, Output):
                return output
            made = own.tensor(output)
            return made.requires_grad_() if output.requires_grad else made

        return tree_map(tensor, template.returned)


# ---- wrappers of torch's methods


def wrap_part(tracer: Tracer, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function that runs one part of a microbatch, so that the part may be repeated."""

    def running(*args: Any, **kwargs: Any) -> Any:
        if tracer.microbatches is None:
            return method(*args, **kwargs)
        return tracer.microbatches.run(name, partial(method, *args, **kwargs))

    return running


def track_actions(tracer: Tracer) -> None:
    """Set the scope's pipeline action ("0F3") while methods of torch's schedule and stages perform it."""

    def acts(letter: str, stage: int = 0, chunk: int = 1) -> Callable[[Any], Any]:
        """Return a wrapper of a method, whose arguments with these numbers are the stage and the microbatch."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def acting(*args: Any, **kwargs: Any) -> Any:
                kind = letter if kwargs.get("full_backward", True) else "I"
                action = f"{args[stage].stage_index}{kind}{args[chunk]}"
                with tracer.scopes.within(action=action):
                    return method(*args, **kwargs)

            return acting

        return wrap

    for name, wrap in (
        ("stage._PipelineStageBase.forward_one_chunk", acts("F")),
        ("stage._PipelineStageBase.backward_one_chunk", acts("B")),
        ("stage._PipelineStageBase.backward_weight_one_chunk", acts("W")),
        (
            "stage._PipelineStageBase.forward_maybe_with_nosync",
            lambda m: wrap_part(tracer, m, "F"),
        ),
        (
            "stage._PipelineStageBase.backward_maybe_with_nosync",
            lambda m: wrap_part(tracer, m, "B"),
        ),
        ("schedules._PipelineSchedule._maybe_compute_loss", acts("F", stage=1, chunk=4)),
    ):
        torch_compat.replace("torch.distributed.pipelining", name, wrap)
