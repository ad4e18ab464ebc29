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

The output is described as ("block", 2) with the shape of z: a replay returns a new tensor of this
shape in block 5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan.sim.record import device
from titan.sim.record.operators import tensors_in
from titan.sim.record.torch_compat import uncached_calls
from titan.sim.record.trace import (
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
    outer_numbers,
    scope_of,
)

if TYPE_CHECKING:
    from titan.sim.record.tracer import Tracer


@dataclass(frozen=True)
class Shape:
    """Shape, strides and memory of a tensor.

    Attributes:
        dtype: data type.
        shape: lengths of the dimensions.
        stride: strides in elements.
        offset: first element within the memory.
        num_bytes: size of the memory.
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


@dataclass(frozen=True)
class Output:
    """Tensor that a recorded part of a program returned.

    Attributes:
        memory: place of its memory: ("block", number) of a recorded allocation. Of a program also
            ("input", number) if it is an input, and ("part", number) if it shares an input's memory.
        shape: its shape.
        requires_grad: whether it requires a gradient.
    """

    memory: tuple[str, int]
    shape: Shape
    requires_grad: bool = False


class Repetition:
    """Emission of recorded events with new numbers.

    Attributes:
        shift: distance of the rank that recorded the events from this process's rank.
        made: new blocks, by the numbers of the recorded ones.
        numbers: new events and works, by the recorded ones.
        held: tensors in new blocks, each with the entry that follows its memory.
    """

    def __init__(self, tracer: Tracer, shift: int) -> None:
        self.tracer, self.shift = tracer, shift
        self.made: dict[Any, Allocate] = {}
        self.numbers: dict[Any, int] = {}
        self.held: dict[Any, tuple[Any, Tensor]] = {}

    def emit(self, event: Event, scope: Scope) -> None:
        """Record an event again.

        Args:
            event: the recorded event.
            scope: scope of the new event.
        """
        tracer, transfers, key = self.tracer, self.tracer.transfers, number_of(event)
        match event:
            case Launch():
                tracer.record(Launch(event.kernel, event.stream, scope))
            case Allocate():
                size, stream, category = event.size_bytes, event.stream, event.category
                self.made[key] = tracer.storages.allocate(size, stream, category, scope)
            case Free():
                # The tensor's memory ends here, even if the tensor has other references.
                if key in self.held:
                    self.held.pop(key)[0].event = None
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
                tracer.record(event)

    def _number(self, key: Any, new: Callable[[], int]) -> int:
        """Return the new number of a recorded event or work."""
        if key not in self.numbers:
            self.numbers[key] = new()
        return self.numbers[key]

    def tensor(self, output: Output) -> Tensor:
        """Return a tensor like a recorded one, in the block that was emitted in place of its block."""
        with self.tracer.pause():
            if output.memory in self.held:
                return output.shape.within(self.held[output.memory][1])
            made = output.shape.allocated()
        entry = self.tracer.storages.adopt(made, self.made[output.memory])
        self.held[output.memory] = entry, made
        return made


@dataclass
class _RecordedRun:
    """Record of one run of a program.

    Attributes:
        shift: distance of the rank that ran it from this process's rank.
        scope: scope in which it ran.
        log: in order: events, and lists of inputs that are released at this point.
        outputs: outputs. A value that is no tensor stands for itself.
    """

    shift: int
    scope: Scope
    log: list[Event | list[int]]
    outputs: list[Output | Any]


class RecordedProgram:
    """Compiled program under a tracer.

    Attributes:
        call: the program. It takes its inputs in a list, which it empties.
    """

    def __init__(self, tracer: Tracer, call: Callable[[list[Any]], Any]) -> None:
        self.tracer, self.call = tracer, call
        self._boxed_call = True  # for torch: inputs are freed when they were last used
        self._runs: dict[Any, _RecordedRun] = {}

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the program, or replay an earlier run with inputs of the same kind."""
        tracer = self.tracer
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
            outputs, run = self._record(inputs, addresses, first)
            # A result under way, or what refers to something from before, could not be repeated.
            blocks = [o.memory[1] for o in run.outputs if isinstance(o, Output)]
            awaited = any(map(tracer.transfers.is_awaited, tensors_in(outputs)))
            if not awaited and -1 not in blocks and not outer_numbers(run.log):
                self._runs[kind] = run
            return outputs

    # ---- the first run

    def _record(
        self, inputs: list[Any], addresses: list[int], first: dict[int, int]
    ) -> tuple[list[Any], _RecordedRun]:
        """Run the program, and return its outputs and its record."""
        tracer, storages = self.tracer, self.tracer.storages
        stand_ins, input_of = list(inputs), dict[int, int]()  # by address of the stand-in
        log: list[Any] = []

        # Called when a stand-in ends, so at the last use of the inputs that it stands for.
        def done_with(address: int, stand_in: int) -> None:
            del input_of[stand_in]
            same = [i for i, a in enumerate(addresses) if a == address]
            log.append(same)
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
        scope, before = tracer.scopes.current(), tracer.events
        tracer.events = log
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
                described.append(Output(("block", storages.block_of(output)), shape))
                outputs.append(_plain(output))
                continue
            # An output in an input's memory: the input itself, or a part of it.
            same = [i for i, a in enumerate(addresses) if a == addresses[source]]
            whole = next((i for i in same if Shape.of(inputs[i]) == shape), None)
            place = ("part", source) if whole is None else ("input", whole)
            described.append(Output(place, shape))
            outputs.append(self._of_input(described[-1], inputs))
        tracer.events = before
        before += (entry for entry in log if not isinstance(entry, list))
        # Memory from before may not end there again. Events are copied, since their categories are
        # still set later on.
        new = {entry.block for entry in log if isinstance(entry, Allocate)}
        log = [
            replace(entry) if isinstance(entry, Event) else entry
            for entry in log
            if not isinstance(entry, Free) or entry.block in new
        ]
        return outputs, _RecordedRun(tracer.transfers.shift, scope, log, described)

    # ---- later ones

    def _replay(self, run: _RecordedRun, inputs: list[Any]) -> list[Any]:
        """Emit the events of an earlier run with new numbers, for other inputs of the same kind."""
        scopes = self.tracer.scopes

        # Looked up once for each recorded scope, and shared by its events.
        @functools.cache
        def here(recorded: Scope) -> Scope:
            inner = recorded.module[len(run.scope.module) + 1 :]
            scopes.enter_compiled(inner, recorded.phase != run.scope.phase)
            return scopes.current()

        # Inputs that come back as outputs must survive the releases in the log.
        outside = (o.memory for o in run.outputs if isinstance(o, Output))
        kept = {number: inputs[number] for what, number in outside if what != "block"}
        repetition = Repetition(self.tracer, run.shift)
        for entry in run.log:
            if isinstance(entry, list):
                # The inputs' memory ends here if nobody else holds it, and storages.py records
                # that.
                for i in entry:
                    inputs[i] = None
            else:
                scope = scope_of(entry)
                repetition.emit(entry, scope and here(scope))
        outputs: list[Any] = []
        for output in run.outputs:
            if not isinstance(output, Output):
                outputs.append(output)
            elif output.memory[0] == "block":
                outputs.append(repetition.tensor(output))
            else:
                outputs.append(self._of_input(output, kept))
        return outputs

    def _of_input(self, output: Output, inputs: Any) -> Tensor:
        """Return an output that is an input, or a part of an input's memory."""
        what, number = output.memory
        if what == "input":
            return inputs[number]
        with self.tracer.pause():
            return output.shape.within(inputs[number])


def _address(value: Any) -> int:
    """Return the address of a tensor's memory on the device, or 0 for other values."""
    # pyrefly: ignore[missing-attribute]
    if isinstance(value, Tensor) and value.fake_device.type == device.NAME:
        return value.untyped_storage()._cdata
    return 0


def _kind(value: Any, first: dict[int, int]) -> Any:
    """Return the properties of an input that the run depends on.

    Args:
        value: the input.
        first: first input at each address.
    """
    if not isinstance(value, Tensor):
        return value
    return (first.get(_address(value), -1), Shape.of(value))


def _plain(output: Any) -> Any:
    """Return an output as a plain tensor, so that autograd does not take it for a view."""
    if not isinstance(output, Tensor) or not output._is_view():
        return output
    return Shape.of(output).within(output)
