"""Device memory of a recorded program: every storage from its allocation to its end, and its category.

A storage ends with its last tensor, which a weak reference notices. FSDP frees and takes memory
within one storage, by resizing it. The category of memory is known later than its allocation, so an
Allocate event gets its category when it is known, at the latest when the step ends:

    parameters    was there when the program was built
    activations   was made in a forward pass and there when a backward pass began
    unsharded     was gathered by FSDP, or waits to be reduced and scattered by it
    gradients     is some parameter's gradient, or was made in one backward pass and there when the next began: FSDP adds up
                  whole gradients over microbatches
    optimizer     was made by the optimizer and outlived its step
    temporary     all other memory
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from titan.sim.record.trace import Allocate, Category, Event, Free, Scope


class _Storage:
    """Storage with memory.

    Attributes:
        event: its latest allocation; None while it has no memory.
        ref: weak reference that notices its end.
        category: its category, once known.
    """

    __slots__ = ("category", "event", "ref")

    def __init__(self, event: Allocate | None, ref: Any) -> None:
        self.event, self.ref = event, ref
        self.category: Category | None = None


class Storages:
    """All storages of a program.

    Attributes:
        record: receives events.
        scope: returns the current scope.
        stream: returns the current stream.
    """

    def __init__(
        self,
        record: Callable[[Event], None],
        *,
        scope: Callable[[], Scope],
        stream: Callable[[], int],
    ) -> None:
        self.record, self.scope, self.stream = record, scope, stream
        self._blocks = count()
        self._live: dict[int, _Storage] = {}  # by address
        self._made: dict[int, Allocate] = {}  # since the pass began, by block

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that an operation returned. Its storage may be new."""
        # _cdata is the C++ object's address. Python makes a new wrapper for it each time one is
        # asked for.
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._take(self._watch(storage), storage.nbytes())

    def adopt(self, tensor: Tensor, event: Allocate) -> _Storage:
        """Assign an allocation that was recorded before to a tensor's storage.

        Return the storage's entry.
        """
        entry = self._watch(tensor.untyped_storage())
        entry.event = event
        self._made[event.block] = event
        return entry

    def _watch(self, storage: Any, done: Callable[[int], None] | None = None) -> _Storage:
        """Add an entry for a storage, and record its end when it comes."""
        address = storage._cdata

        # The address may already belong to a newer storage, whose predecessor's reference ends
        # late.
        def end(_: Any) -> None:
            if self._live.get(address) is entry:
                self._release(self._live.pop(address))
                if done is not None:
                    done(address)

        entry = self._live[address] = _Storage(None, weakref.ref(storage, end))
        return entry

    def stand_in(self, memory: Tensor, done: Callable[[int], None]) -> int:
        """Watch memory that is not recorded.

        Return its address; `done` is called with the address when the memory ends.
        """
        self._watch(memory.untyped_storage(), done)
        return memory.untyped_storage()._cdata

    def block_of(self, tensor: Tensor) -> int:
        """Return the block of a tensor's memory, or -1 if it has none here."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry.event.block if entry and entry.event else -1

    def resize(self, storage: Any, size: int) -> None:
        """Note that a storage is about to be resized, which is how FSDP frees and takes memory."""
        entry = self._live.get(storage._cdata)
        # A storage that is not on the device, or that has this size already, does not change.
        if entry is None or (entry.event.size_bytes if entry.event else 0) == size:
            return
        entry.category = "unsharded"
        self._release(entry)
        self._take(entry, size)

    def allocate(self, size: int, stream: int, category: Category, scope: Scope) -> Allocate:
        """Record an allocation under a new number, and return it."""
        event = Allocate(next(self._blocks), size, stream, category, scope)
        self.record(event)
        return event

    def _take(self, entry: _Storage, size: int) -> None:
        """Record memory for a storage."""
        if not size:
            return
        event = self.allocate(size, self.stream(), entry.category or "temporary", self.scope())
        entry.event = event
        self._made[event.block] = event

    def _release(self, entry: _Storage) -> None:
        """Record the end of a storage's memory. Its category is final then."""
        # Memory ends here: its category is final.
        if entry.event is None:
            return
        self._made.pop(entry.event.block, None)
        if entry.category:
            entry.event.category = entry.category
        self.record(Free(entry.event.block))
        entry.event = None

    # ---- categories ----------------------------------------------------------------------------

    def categorize(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of these tensors' memory, also in events that were recorded before."""
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            # The first mark holds, except that gradients win: their memory may have served another
            # use before.
            if entry is not None and (entry.category is None or category == "gradients"):
                entry.category = category
                if entry.event is not None:
                    entry.event.category = category

    def attribute(self, tensors: Iterable[Tensor], module: str) -> None:
        """Charge these tensors' memory to a module."""
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.event is not None:
                entry.event.scope = replace(entry.event.scope, module=module)

    def categorize_new(self, category: Category) -> None:
        """Set the category of memory that was made since the last `begin`, still exists and has no category."""
        for entry in self._live.values():
            if (
                entry.event is not None
                and entry.event.block in self._made
                and not entry.category
            ):
                made_in = entry.event.scope.phase
                added_up = category == "activations" and made_in == "backward"
                entry.category = entry.event.category = "gradients" if added_up else category
        self._made.clear()

    def forget(self) -> None:
        """Forget all storages, since another program begins."""
        if self._live:
            # Cycles of the old program would otherwise end as events of the new one.
            gc.collect()
        # Later ends must not be recorded into the new program: `end` above finds nothing.
        self._live.clear()
        self._made.clear()

    def begin(self) -> None:
        """Begin a pass. `categorize_new` concerns memory that is made from here on."""
        self._made.clear()
