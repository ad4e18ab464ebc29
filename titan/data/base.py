"""Interfaces between the loader and the data.

`Samples` is an endless, numbered series of samples (samples.py, streams.py). `Source` is the series of one source of text.
`ShardSpec` is the part of it that one data-parallel rank takes, and `TensorBatch` is the batch that the rank computes with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from titan.data import DataError
from titan.data.special_tokens import SpecialTokens

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_Batch = TypeVar("_Batch", bound="TensorBatch")
SOURCE_SHIFT = 40  # bits of a document's number below that of its source
_NO_NUMBERS = "the documents have no numbers, as those of streams and synthetic text"
State = dict[str, Any]
"""A JSON-able place in the data, which a checkpoint keeps."""


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """One micro-batch of one rank: tensors (or None) whose first dimension is the sample.

    Attributes:
        ALONG_SEQUENCE: names of the fields whose second dimension is the sequence. Each context-parallel rank gets its part of
            these.
    """

    ALONG_SEQUENCE: ClassVar[tuple[str, ...]] = ()

    first_sample: int = 0
    """Global number of the batch's first sample. The other samples follow it."""

    def map(self: _Batch, function: Callable[[str, Tensor], Tensor]) -> _Batch:
        """Return the batch with each tensor replaced by `function(name, tensor)`."""
        from torch import Tensor

        tensors = {
            name: value for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **{name: function(name, value) for name, value in tensors.items()})

    def to(self: _Batch, device: Any) -> _Batch:
        """Return the batch on another device. The copy does not block if the batch is pinned."""
        return self.map(lambda _, tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self: _Batch) -> _Batch:
        """Return the batch in page-locked memory."""
        return self.map(lambda _, tensor: tensor.pin_memory())

    def with_sources(self: _Batch, sources_B: Tensor) -> _Batch:
        """Return the batch with the number of each sample's source, int64, for the loss of each source."""
        return self

    def ignore_from(self, row: int) -> None:
        """Exclude the samples from index `row` on from the loss, in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Samples that a data-parallel rank takes: one batch of `batch` samples out of every `world` batches."""

    rank: int = 0
    world: int = 1
    batch: int = 1

    @property
    def stride(self) -> int:
        """Return the number of samples in the batches of all ranks together."""
        return self.world * self.batch


@dataclass(frozen=True, kw_only=True)
class DatasetPhase:
    """Dataset settings in force from a given position (titan/config/phases.py). `asdict` makes them JSON-able.

    Attributes:
        first: position of the first sample with these settings.
        tokens: tokens of each source that come before, counted over all epochs.
        seq_len: tokens of a sequence.
        weights: relative shares of the sources.
    """

    first: int
    tokens: list[int]
    seq_len: int
    weights: list[float]


class Samples(ABC):
    """Endless, numbered series of samples. A sample of text is a sequence of tokens."""

    special_tokens: SpecialTokens = SpecialTokens(None, None)
    """Ids that begin and end a document in these samples."""
    unread: Sequence[str] = ()
    """A line for each source with keys of rows or messages that nothing read."""

    @property
    def num_samples(self) -> int | None:
        """Return the number of samples in an epoch, or None for an endless stream."""
        return None

    @abstractmethod
    def get(self, indices: np.ndarray) -> Any:
        """Return the samples with these numbers, as the task's `collate` takes them.

        Text samples are int64[len(indices), seq_len + 1].
        """

    def sources(self, indices: np.ndarray) -> np.ndarray | None:
        """Return the number of each sample's source, int64, or None if all samples have one source."""
        return None

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of each token's document, int64[len(indices), seq_len + 1], negative for padding.

        Documents are counted from 0 in the order of their files, and source s of a blend begins at s << SOURCE_SHIFT.

        Raises:
            DataError: the documents have no numbers.
        """
        raise DataError(_NO_NUMBERS)

    def seek(self, position: int, *, bookmark: Any = None) -> None:  # noqa: B027
        """Prepare to read from `position` on.

        Args:
            position: number of the next sample.
            bookmark: the `bookmark` of this position, if there is one.
        """

    def part(self) -> DatasetPhase | None:  # noqa: B027
        """Return the settings in force, or None if they can never change."""

    def begin(self, part: DatasetPhase) -> None:  # noqa: B027
        """Switch to the settings of `part`. Sample numbers start again from 0."""

    def tokens_after(self, count: int, *, whole: bool) -> list[int]:
        """Return each source's position, as in `DatasetPhase.tokens`, after `count` samples with the settings in force.

        Args:
            count: samples since the settings came into force.
            whole: round up to the nearest place where sequences of another length may begin.
        """
        raise NotImplementedError

    def bookmark(self) -> State | None:
        """Return the JSON-able state that `seek` needs to come back here, or None if the position is enough."""
        return None


class Source(Samples):
    """Samples of one source of text. Their length may change, and numbers count sequences of the present length."""

    _seq_len: int

    def leave_out(self, rows: Sequence[int]) -> None:
        """Read the tokens of documents as padding.

        Args:
            rows: numbers of the documents in this source.

        Raises:
            DataError: the documents have no such numbers.
        """
        raise DataError(_NO_NUMBERS)

    def resize(self, seq_len: int) -> None:
        """Switch to sequences of `seq_len` + 1 tokens."""
        self._seq_len = seq_len

    def round_up(self, tokens: int) -> int:
        """Round a number of tokens up to the nearest place where sequences of another length may begin."""
        return tokens
