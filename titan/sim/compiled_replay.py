"""Compiled programs that are run once for each kind of inputs: after that, what they did is told again.

Every block of a model runs the same program, in every microbatch. What it allocates, launches and sends follows from the shapes,
strides and aliasing of its inputs alone, and running it on fake tensors is most of what a recording takes. The first run is
on stand-ins for the inputs that nobody else holds. So it shows where the program is done with an input, and in every run the
input itself is let go of there: it ends then if nobody else holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import device
from .torch_compat import no_memory_of_calls
from .trace import (  # fmt: skip
    Allocate,
    AwaitEvent,
    AwaitWork,
    Event,
    Free,
    Launch,
    RecordEvent,
    Scope,
    Transfer,
)

if TYPE_CHECKING:
    from .tracer import Tracer

_Memory = tuple[str, int]
"""Of an output: ("input", its number), ("part", the number of an input whose memory it shares), or ("made", the block)."""


@dataclass(frozen=True)
class _Shape:
    """Of a tensor. whole: it takes all of its memory, which is then just so large."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        storage = tensor.untyped_storage()
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(tensor.dtype, shape, stride, int(tensor.storage_offset()), storage.nbytes())

    @property
    def whole(self) -> bool:
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return not self.offset and (last + 1) * self.dtype.itemsize == self.num_bytes

    def allocated(self) -> Tensor:
        """In memory of its own."""
        if self.whole:
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=device.NAME
            )
        return self.within(torch.empty(self.num_bytes, dtype=torch.uint8, device=device.NAME))

    def within(self, memory: Tensor) -> Tensor:
        """In memory of another tensor, without autograd's taking it for a view: FSDP's hooks would trip over one."""
        with no_memory_of_calls(memory):
            empty = torch.empty(0, dtype=self.dtype, device=device.NAME)
            return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)  # pyright: ignore


@dataclass
class _Run:
    """What a program did, in order: an event; (module, whether it recomputes) that the next ones are of; numbers of inputs
    that are done with. outputs: what is no tensor is there itself. shift: of the rank that did it."""

    shift: int
    told: list[Event | tuple[str, bool] | list[int]] = field(default_factory=list)
    outputs: list[tuple[_Memory, _Shape] | Any] = field(default_factory=list)


class RecordedProgram:
    """A compiled program under a recorder. call: takes inputs in a list, which it empties, and calls `at`."""

    def __init__(self, tracer: Tracer, call: Callable[[list[Any]], Any]) -> None:
        self.tracer, self.call = tracer, call
        self._boxed_call = True  # for torch: inputs are freed when they were last used
        self._runs: dict[Any, _Run] = {}
        self._marks: list[tuple[int, Any]] = []  # what is no event, and the number of the next one

    def __call__(self, args: list[Any]) -> list[Any]:
        tracer = self.tracer
        self._marks.clear()
        with tracer.compiled():
            if not tracer.remembers or any(map(tracer.transfers.is_awaited, _tensors(args))):
                return [_plain(output) for output in self.call(args)]
            given, addresses = list(args), [_address(a) for a in args]
            args.clear()
            first = {address: addresses.index(address) for address in addresses if address}
            kind = (device.current_stream(), *(_kind(a, first) for a in given))
            if kind in self._runs:
                return self._tell(self._runs[kind], given)
            run, outputs = self._run(given, addresses, first)
            if run is not None:
                self._runs[kind] = run
            return outputs

    def at(self, module: str, recomputes: bool) -> None:
        """What follows is of a module within the compiled one."""
        self.tracer.scopes.enter_compiled(module, recomputes)
        self._marks.append((len(self.tracer.events), (module, recomputes)))

    # ---- the first run

    def _run(
        self, given: list[Any], addresses: list[int], first: dict[int, int]
    ) -> tuple[_Run | None, list[Any]]:
        """None for a run that takes part in something outside of it."""
        tracer, storages = self.tracer, self.tracer.storages
        stand_ins, inputs = list(given), dict[int, int]()  # by address of the stand-in

        def done_with(address: int, stand_in: int) -> None:
            del inputs[stand_in]
            same = [i for i, a in enumerate(addresses) if a == address]
            self._marks.append((len(tracer.events), same))
            for i in same:
                given[i] = None

        with tracer.pause():
            for address, i in first.items():
                size = given[i].untyped_storage().nbytes()
                memory = torch.empty(size, dtype=torch.uint8, device=device.NAME)
                inputs[storages.stand_in(memory, partial(done_with, address))] = i
                for j, a in enumerate(addresses):
                    if a == address:
                        stand_ins[j] = _Shape.of(given[j]).within(memory)
                del memory
        start = len(tracer.events)
        outputs, told = [], []
        for output in self.call(stand_ins):
            if not isinstance(output, Tensor):
                told.append(output)
                outputs.append(output)
                continue
            shape, source = _Shape.of(output), inputs.get(_address(output), -1)
            if source < 0:
                told.append((("made", storages.block_of(output)), shape))
                outputs.append(_plain(output))
                continue
            same = [i for i, a in enumerate(addresses) if a == addresses[source]]
            whole = next((i for i in same if _Shape.of(given[i]) == shape), None)
            told.append((("part", source) if whole is None else ("input", whole), shape))
            outputs.append(self._of_input(told[-1], given))
        run = _Run(
            tracer.transfers.shift, _in_order(tracer.events[start:], self._marks, start), told
        )
        blocks = [memory[1] for memory, _ in filter(_is_told, told)]
        awaited = any(map(tracer.transfers.is_awaited, _tensors(outputs)))
        return None if -1 in blocks or awaited or _refers_outside(run) else run, outputs

    # ---- later ones

    def _tell(self, run: _Run, given: list[Any]) -> list[Any]:
        tracer = self.tracer
        storages, scopes = tracer.storages, tracer.scopes
        kept = {o[0][1]: given[o[0][1]] for o in run.outputs if _is_told(o) and o[0][0] != "made"}
        made: dict[int, Allocate] = {}
        numbers: dict[tuple[str, int], int] = {}
        here = scopes.current()
        known: dict[tuple[str, bool], Scope] = {}
        for it in run.told:
            match it:
                case tuple():
                    if it not in known:
                        scopes.enter_compiled(*it)
                        known[it] = scopes.current()
                    here = known[it]
                case list():
                    for i in it:
                        given[i] = None
                case Launch():
                    tracer.record(Launch(it.kernel, it.stream, here))
                case Allocate():
                    made[it.block] = storages.allocate(it.size_bytes, it.stream, it.category, here)
                case Free():
                    tracer.record(Free(made[it.block].block))
                case Transfer():
                    work = self._work(numbers, it.work)
                    tracer.transfers.again(it, work=work, scope=here, shift=run.shift)
                case AwaitWork():
                    tracer.record(replace(it, work=self._work(numbers, it.work)))
                case RecordEvent() | AwaitEvent():
                    key = ("event", it.event)
                    if key not in numbers:
                        numbers[key] = device.number_of_event()
                    tracer.record(replace(it, event=numbers[key]))
                case _:
                    tracer.record(replace(it))
        outputs: list[Any] = []
        memories: dict[_Memory, Tensor] = {}
        for output in run.outputs:
            if not _is_told(output):
                outputs.append(output)
            elif output[0][0] != "made":
                outputs.append(self._of_input(output, kept))
            elif (memory := output[0]) in memories:
                with tracer.pause():
                    outputs.append(output[1].within(memories[memory]))
            else:
                with tracer.pause():
                    memories[memory] = output[1].allocated()
                storages.adopt(memories[memory], made[memory[1]])
                outputs.append(memories[memory])
        return outputs

    def _of_input(self, told: tuple[_Memory, _Shape], given: Any) -> Tensor:
        (what, number), shape = told
        if what == "input":
            return given[number]
        with self.tracer.pause():
            return shape.within(given[number])

    def _work(self, numbers: dict[tuple[str, int], int], work: int) -> int:
        key = ("work", work)
        if key not in numbers:
            numbers[key] = self.tracer.transfers.number_of_work()
        return numbers[key]


def _is_told(output: Any) -> bool:
    return isinstance(output, tuple)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor)]


def _address(value: Any) -> int:
    """Of the memory on the device; 0: it has none."""
    if isinstance(value, Tensor) and value.fake_device.type == device.NAME:  # pyright: ignore
        return value.untyped_storage()._cdata
    return 0


def _kind(value: Any, first: dict[int, int]) -> Any:
    """What a program's run depends on. first: the input that an address comes with first."""
    if not isinstance(value, Tensor):
        return value
    return (first.get(_address(value), -1), _Shape.of(value))


def _in_order(
    events: list[Event], marks: list[tuple[int, Any]], start: int
) -> list[Event | tuple[str, bool] | list[int]]:
    """Copies of events, since categories change later; without the end of what was there before, which may not come again."""
    made = {event.block for event in events if isinstance(event, Allocate)}
    order: list[Any] = []
    position = 0
    for number, mark in [*marks, (start + len(events), None)]:
        for event in events[position : number - start]:
            if not isinstance(event, Free) or event.block in made:
                order.append(replace(event))  # noqa: PERF401
        position = number - start
        if mark is not None:
            order.append(mark)
    return order


def _refers_outside(run: _Run) -> bool:
    """Whether it waits for something from before."""
    works = {e.work for e in run.told if isinstance(e, Transfer)}
    events = {e.event for e in run.told if isinstance(e, RecordEvent)}
    return any(
        (isinstance(e, AwaitWork) and e.work not in works)
        or (isinstance(e, AwaitEvent) and e.event not in events)
        for e in run.told
    )


def _plain(output: Any) -> Any:
    """Autograd must not take what a program returns for a view."""
    if not isinstance(output, Tensor) or not output._is_view():
        return output
    return _Shape.of(output).within(output)
