"""Replay of compiled programs: each runs once for each kind of inputs, and its events are copied.

Every block of a model runs the same program, in every microbatch. Its allocations, launches and
transfers follow from the shapes, strides and aliasing of its inputs alone, and running it on fake
tensors takes most of the time of a recording.

The first run gets stand-ins for the inputs, which have no other reference. So their end shows the
last use of an input. In every run the input itself is released at that point, and its memory ends
there if it has no other reference.

Example: a program computes y = mm(x, x) and z = relu(y), with x of shape (1024, 1024) in bfloat16,
2 MiB. In the first run x is in block 0. In the second run, which is a replay, x is in block 3:

    log of the first run             events of the first run      events of the second run
    Allocate 1 (y)                   Allocate 1, 2 MiB            Allocate 4, 2 MiB
    Launch aten::mm                  Launch aten::mm              Launch aten::mm
    [0]  (input 0 is released)       Free 0                       Free 3
    Allocate 2 (z)                   Allocate 2, 2 MiB            Allocate 5, 2 MiB
    Launch aten::relu                Launch aten::relu            Launch aten::relu
    Free 1 (y)                       Free 1                       Free 4

The output is described as ("made", 2) with the shape of z: a replay returns a new tensor of this
shape in block 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan.sim.record import device
from titan.sim.record.operators import tensors_in
from titan.sim.record.torch_compat import uncached_calls
from titan.sim.record.trace import (
    BEGINS,
    Allocate,
    AwaitEvent,
    AwaitWork,
    Event,
    Free,
    Launch,
    RecordEvent,
    Scope,
    Transfer,
    number_of,
)

if TYPE_CHECKING:
    from titan.sim.record.tracer import Tracer

_Memory = tuple[str, int]
"""Where an output is: ("input", its number), ("part", number of the input whose memory it shares),
or ("made", the block)."""


@dataclass(frozen=True)
class Shape:
    """Shape, strides and memory of a tensor.

    Attributes:
        dtype: Data type.
        shape: Lengths of the dimensions.
        stride: Strides in elements.
        offset: First element within the memory.
        num_bytes: Size of the memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Return the shape of a tensor."""
        storage = tensor.untyped_storage()
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(tensor.dtype, shape, stride, int(tensor.storage_offset()), storage.nbytes())

    @property
    def whole(self) -> bool:
        """Whether the tensor fills its memory."""
        # The last element's place: compare it with the end of the memory.
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return not self.offset and (last + 1) * self.dtype.itemsize == self.num_bytes

    def allocated(self) -> Tensor:
        """Return a new tensor of this shape in new memory."""
        if self.whole:
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=device.NAME
            )
        return self.within(torch.empty(self.num_bytes, dtype=torch.uint8, device=device.NAME))

    def within(self, memory: Tensor) -> Tensor:
        """Return a tensor of this shape in another tensor's memory.

        Autograd does not take it for a view, on which FSDP's hooks would fail.
        """
        with uncached_calls(memory):
            # set_ gives a tensor another one's memory and leaves no view relation, which as_strided
            # would.
            empty = torch.empty(0, dtype=self.dtype, device=device.NAME)
            return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class Repetition:
    """Emission of recorded events with new numbers.

    Attributes:
        shift: Distance of the rank that recorded the events from this process's rank.
        made: New blocks, by the keys that `emit` gets for the recorded ones.
        numbers: New events and works, by these keys.
    """

    def __init__(self, tracer: Tracer, shift: int) -> None:
        self.tracer, self.shift = tracer, shift
        self.made: dict[Any, Allocate] = {}
        self.numbers: dict[Any, int] = {}

    def emit(self, event: Event, key: Any, scope: Scope) -> None:
        """Record an event again.

        Args:
            event: The recorded event.
            key: Identity of the block, event or work that it names.
            scope: Scope of the new event.
        """
        tracer, transfers = self.tracer, self.tracer.transfers
        match event:
            case Launch():
                tracer.record(Launch(event.kernel, event.stream, scope))
            case Allocate():
                size, stream, category = event.size_bytes, event.stream, event.category
                self.made[key] = tracer.storages.allocate(size, stream, category, scope)
            case Free():
                tracer.record(Free(self.made[key].block))
            case Transfer():
                work = self._number(key, transfers.number_of_work)
                transfers.repeat(event, work=work, scope=scope, shift=self.shift)
            case AwaitWork():
                work = self._number(key, transfers.number_of_work)
                tracer.record(replace(event, work=work))
            case RecordEvent() | AwaitEvent():
                tracer.record(replace(event, event=self._number(key, device.number_of_event)))
            case _:
                tracer.record(replace(event))

    def _number(self, key: Any, new: Callable[[], int]) -> int:
        """Return the new number of a recorded event or work."""
        if key not in self.numbers:
            self.numbers[key] = new()
        return self.numbers[key]


@dataclass
class _RecordedRun:
    """Record of one run of a program.

    Attributes:
        shift: Distance of the rank that ran it from this process's rank.
        log: In order: events; pairs (module, whether it recomputes) that hold for the events after
            them; and lists of inputs
        that are released at this point.
        outputs: Memory and shape of each output. An output that is no tensor stands for itself.
    """

    shift: int
    log: list[Event | tuple[str, bool] | list[int]] = field(default_factory=list)
    outputs: list[tuple[_Memory, Shape] | Any] = field(default_factory=list)


class RecordedProgram:
    """Compiled program under a tracer.

    Attributes:
        call: The program. It takes its inputs in a list, which it empties, and calls
            `enter_module`.
    """

    def __init__(self, tracer: Tracer, call: Callable[[list[Any]], Any]) -> None:
        self.tracer, self.call = tracer, call
        self._boxed_call = True  # for torch: inputs are freed when they were last used
        self._runs: dict[Any, _RecordedRun] = {}
        self._notes: list[
            tuple[int, Any]
        ] = []  # entries of the log that are no events, with the position

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the program, or replay an earlier run with inputs of the same kind."""
        tracer = self.tracer
        self._notes.clear()
        with tracer.compiled():
            # An unfinished collective ties its result to the run outside, so that it cannot be
            # repeated.
            if not tracer.replays_programs or any(
                map(tracer.transfers.is_awaited, tensors_in(args))
            ):
                return [_plain(output) for output in self.call(args)]
            inputs, addresses = list(args), [_address(a) for a in args]
            # The caller's list must not keep the inputs alive: they end where the program is done
            # with them.
            args.clear()
            # Aliasing is a part of the kind: a program frees shared memory after the last input
            # that has it.
            first = {address: addresses.index(address) for address in addresses if address}
            # The current stream is a part too, since events name streams by number.
            kind = (device.current_stream(), *(_kind(a, first) for a in inputs))
            if kind in self._runs:
                return self._replay(self._runs[kind], inputs)
            run, outputs = self._record(inputs, addresses, first)
            if run is not None:
                self._runs[kind] = run
            return outputs

    def enter_module(self, module: str, recomputes: bool) -> None:
        """Note the module within the compiled one that the events from here on belong to.

        The program calls this.
        """
        self.tracer.scopes.enter_compiled(module, recomputes)
        self._notes.append((len(self.tracer.events), (module, recomputes)))

    # ---- the first run

    def _record(
        self, inputs: list[Any], addresses: list[int], first: dict[int, int]
    ) -> tuple[_RecordedRun | None, list[Any]]:
        """Run the program, and return its record and its outputs.

        The record is None if the program refers to something outside itself.
        """
        tracer, storages = self.tracer, self.tracer.storages
        stand_ins, input_of = list(inputs), dict[int, int]()  # by address of the stand-in

        # Called when a stand-in ends, so at the last use of the inputs that it stands for.
        def done_with(address: int, stand_in: int) -> None:
            del input_of[stand_in]
            same = [i for i, a in enumerate(addresses) if a == address]
            self._notes.append((len(tracer.events), same))
            for i in same:
                inputs[i] = None

        # The stand-ins have the sizes of the inputs' memory, and inputs that share memory share
        # one.
        with tracer.pause():
            for address, i in first.items():
                memory = torch.empty(
                    inputs[i].untyped_storage().nbytes(), dtype=torch.uint8, device=device.NAME
                )
                input_of[storages.stand_in(memory, partial(done_with, address))] = i
                for j, a in enumerate(addresses):
                    if a == address:
                        stand_ins[j] = Shape.of(inputs[j]).within(memory)
                del memory
        start = len(tracer.events)
        outputs, described = [], []
        # From here on, only the program holds the stand-ins.
        for output in self.call(stand_ins):
            if not isinstance(output, Tensor):
                described.append(output)
                outputs.append(output)
                continue
            shape, source = Shape.of(output), input_of.get(_address(output), -1)
            # New memory. Its block tells the later runs which allocation it is.
            if source < 0:
                described.append((("made", storages.block_of(output)), shape))
                outputs.append(_plain(output))
                continue
            # An output in an input's memory: the input itself, or a part of it.
            same = [i for i, a in enumerate(addresses) if a == addresses[source]]
            whole = next((i for i in same if Shape.of(inputs[i]) == shape), None)
            described.append((("part", source) if whole is None else ("input", whole), shape))
            outputs.append(self._of_input(described[-1], inputs))
        run = _RecordedRun(
            tracer.transfers.shift,
            _in_order(tracer.events[start:], self._notes, start),
            described,
        )
        # -1: memory that this run did not allocate. Such an output, a result under way or a wait
        # for something from before could not be repeated.
        blocks = [memory[1] for memory, _ in filter(_is_tensor, described)]
        awaited = any(map(tracer.transfers.is_awaited, tensors_in(outputs)))
        return None if -1 in blocks or awaited or _refers_outside(run) else run, outputs

    # ---- later ones

    def _replay(self, run: _RecordedRun, inputs: list[Any]) -> list[Any]:
        """Emit the events of an earlier run with new numbers, for other inputs of the same kind."""
        tracer, scopes = self.tracer, self.tracer.scopes
        # Inputs that come back as outputs must survive the releases in the log.
        kept = {
            o[0][1]: inputs[o[0][1]] for o in run.outputs if _is_tensor(o) and o[0][0] != "made"
        }
        repetition = Repetition(tracer, run.shift)
        current = scopes.current()
        known: dict[tuple[str, bool], Scope] = {}
        for entry in run.log:
            match entry:
                case tuple():
                    if entry not in known:
                        # A Scope is looked up once for each module, and shared by its events.
                        scopes.enter_compiled(*entry)
                        known[entry] = scopes.current()
                    current = known[entry]
                case list():
                    # The inputs' memory ends here if nobody else holds it, and storages.py records
                    # that.
                    for i in entry:
                        inputs[i] = None
                case _:
                    repetition.emit(entry, number_of(entry), current)
        # Outputs: of each new memory one tensor without a record, adopted as the block allocated
        # above. Others in it become parts.
        outputs: list[Any] = []
        memories: dict[_Memory, Tensor] = {}
        for output in run.outputs:
            if not _is_tensor(output):
                outputs.append(output)
            elif output[0][0] != "made":
                outputs.append(self._of_input(output, kept))
            elif (memory := output[0]) in memories:
                with tracer.pause():
                    outputs.append(output[1].within(memories[memory]))
            else:
                with tracer.pause():
                    memories[memory] = output[1].allocated()
                tracer.storages.adopt(memories[memory], repetition.made["block", memory[1]])
                outputs.append(memories[memory])
        return outputs

    def _of_input(self, output: tuple[_Memory, Shape], inputs: Any) -> Tensor:
        """Return an output that is an input, or a part of an input's memory."""
        (what, number), shape = output
        if what == "input":
            return inputs[number]
        with self.tracer.pause():
            return shape.within(inputs[number])


def _is_tensor(output: Any) -> bool:
    """Return whether an output's description describes a tensor."""
    return isinstance(output, tuple)


def _address(value: Any) -> int:
    """Return the address of a tensor's memory on the device, or 0 for other values."""
    # pyrefly: ignore[missing-attribute]
    if isinstance(value, Tensor) and value.fake_device.type == device.NAME:
        return value.untyped_storage()._cdata
    return 0


def _kind(value: Any, first: dict[int, int]) -> Any:
    """Return the properties of an input that the run depends on.

    Args:
        value: The input.
        first: First input at each address.
    """
    if not isinstance(value, Tensor):
        return value
    return (first.get(_address(value), -1), Shape.of(value))


def _in_order(
    events: list[Event], notes: list[tuple[int, Any]], start: int
) -> list[Event | tuple[str, bool] | list[int]]:
    """Return the log of a run: events and notes by position.

    The end of memory that began before the run is left out, since it may not end there again.
    """
    allocated_here = {event.block for event in events if isinstance(event, Allocate)}
    order: list[Any] = []
    position = 0
    # Events and notes, merged by number. Events are copied, since their categories are still set
    # later on.
    for number, note in [*notes, (start + len(events), None)]:
        for event in events[position : number - start]:
            if not isinstance(event, Free) or event.block in allocated_here:
                order.append(replace(event))  # noqa: PERF401
        position = number - start
        if note is not None:
            order.append(note)
    return order


def _refers_outside(run: _RecordedRun) -> bool:
    """Return whether a run waits for something that began before it."""
    events = [e for e in run.log if not isinstance(e, tuple | list)]
    begun = {number_of(e) for e in events if isinstance(e, BEGINS)}
    return any(
        number_of(e) not in begun for e in events if isinstance(e, AwaitWork | AwaitEvent)
    )


def _plain(output: Any) -> Any:
    """Return an output as a plain tensor, so that autograd does not take it for a view."""
    if not isinstance(output, Tensor) or not output._is_view():
        return output
    return Shape.of(output).within(output)
