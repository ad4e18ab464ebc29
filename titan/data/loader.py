"""The loader: step batches for the trainer, made ahead of time, with one integer for a position.

With p samples consumed so far, micro-batch a (of A), data-parallel rank r (of R) and local row j (of B), the global
sample is p + a*R*B + r*B + j, and a step consumes A*R*B of them. So the samples of a step do not depend on
how ranks and accumulation share them out, and a run resumed on another number of ranks goes on exactly.

A background thread prepares `prefetch` steps; what it read ahead is not part of the state: `state_dict()` tells of
the steps handed out. Legend: B local batch, S sequence length.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from titan.config import sections as s
from titan.data.base import Layout, Samples
from titan.data.errors import DataError
from titan.data.packing import Framing, pack
from titan.data.samples import SampleOptions, build_samples
from titan.data.sources import resolve_sources
from titan.data.streams import merge_bookmarks
from titan.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one rank. Tensors are int64[B, S]."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    """The token that follows each token; -100 where it is not to be predicted."""
    positions_BS: torch.Tensor | None = None
    """Places counted from each document's beginning; None: from the sequence's."""
    document_ids_BS: torch.Tensor | None = None
    """Number of the document within its sequence, for the attention mask; None: no mask but the causal one."""
    first_sample: int = 0
    """Global number of the first row's sample; the other rows' follow."""

    def to(self, device: torch.device | str) -> Batch:
        """On another device; the copy does not block where the batch is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """In page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Any) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{n: function(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
        )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What the background thread hands over: a step, and the state after it."""

    batches: list[Batch]
    position: int
    bookmark: Any


class Loader:
    """Step batches of one data-parallel rank. Use as a context manager, or call `close()`."""

    def __init__(
        self,
        samples: Samples,
        *,
        layout: Layout,
        tokenizer: Tokenizer,
        accumulation: int = 1,
        reset_positions: bool = False,
        document_mask: bool = False,
        prefetch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if (reset_positions or document_mask) and not samples.framing.marks_boundaries:
            raise DataError(
                "data.reset_positions and data.document_mask need documents that begin or end with a token of "
                "their own: set data.add_bos or data.add_eos, with a tokenizer that has such a token"
            )
        self.samples, self.layout, self.accumulation = samples, layout, accumulation
        self.data_wait_s = 0.0
        """How long the last `next_step` waited."""
        self._byte_lengths = torch.from_numpy(tokenizer.byte_lengths)
        self.tokenizer = tokenizer
        self._reset_positions, self._document_mask = reset_positions, document_mask
        self._prefetch = prefetch
        self._pin = pin_memory and torch.cuda.is_available()
        self._position, self._bookmark = 0, None
        self._thread: _Prefetcher | None = None
        self._steps: Iterator[_Step] = iter(())
        self._started = False
        self._kept: list[Batch] = []

    @property
    def samples_per_step(self) -> int:
        """Sequences one step consumes over all ranks."""
        return self.accumulation * self.layout.stride

    def next_step(self) -> list[Batch]:
        """This rank's `accumulation` micro-batches of the next step."""
        begin = time.perf_counter()
        if not self._started:
            self.samples.seek(self._position, layout=self.layout, bookmark=self._bookmark)
            self._steps, self._started = self._make_steps(), True
            if self._prefetch:
                self._steps = self._thread = _Prefetcher(self._steps, depth=self._prefetch)
        step = next(self._steps)
        self._position, self._bookmark = step.position, step.bookmark
        self.data_wait_s = time.perf_counter() - begin
        return step.batches

    def state_dict(self) -> dict[str, Any]:
        """{"position": samples consumed by all ranks}, and for streams a "bookmark" of this rank's lanes (JSON-able).

        The position alone is enough to resume. Bookmarks of all ranks, merged by `merge_states`, make it quick.
        """
        state: dict[str, Any] = {"position": self._position}
        return state if self._bookmark is None else state | {"bookmark": self._bookmark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps that `state` tells of, on any number of ranks."""
        self.close()
        self._position, self._bookmark = int(state["position"]), state.get("bookmark")

    def validation_batches(self, steps: int) -> Iterator[Batch]:
        """`steps` batches from the beginning of the samples: the same each time, a short text starting over.

        For a loader of its own, not the one that trains. Of text that streams, the batches are kept, so that
        it is fetched once.
        """
        assert not self._started, "validation rewinds the samples; use a separate loader"
        if len(self._kept) == steps:
            yield from self._kept
            return
        self.samples.seek(0, layout=self.layout, bookmark=None)
        batches = []
        for step in range(steps):
            batch = self._make_batch(step * self.layout.stride)
            if self.samples.num_samples is None:
                batches.append(batch)
            yield batch
        self._kept = batches

    def num_bytes(self, batch: Batch) -> int:
        """Bytes of text that the valid labels of a batch (on the CPU) stand for: loss / ln 2 / this is bits a byte."""
        labels = batch.labels_BS[batch.labels_BS >= 0]
        return int(self._byte_lengths[labels].sum())

    def close(self) -> None:
        """End the background thread; what it read ahead is dropped."""
        if self._thread is not None:
            self._thread.close()
        self._thread, self._started = None, False

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make_steps(self) -> Iterator[_Step]:
        position = self._position
        while True:
            micro = [
                self._make_batch(position + a * self.layout.stride)
                for a in range(self.accumulation)
            ]
            position += self.samples_per_step
            yield _Step(batches=micro, position=position, bookmark=self.samples.bookmark())

    def _make_batch(self, begin: int) -> Batch:
        """The rank's share of the stride of samples from `begin`."""
        first = begin + self.layout.rank * self.layout.batch
        packed = pack(
            self.samples.get(np.arange(first, first + self.layout.batch)),
            framing=self.samples.framing,
            reset_positions=self._reset_positions,
            document_mask=self._document_mask,
        )
        positions_BS, document_ids_BS = packed.positions_BS, packed.document_ids_BS
        batch = Batch(
            tokens_BS=torch.from_numpy(packed.tokens_BS),
            labels_BS=torch.from_numpy(packed.labels_BS),
            positions_BS=None if positions_BS is None else torch.from_numpy(positions_BS),
            document_ids_BS=None if document_ids_BS is None else torch.from_numpy(document_ids_BS),
            first_sample=first,
        )
        return batch.pin_memory() if self._pin else batch


class _Prefetcher(Iterator[_Step]):
    """An iterator run ahead of its reader by a thread. An exception in it is raised to the reader."""

    def __init__(self, items: Iterator[_Step], *, depth: int) -> None:
        self._queue: queue.Queue[_Step | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(
            target=self._run, args=(items,), name="titan-prefetch", daemon=True
        )
        self._failure: BaseException | None = None
        self._thread.start()

    def _run(self, items: Iterator[_Step]) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # pinning from a new thread would wake device 0
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: _Step | BaseException) -> bool:
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return True
        return False

    def __next__(self) -> _Step:
        if self._failure is None:
            item = self._queue.get()
            if isinstance(item, _Step):
                return item
            self._failure = item
        raise self._failure

    def close(self) -> None:
        self._stop.set()
        self._thread.join(
            timeout=10
        )  # it ends with the process in any case, should a network read hang


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state from those of all data-parallel ranks (same position, each with its own lanes' bookmark)."""
    assert len({state["position"] for state in states}) == 1, "states of different steps"
    merged: dict[str, Any] = {"position": states[0]["position"]}
    marks = [state["bookmark"] for state in states if "bookmark" in state]
    if not marks:
        return merged
    if isinstance(marks[0], dict):
        return merged | {"bookmark": merge_bookmarks(marks)}
    # A blend: every rank follows all lanes, so any rank's will do.
    return merged | {"bookmark": marks[0]}


def _framing(data: s.DataSection, tokenizer: Tokenizer) -> Framing:
    return Framing.of(tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)


def build_loader(
    training: s.TrainingSection,
    *,
    data: s.DataSection,
    tokenizer: Tokenizer,
    rank: int,
    world: int,
    seed: int,
    accumulation: int = 1,
) -> Loader:
    """The training data of data-parallel rank `rank` of `world`. Raises DataError.

    The first process that needs a raw text source tokenises it into the cache; the others wait here.
    """
    sources = data.sources or resolve_sources(training.dataset, dataset_path=training.dataset_path)
    options = SampleOptions(
        tokenizer=tokenizer,
        framing=_framing(data, tokenizer),
        seq_len=training.seq_len,
        split="train",
        validation_fraction=data.validation_fraction,
        shuffle=data.shuffle,
        seed=seed,
        cache_folder=data.cache_folder,
    )
    return Loader(
        build_samples(sources, options=options),
        layout=Layout(rank=rank, world=world, batch=training.local_batch_size),
        tokenizer=tokenizer,
        accumulation=accumulation,
        reset_positions=data.reset_positions,
        document_mask=data.document_mask,
        prefetch=training.dataloader.prefetch_factor if training.dataloader.num_workers else 0,
        pin_memory=training.dataloader.pin_memory,
    )


def build_validation_loader(
    validation: s.ValidationSection,
    *,
    training: s.TrainingSection,
    data: s.DataSection,
    tokenizer: Tokenizer,
    rank: int,
    world: int,
) -> Loader:
    """The validation data: validation.dataset in full, or the documents held out of the training sources.

    The order does not depend on the job's seed, so that runs with different seeds measure the same samples.
    """
    separate = bool(validation.dataset)
    if separate:
        sources = resolve_sources(validation.dataset, dataset_path=validation.dataset_path)
    else:
        sources = data.sources or resolve_sources(
            training.dataset, dataset_path=training.dataset_path
        )
        _check_held_out(sources, data)
    options = SampleOptions(
        tokenizer=tokenizer,
        framing=_framing(data, tokenizer),
        seq_len=validation.seq_len or training.seq_len,
        split="train" if separate else "validation",
        validation_fraction=0.0 if separate else data.validation_fraction,
        shuffle=data.shuffle,
        seed=0,
        cache_folder=data.cache_folder,
    )
    return Loader(
        build_samples(sources, options=options),
        layout=Layout(rank=rank, world=world, batch=validation.local_batch_size),
        tokenizer=tokenizer,
        reset_positions=data.reset_positions,
        document_mask=data.document_mask,
        pin_memory=training.dataloader.pin_memory,
    )


def _check_held_out(sources: Sequence[s.Section], data: s.DataSection) -> None:
    """Text sources hold documents out only where a fraction says so; shards were split when they were prepared."""
    if data.validation_fraction:
        return
    for source in sources:
        if not isinstance(source, s.ShardsSource | s.SyntheticSource):
            raise DataError(
                "validation has no text: set data.validation_fraction (0.01 holds out every hundredth document) "
                "or validation.dataset"
            )
