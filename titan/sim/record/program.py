"""Recording of one program by one rank: its construction, its steps, and its marks for clipping, updates and states.

The program is that of titan.step.train_step.build_train_step, or that of a script (`Job.script`). The optimizer of a job makes its states first, as in the first step. If a step then
ends everything that it begins and refers to nothing before it, every later step is like it. In
other cases, and always for scripts, a second step runs: by then the first step has learned the
shapes that pipeline stages exchange, and left the memory that a step leaves to the next step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.optim.states import local
from titan.parallel.init_weights import canonical_name
from titan.sim.record.microbatches import Microbatches, wrap_part
from titan.sim.record.trace import Allocate, Event, Trace, left, outer_numbers
from titan.step import train_step as module
from titan.step.resolved import ResolvedJob, resolve_job


@dataclass
class Program:
    """Program to record.

    Attributes:
        parts: the model, or this rank's pipeline stages.
        optimizers: its optimizers.
        train: runs the step of a number.
        clips: places of the functions that clip gradients: a module, and a name in it.
        pipeline: titan's pipeline, if the program has one.
        needs_two: whether a second step differs from the first.
        tokens: tokens of a step over all ranks, or 0.
    """

    parts: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    train: Callable[[int], Any]
    clips: Sequence[tuple[Any, str]] = field(
        default_factory=lambda: [(module, "clip_gradients")]
    )
    pipeline: Any = None
    needs_two: bool = True
    tokens: int = 0


def job_program(config: JobConfig, layout: Layout, device: Any, mesh: Any) -> Program:
    """Return the program of a job."""
    job = resolve_job(config, layout, device=device.type)
    train_step = module.build_train_step(job, device=device, mesh=mesh)
    train_step.is_fake = True
    batches = [train_step.task.fake_batch() for _ in range(layout.accumulation)]
    # A pipeline learns shapes in its first step, and an early update makes states in the backward pass.
    needs_two = train_step.pipeline is not None or train_step.in_backward is not None
    return Program(
        train_step.model_parts,
        [train_step.optimizer],
        lambda step: train_step.train(batches, step=step),
        pipeline=train_step.pipeline,
        needs_two=needs_two,
    )


def record_program(
    build: Callable[[], Program],
    rank: int,
    world_size: int,
    tracer: Any,
    steps: int,
    *,
    repeats: bool = True,
) -> Trace:
    """Return the trace of a rank in a step of a program. Errors of the program pass through.

    Args:
        build: builds the program.
        rank: global rank.
        world_size: number of ranks.
        tracer: the tracer.
        steps: number of steps to run. The last one counts; the second of two is left out if it
            would be like the first.
        repeats: whether to take such short cuts, and to repeat microbatches.
    """
    trace = Trace(rank, world_size)
    tracer.begin()
    with tracer:
        program = build()
        marks = _Marks(program, tracer)
        # Weights are the only memory so far, so all that was made is a parameter or a buffer.
        tracer.storages.categorize_new("parameters")
        for parameter, owner in marks.owners.items():
            tracer.storages.attribute([local(parameter)], owner)
        # Memory that remains after the construction: temporary memory is gone before the first step.
        trace.setup, trace.tokens = left(tracer.events), program.tokens
        tracer.microbatches = None
        pipeline = program.pipeline
        repeats = repeats and tracer.replays_programs
        if pipeline is not None and repeats and not pipeline.schedule.splits_backward:
            stages = {*pipeline.stages}
            orders = (
                o for o in pipeline.schedule.order if {action.stage for action in o} == stages
            )
            tracer.microbatches = Microbatches(tracer, next(orders))
        gc.collect()
        gc.disable()  # as the trainer does: garbage in cycles is not freed within a step
        shortcut = repeats and steps == 2 and not program.needs_two
        made: list[Event] = []
        with marks.set():
            if shortcut:
                tracer.events = made
                _make_states(program)
            for step in range(1, steps + 1):
                trace.step = tracer.begin_step()
                report = program.train(step)
                del report
                if tracer.microbatches is not None:
                    tracer.microbatches.end_step()
                tracer.scopes.phase = "forward"
                if step == 1:
                    # The states come last, as in a step that makes them in its update.
                    trace.first_step = sorted(
                        left([*made, *trace.step]),
                        # What the optimizer allocates comes last.
                        key=lambda e: isinstance(e, Allocate) and e.scope.phase == "optimizer",
                    )
                # Every step is like one that leaves all as it was.
                if shortcut and (marks.without_gradient or _is_closed(trace.step)):
                    break
        tracer.events = []  # later frees are no part of the trace
        gc.enable()
    trace.groups, trace.mesh = tracer.transfers.groups, tracer.transfers.degrees
    if shortcut and marks.without_gradient:  # such parameters have no states
        return record_program(build, rank, world_size, tracer, steps, repeats=False)
    return trace


def _make_states(program: Program) -> None:
    """Make the optimizer's states, so that the first step need not be recorded."""
    for part in program.parts:
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    for optimizer in program.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _is_closed(events: list[Event]) -> bool:
    """Return whether a step ends everything that it begins, and refers to nothing before it."""
    return not outer_numbers(events) and not left(events)


def cache_by_program(
    programs: Sequence[JobConfig], build: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that builds the model of each program on first use, and returns the same model later."""
    built: dict[int, Any] = {}
    # They differ in their models alone.
    numbers = {program.model.model_dump_json(): n for n, program in enumerate(programs)}

    def get(job: ResolvedJob) -> Any:
        number = numbers[job.config.model.model_dump_json()]
        if number not in built:
            built[number] = build(job)
        return built[number]

    return get


def _owners(program: Program) -> dict[Any, str]:
    """Return the module of each parameter and buffer."""
    return {
        tensor: canonical_name(name).rpartition(".")[0]
        for part in program.parts
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    }


class _Marks:
    """Marks of a program's clipping and updates, and of the memory of its gradients and states.

    Attributes:
        owners: module of each parameter and buffer.
        without_gradient: parameters that were updated without a gradient.
    """

    def __init__(self, program: Program, tracer: Any) -> None:
        self.program, self.tracer = program, tracer
        self.owners = _owners(program)
        self.without_gradient: list[Any] = []

    @contextmanager
    def set(self) -> Iterator[None]:
        """Watch the program within the context."""
        program = self.program
        for part in program.parts:
            self.tracer.scopes.watch(part)
        for optimizer in program.optimizers:
            optimizer.step = self._updating(optimizer, optimizer.step)
        if program.pipeline is not None:
            program.pipeline.loss_fn = wrap_part(self.tracer, program.pipeline.loss_fn, "L")
        with ExitStack() as replaced:
            # A program finds the function by its module's global name, so replacing that is enough.
            for where, name in program.clips:
                clip = self._clipping(getattr(where, name))
                replaced.enter_context(patch.object(where, name, clip))
            yield

    @torch.no_grad()  # or a DTensor's shard would be a new tensor with a gradient function
    def _mark_gradients(self) -> None:
        """Set the category of the gradients."""
        grads = (local(p.grad) for p in self.owners if p.grad is not None)
        self.tracer.storages.categorize(grads, "gradients")

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that clips gradients."""

        def clip_gradients(*args: Any, **kwargs: Any) -> Any:
            self._mark_gradients()
            with self.tracer.scopes.within(phase="clip"):
                return clip(*args, **kwargs)

        return clip_gradients

    def _updating(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap an optimizer's step."""
        storages = self.tracer.storages

        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            self._mark_gradients()
            own = (p for group in optimizer.param_groups for p in group["params"])
            self.without_gradient += (p for p in own if p.requires_grad and p.grad is None)
            storages.begin()
            with self.tracer.scopes.within(phase="optimizer"):
                result = step(*args, **kwargs)
            storages.categorize_new("optimizer")
            with torch.no_grad():
                for parameter, state in optimizer.state.items():
                    values = (v for v in state.values() if isinstance(v, torch.Tensor))
                    storages.attribute(map(local, values), self.owners.get(parameter, ""))
            return result

        return optimizer_step
