"""Loader that prepares the batches of each step ahead of time. One integer is its position.

With p samples consumed so far, micro-batch a (of A), data-parallel rank r (of R) and local sample j (of B), the global
sample is p + a*R*B + r*B + j, and a step consumes A*R*B samples. So the samples of a step do not depend on the split into
ranks and accumulation, and a run that resumes on another number of ranks continues exactly. Streams are the exception: each
rank has its part of them, and a bookmark in that part (streams.py).

Samples to leave out (titan/ops/recovery.py chooses them) are ranges of numbers. A step that would touch such a range begins
after it, in the same way on every layout.

A phase of the run (titan/config/phases.py) may change the length of sequences and the weights of sources. Samples are then
numbered again from the phase's first position, and the state contains the `DatasetPhase`: the position of each source in tokens.

A background thread prepares some steps ahead. They are not part of the state: `state_dict()` is the state after the last step
that was handed out.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import DatasetPhase, Samples, ShardSpec, State, TensorBatch

Collate = Callable[..., TensorBatch]
B = TypeVar("B", bound=TensorBatch)


@dataclass(frozen=True)
class _Step(Generic[B]):
    """Batches of a step from the background thread, and the loader's state after the step."""

    batches: list[B]
    state: State


class Loader(Generic[B]):
    """Batches of one data-parallel rank, step by step. Call `close()` at the end."""

    def __init__(
        self,
        samples: Samples,
        *,
        share: ShardSpec,
        collate: Callable[..., B],
        dataloader: s.DataloaderSection,
        accumulation: int = 1,
        order: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the loader at position 0. `load_state_dict` moves it.

        Args:
            samples: the samples to read.
            share: this rank's share of the samples.
            collate: makes a batch from the result of `samples.get`, given `first_sample`, the number of its first sample.
            dataloader: the section [training.dataloader].
            accumulation: micro-batches of a step.
            order: settings of the job that decide which sample comes next, by key. They are JSON-able.
        """
        self.samples, self.share = samples, share
        self._collate, self._accumulation = collate, accumulation
        self._prefetch = dataloader.prefetch_factor if dataloader.num_workers else 0
        self._pin = dataloader.pin_memory and torch.cuda.is_available()
        # Settings at the beginning of the run, and changes (length, weights) requested from the next step on.
        self._first_part, self._wanted = samples.part(), {}
        # A new dictionary for each step, so that a saved state never changes afterwards.
        self._order = {"order": dict(order)} if order else {}
        self._state: State = {"position": 0, **self._order}
        self._steps: Iterator[_Step[Any]] | None = None
        self._validation: list[Any] = []

    def next_step(self) -> list[Any]:
        """Return this rank's `accumulation` micro-batches of the next step."""
        if self._steps is None:
            position, bookmark = self._state["position"], self._state.get("bookmark")
            self.samples.seek(position - self._begin_part(), bookmark=bookmark)
            self._steps = self._make_steps(position)
            if self._prefetch:
                self._steps = _Prefetcher(self._steps, depth=self._prefetch)
        step = next(self._steps)
        self._state = step.state
        return step.batches

    def state_dict(self) -> State:
        """Return the JSON-able state: {"position": samples consumed by all ranks}.

        The state has more keys if there is more to say: "skipped" has ranges of samples to leave out, "order" has the settings
        that decide which sample comes next, "part" has those of them that a phase may change, and "bookmark" has this rank's place in a stream. Finite text resumes on any number of
        ranks.
        """
        return self._state

    def load_state_dict(self, state: State) -> None:
        """Continue after the steps of `state`.

        Args:
            state: the result of `state_dict`. "bookmarks", if present, has the bookmarks of all ranks, and this rank takes
                its own.

        Raises:
            DataError: a stream was split among another number of ranks, or another setting decides which sample comes next.
        """
        self._require_order(state.get("order", {}))
        # Steps that the thread has read ahead belong to the old position.
        self.close()
        self._state = {**state, **self._order}
        bookmarks = self._state.pop("bookmarks", [])
        if bookmarks and self.samples.bookmark() is not None:
            if (count := len(bookmarks)) != self.share.world:
                raise DataError(
                    f"the checkpoint's stream was split among {count} data-parallel ranks, and this run has "
                    f"{self.share.world}: resume on {count}, or begin the text again with "
                    'checkpoint.exclude_from_loading = ["dataloader"]'
                )
            self._state["bookmark"] = bookmarks[self.share.rank]

    def _require_order(self, saved: Mapping[str, Any]) -> None:
        """Raise DataError if the position of a state means other samples in this job. Keys of one of the two are not compared."""
        now = self._order.get("order", {})
        changes = [
            f"{key}: {json.dumps(saved[key])} -> {json.dumps(value)}"
            for key, value in now.items()
            if saved.get(key, value) != value
        ]
        if changes:
            raise DataError(
                f"the checkpoint's place in the data means other samples with {'; '.join(changes)}: keep what it had, or begin the text "
                'again with checkpoint.exclude_from_loading = ["dataloader"]'
            )

    def set_shard(self, share: ShardSpec) -> None:
        """Change this loader's data-parallel rank and world size. The position is kept."""
        if share != self.share:
            self.load_state_dict(self._state)  # drops steps read ahead for the old share
            self.share = share

    def change(
        self, *, batch: int, accumulation: int, seq_len: int, weights: Sequence[float]
    ) -> None:
        """Change the size of steps, the length of sequences and the weights of sources from the next step on.

        Args:
            batch: samples of a micro-batch.
            accumulation: micro-batches of a step.
            seq_len: tokens of a sequence.
            weights: relative shares of the sources. Empty keeps the present shares.
        """
        self.load_state_dict(self._state)  # drops steps read ahead with the old sizes
        self.share, self._accumulation = replace(self.share, batch=batch), accumulation
        self._wanted = {"seq_len": seq_len} | ({"weights": [*weights]} if weights else {})

    def skip(self, first: int, end: int) -> None:
        """Leave out samples `first` to `end` - 1. The next step is the next one that touches none of them."""
        skipped = sorted([*self._state.get("skipped", []), [first, end]])
        self.load_state_dict(self._state | {"skipped": skipped})

    def validation_batches(self, steps: int) -> Iterator[B]:
        """Return `steps` batches from the beginning of the samples, the same batches each time.

        Finite text is read at most once. Samples past its end are ignored, so that no sample counts twice in any layout.
        Batches of a stream are kept in memory, so that the stream is read once. Use a separate loader, not the loader that
        trains.

        Args:
            steps: number of batches. -1 returns the batches of all the text.

        Raises:
            DataError: `steps` is -1, and the samples are a stream.
        """
        assert self._steps is None, "validation rewinds the samples; use a separate loader"
        stride, num_samples = self.share.stride, self.samples.num_samples
        if num_samples is not None:
            # An incomplete last stride counts too: its samples past the end are ignored.
            all_steps = -(-num_samples // stride)
            steps = all_steps if steps == -1 else min(steps, all_steps)
        elif steps == -1:
            raise DataError(
                "validation.steps = -1 wants all of the text, and a stream has no end; give a number"
            )
        if num_samples is None and len(self._validation) == steps:
            return iter(self._validation)
        # Epoch 0 has the same permutation each time, so the samples are the same too.
        self.samples.seek(0)
        batches = (self.make_batch(step * stride, end=num_samples) for step in range(steps))
        if num_samples is None:
            self._validation = [*batches]
            return iter(self._validation)
        return batches

    def close(self) -> None:
        """Stop the background thread, and drop the steps that it has read ahead."""
        if isinstance(self._steps, _Prefetcher):
            self._steps.close()
        self._steps = None

    def _begin_part(self) -> int:
        """Switch to the phase in the state, or to the requested settings. Return the first position of the phase."""
        if self._first_part is None:
            return 0
        part = (
            DatasetPhase(**self._state["part"]) if "part" in self._state else self._first_part
        )
        if (before := len(part.tokens)) != (now := len(self._first_part.tokens)):
            raise DataError(
                f"the checkpoint has the place in {before} sources, and this job has {now}: keep them (a "
                '[[phase]] may give one the weight 0), or begin the text again with checkpoint.exclude_from_loading = ["dataloader"]'
            )
        self.samples.begin(part)
        if (new := replace(part, **self._wanted)) != part:
            count, position = self._state["position"] - part.first, self._state["position"]
            tokens = self.samples.tokens_after(count, whole=new.seq_len != part.seq_len)
            new = replace(new, first=position, tokens=tokens)
            self.samples.begin(new)
        # In every state: a run that goes on with other settings begins a new part where this one ended.
        self._state = self._state | {"part": asdict(new)}
        return new.first

    def _make_steps(self, position: int) -> Iterator[_Step[Any]]:
        # Parts of the state that every step keeps.
        kept = {
            key: self._state[key] for key in ("skipped", "order", "part") if key in self._state
        }
        skipped = kept.get("skipped", [])
        num_samples = self._accumulation * self.share.stride
        while True:
            first = _after_skipped(position, num_samples, skipped)
            # Read the samples in between and drop them, since a stream cannot skip samples.
            for begin in range(position, first, self.share.stride):
                self.make_batch(begin)
            position = first
            batches = []
            for _ in range(self._accumulation):
                batches.append(self.make_batch(position))
                position += self.share.stride
            # Taken after the last micro-batch: the state belongs to the step, not to what is read ahead.
            bookmark = self.samples.bookmark()
            state: State = {"position": position, **kept}
            state |= {"bookmark": bookmark} if bookmark else {}
            yield _Step(batches, state)

    def make_batch(self, begin: int, *, end: int | None = None) -> B:
        """Return the rank's part of the stride of samples that begins at `begin`. Ignore samples from `end` on."""
        # The samples of a rank are consecutive. The samples of all ranks make the stride.
        first = begin + self.share.rank * self.share.batch
        part = self.samples.part()
        numbers = np.arange(first, first + self.share.batch)
        numbers -= 0 if part is None else part.first
        batch = self._collate(self.samples.get(numbers), first_sample=first)
        sources = self.samples.sources(numbers)
        if sources is not None and isinstance(batch, TensorBatch):
            batch = batch.with_sources(torch.from_numpy(sources))
        if end is not None:
            batch.ignore_from(max(end - first, 0))
        return batch.pin_memory() if self._pin else batch


def _after_skipped(position: int, num_samples: int, skipped: Sequence[Sequence[int]]) -> int:
    """Return the first position at or after `position` at which a step touches none of the sorted ranges."""
    for first, end in skipped:
        if position < end and first < position + num_samples:
            position = end
    return position


class _Prefetcher(Iterator[_Step[Any]]):
    """Iterator that runs ahead of its reader in a thread. Exceptions reach the reader.

    The thread sleeps until half of the steps are taken. It shares the interpreter with the training thread, and each time it wakes
    costs a small model a hundredth of a step: more than to prepare a step.
    """

    def __init__(self, steps: Iterator[_Step[Any]], *, depth: int) -> None:
        self._steps, self._depth = steps, depth
        self._queue: queue.SimpleQueue[_Step[Any] | BaseException] = queue.SimpleQueue()
        self._wake, self._closed = threading.Event(), threading.Event()
        # The device of the training thread, which a new thread does not inherit.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, name="titan-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                # A new thread uses device 0, and pinning would create a context there.
                torch.cuda.set_device(self._device)
            while not self._closed.is_set():
                if self._queue.qsize() < self._depth:
                    self._queue.put(next(self._steps))
                else:
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            self._queue.put(error)

    def __next__(self) -> _Step[Any]:
        item = self._queue.get()
        if 2 * self._queue.qsize() <= self._depth:
            self._wake.set()
        if isinstance(item, BaseException):
            self._queue.put(item)  # a reader that asks once more must not hang
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout=10)  # a network read may hang; the thread is a daemon
