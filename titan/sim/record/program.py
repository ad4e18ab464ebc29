"""Record one program by one rank: build it, run its steps, and tell the tracer what torch does not: clipping, updates, states.

The program is that of titan.train_step.build_train_step. The optimizer makes its states first, as in the first step. If a step
then ends what it begins and refers to nothing else, every later one is like it. If not, a second one runs: the first
one then has learned the shapes that pipeline stages exchange, and left what steps leave to the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from titan import train_step as module
from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.data.packing import Batch
from titan.optim.adam import local
from titan.parallel.init_weights import canonical_name
from titan.sim.record.microbatches import Microbatches, repeating
from titan.sim.record.trace import BEGINS, Allocate, Event, Free, Trace, number_of


def record_program(
    config: JobConfig,
    rank: int,
    layout: Layout,
    tracer: Any,
    device: Any,
    mesh: Any,
    steps: int,
    *,
    repeats: bool = True,
) -> Trace:
    """Return what a rank does in a step of a program. Raises what stops the program.

    steps: how many to run. The last one counts, but of two the second is left out where it would be like the first.
    repeats: take such short cuts, and have microbatches repeat others.
    """
    trace = Trace(rank, layout.world_size)
    tracer.begin()
    with tracer:
        train_step = module.build_train_step(config, device=device, mesh=mesh)
        # Weights are the only memory so far, so all that was made is a parameter or a buffer.
        tracer.storages.mark_made("parameters")
        for parameter, owner in _owners(train_step).items():
            tracer.storages.attribute([local(parameter)], owner)
        # What stays of the construction: temporary memory is gone before the first step.
        trace.setup = _left(tracer.events)
        batches = [_fake_batch(config) for _ in range(layout.accumulation)]
        tracer.microbatches = None
        pipeline = train_step.pipeline
        repeats = repeats and tracer.remembers
        if pipeline is not None and repeats and not pipeline.schedule.splits_backward:
            stages = {*pipeline.stages}
            orders = (
                o for o in pipeline.schedule.order if {action.stage for action in o} == stages
            )
            tracer.microbatches = Microbatches(tracer, next(orders))
        gc.collect()
        gc.disable()  # as the trainer does: garbage in cycles is not freed within a step
        # A pipeline learns shapes in its first step, and an early update makes states in the backward pass.
        needs_two = pipeline is not None or train_step.early_step is not None
        shortcut = repeats and steps == 2 and not needs_two
        made: list[Event] = []
        with _watched(train_step, module, tracer) as without_gradient:
            if shortcut:
                tracer.events = made
                _make_states(train_step)
            for step in range(1, steps + 1):
                trace.step = tracer.begin_step()
                report = train_step.train(batches, step=step)
                del report
                if tracer.microbatches is not None:
                    tracer.microbatches.end_step()
                tracer.scopes.phase = "forward"
                if step == 1:
                    trace.first_step = _left([*made, *trace.step])
                # Every step is like one that leaves all as it was.
                if shortcut and (without_gradient or _is_closed(trace.step)):
                    break
        tracer.events = []  # what is freed from here on is no part of it
        gc.enable()
    trace.groups = tracer.transfers.groups
    if shortcut and without_gradient:  # those have no states
        return record_program(config, rank, layout, tracer, device, mesh, steps, repeats=False)
    return trace


def _make_states(train_step: Any) -> None:
    """Have the optimizer make its states, as in the first step, which then need not be recorded."""
    for part in train_step.model_parts:
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    train_step.optimizer.step()
    train_step.optimizer.zero_grad()


def _is_closed(events: list[Event]) -> bool:
    """Return whether a step ends what it begins, and refers to nothing else."""
    begun = {number_of(e) for e in events if isinstance(e, BEGINS)}
    used = {number_of(e) for e in events if not isinstance(e, BEGINS)} - {None}
    blocks = {key for key in begun if key and key[0] == "block"}
    return used <= begun and blocks <= used


def once_for_each(programs: Sequence[JobConfig], build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds the model of each program when it is first asked for."""
    built: dict[int, Any] = {}
    numbers = {id(program): number for number, program in enumerate(programs)}

    def get(config: JobConfig, mesh: Any) -> Any:
        number = numbers[id(config)]
        if number not in built:
            built[number] = build(config, mesh)
        return built[number]

    return get


def _left(events: list[Event]) -> list[Event]:
    """Return the allocations that are not freed."""
    freed = {e.block for e in events if isinstance(e, Free)}
    return [e for e in events if isinstance(e, Allocate) and e.block not in freed]


def _owners(train_step: Any) -> dict[Any, str]:
    """Return the module of each parameter, and of each block's buffers."""

    return {
        parameter: canonical_name(name).rpartition(".")[0]
        for part in train_step.model_parts
        for name, parameter in (*part.named_parameters(), *part.layers.named_buffers("layers"))
    }


@contextmanager
def _watched(train_step: Any, module: Any, tracer: Any) -> Iterator[list[Any]]:
    """Tell the tracer when the program clips and updates, and which memory holds gradients and states.

    Yields the parameters, as they come, that were updated without a gradient.
    """

    scopes, storages = tracer.scopes, tracer.storages
    for part in train_step.model_parts:
        scopes.watch(part)
    owners = _owners(train_step)
    parameters = list(owners)
    without_gradient: list[Any] = []

    @torch.no_grad()  # or a DTensor's shard would be a new tensor with a gradient function
    def mark_gradients() -> None:
        grads = (p.grad for p in parameters if p.grad is not None)
        storages.mark((local(grad) for grad in grads), "gradients")

    # The train step finds `clip_gradients` by its module's global name, so replacing that is
    # enough.
    clip, step = module.clip_gradients, train_step.optimizer.step

    def clip_gradients(*args: Any, **kwargs: Any) -> Any:
        mark_gradients()
        with scopes.within(phase="clip"):
            return clip(*args, **kwargs)

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        mark_gradients()
        without_gradient.extend(p for p in parameters if p.requires_grad and p.grad is None)
        storages.begin()
        with scopes.within(phase="optimizer"):
            result = step(*args, **kwargs)
        storages.mark_made("optimizer")
        attribute_states()
        return result

    @torch.no_grad()
    def attribute_states() -> None:
        for parameter, state in train_step.optimizer.state.items():
            tensors = (local(value) for value in state.values() if isinstance(value, torch.Tensor))
            storages.attribute(tensors, owners[parameter])

    module.clip_gradients = clip_gradients
    train_step.optimizer.step = optimizer_step
    if train_step.pipeline is not None:
        train_step.pipeline.loss_fn = repeating(tracer, train_step.pipeline.loss_fn, "L")
    try:
        yield without_gradient
    finally:
        module.clip_gradients = clip


def _fake_batch(config: JobConfig) -> Any:
    """Return a batch as the loader would: whole sequences on the host."""

    def numbers() -> Any:
        shape = (config.training.local_batch_size, config.training.seq_len)
        return torch.zeros(shape, dtype=torch.int64)

    ids = numbers() if config.data.document_mask else None
    return Batch(
        tokens_BS=numbers(),
        labels_BS=numbers(),
        positions_BS=numbers() if config.data.reset_positions else None,
        document_ids_BS=ids,
        document_ends_BN=None if ids is None else ids[:, : -(-ids.shape[1] // 256)].int(),
    )
