"""Make the batches of each step ahead of time, with one integer as the position.

With p samples consumed so far, micro-batch a (of A), data-parallel rank r (of R) and local row j (of B), the global
sample is p + a*R*B + r*B + j, and a step consumes A*R*B of them. So the samples of a step do not depend on how
ranks and accumulation share them out, and a run that resumes on another number of ranks goes on exactly. Streams are the
exception: each rank has a part of them, and a bookmark in it (streams.py).

Samples to leave out (titan/health/recovery.py says when) are ranges of numbers. A step that would touch such a range begins
after it, which is the same on every layout.

A phase of the run (titan/config/phases.py) may change the length of sequences and the weights of sources. Samples are then numbered
again from its first position on, and the state has the `Part`: where each source stands, in tokens.

A background thread prepares some steps. What it has read ahead is not part of the state: `state_dict()` is the state after
the last step that was handed out.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import Part, RankShare, Samples, TensorBatch

Collate = Callable[..., TensorBatch]


@dataclass(frozen=True)
class _Step:
    """A step from the background thread, and the loader's state after it."""

    batches: list[Any]
    state: dict[str, Any]


class Loader:
    """Return the batches of one data-parallel rank, step by step. Call `close()` at the end."""

    def __init__(
        self,
        samples: Samples,
        *,
        share: RankShare,
        collate: Collate,
        dataloader: s.DataloaderSection,
        accumulation: int = 1,
    ) -> None:
        """collate: makes a batch of what `samples.get` returns, given the number of its first sample."""
        self.samples, self.share = samples, share
        self._collate, self._accumulation = collate, accumulation
        self._prefetch = dataloader.prefetch_factor if dataloader.num_workers else 0
        self._pin = dataloader.pin_memory and torch.cuda.is_available()
        # Of the first samples, and what is wanted in its place from the next step on: lengths and weights.
        self._first_part, self._wanted = samples.part(), {}
        # Replaced as a whole with each step, so that a saved state never changes afterwards.
        self._state: dict[str, Any] = {"position": 0}
        self._steps: Iterator[_Step] | None = None
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

    def state_dict(self) -> dict[str, Any]:
        """Return {"position": samples consumed by all ranks}, JSON-able, with "skipped" ranges of samples if there are any.

        The position is enough to resume finite text, on any number of ranks. Of a stream each rank has a part, and its place in
        it is its "bookmark".
        """
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps of `state`. "bookmarks" are those of all ranks, of which this rank takes one.

        Raises DataError if a stream was split among another number of ranks.
        """
        # What the thread has read ahead belongs to the old position.
        self.close()
        self._state = {**state}
        bookmarks = self._state.pop("bookmarks", [])
        if bookmarks and self.samples.bookmark() is not None:
            if (count := len(bookmarks)) != self.share.world:
                raise DataError(
                    f"the checkpoint's stream was split among {count} data-parallel ranks, and this run has "
                    f"{self.share.world}: resume on {count}, or begin the text again with "
                    'checkpoint.exclude_from_loading = ["dataloader"]'
                )
            self._state["bookmark"] = bookmarks[self.share.rank]

    def reshare(self, share: RankShare) -> None:
        """Go on as another data-parallel rank, or one of another number of them."""
        if share != self.share:
            self.load_state_dict(self._state)  # what is read ahead belongs to the old share
            self.share = share

    def change(
        self, *, batch: int, accumulation: int, seq_len: int, weights: Sequence[float]
    ) -> None:
        """Go on with steps of another size, sequences of another length, and other shares of the sources.

        weights: empty: as they are.
        """
        self.load_state_dict(self._state)  # what is read ahead belongs to the old sizes
        self.share, self._accumulation = replace(self.share, batch=batch), accumulation
        self._wanted = {"seq_len": seq_len} | ({"weights": [*weights]} if weights else {})

    def skip(self, first: int, end: int) -> None:
        """Leave out samples first to end - 1. The next step is the next one that touches none of them."""
        skipped = sorted([*self._state.get("skipped", []), [first, end]])
        self.load_state_dict(self._state | {"skipped": skipped})

    def validation_batches(self, steps: int) -> Iterator[Any]:
        """Return `steps` batches from the beginning of the samples, the same each time. -1 returns those of all the text.

        Finite text is read once at most. There are no batches past its end, and rows past it are ignored, so
        that no sample counts twice in any layout. Batches of a stream are kept, so that it is read once. Raises DataError
        for -1 with a stream. Use a separate loader, not the one that trains.
        """
        assert self._steps is None, "validation rewinds the samples; use a separate loader"
        num_samples = self.samples.num_samples
        is_stream = num_samples is None
        if num_samples is not None:
            # A last, incomplete stride still counts: samples past the end are ignored.
            all_steps = -(-num_samples // self.share.stride)
            steps = all_steps if steps == -1 else min(steps, all_steps)
        elif steps == -1:
            raise DataError(
                "validation.steps = -1 wants all of the text, and a stream has no end; give a number"
            )
        if is_stream and len(self._validation) == steps:
            return iter(self._validation)
        # Permutations start at epoch 0, so the same samples come each time.
        self.samples.seek(0)
        batches = (
            self._make_batch(step * self.share.stride, end=num_samples) for step in range(steps)
        )
        if is_stream:
            self._validation = list(batches)
        return iter(self._validation) if is_stream else batches

    def close(self) -> None:
        """End the background thread, and drop what it has read ahead."""
        if isinstance(self._steps, _Prefetcher):
            self._steps.close()
        self._steps = None

    def _begin_part(self) -> int:
        """Have the samples made as the state says, or as is wanted from here on. Return the first position of the part."""
        if self._first_part is None:
            return 0
        part = Part(**self._state["part"]) if "part" in self._state else self._first_part
        self.samples.begin(part)
        if (new := replace(part, **self._wanted)) != part:
            count, position = self._state["position"] - part.first, self._state["position"]
            tokens = self.samples.tokens_after(count, whole=new.seq_len != part.seq_len)
            new = replace(new, first=position, tokens=tokens)
            self.samples.begin(new)
            self._state = self._state | {"part": asdict(new)}
        return new.first

    def _make_steps(self, position: int) -> Iterator[_Step]:
        # What stays the same in every step.
        kept = {key: self._state[key] for key in ("skipped", "part") if key in self._state}
        skipped = kept.get("skipped", [])
        num_samples = self._accumulation * self.share.stride
        while True:
            first = _after_skipped(position, num_samples, skipped)
            # Read and dropped, since a stream cannot pass over samples.
            for begin in range(position, first, self.share.stride):
                self._make_batch(begin)
            position = first
            batches = []
            for _ in range(self._accumulation):
                batches.append(self._make_batch(position))
                position += self.share.stride
            # Taken after the last micro-batch: the state belongs to the step, not to what is read ahead.
            bookmark = self.samples.bookmark()
            state: dict[str, Any] = {"position": position, **kept}
            state |= {"bookmark": bookmark} if bookmark else {}
            yield _Step(batches, state)

    def _make_batch(self, begin: int, *, end: int | None = None) -> Any:
        """Return the rank's share of the stride of samples from `begin` on. Ignore samples from `end` on."""
        # Rows of one rank are consecutive, those of all ranks make the stride.
        first = begin + self.share.rank * self.share.batch
        part = self.samples.part()
        numbers = np.arange(first, first + self.share.batch)
        rows = self.samples.get(numbers if part is None else numbers - part.first)
        batch = self._collate(rows, first_sample=first)
        if end is not None:
            batch.ignore_from(max(end - first, 0))
        return batch.pin_memory() if self._pin else batch


def _after_skipped(position: int, num_samples: int, skipped: Sequence[Sequence[int]]) -> int:
    """Return the first position from `position` on where a step meets none of the ranges, which are sorted."""
    for first, end in skipped:
        if position < end and first < position + num_samples:
            position = end
    return position


class _Prefetcher(Iterator[_Step]):
    """Run an iterator ahead of its reader, in a thread. The reader gets its exceptions."""

    def __init__(self, steps: Iterator[_Step], *, depth: int) -> None:
        # A full queue makes the thread wait: it reads at most `depth` steps ahead.
        self._queue: queue.Queue[_Step | BaseException] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        # The training thread's device, which a new thread does not inherit.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(
            target=self._run, args=(steps,), name="titan-prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, steps: Iterator[_Step]) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(
                    self._device
                )  # a new thread uses device 0, where pinning would make a context
            for step in steps:
                self._put(step)
                if self._closed.is_set():
                    return
        except BaseException as error:
            while not self._closed.is_set():
                self._put(error)  # repeatedly: a reader that asks again must not hang

    def _put(self, item: _Step | BaseException) -> None:
        # In short waits, so that `close` ends a thread whose queue is full.
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return

    def __next__(self) -> _Step:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=10)  # a network read may hang; the thread is a daemon
