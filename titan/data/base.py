"""Say what the loader asks for: `Samples`, the endless numbered rows of samples.py and streams.py, `Source`, the rows
of one source of text, and `RankShare`, the part of them that one data-parallel rank takes. `TensorBatch` is what a rank computes with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from titan.data.special_tokens import SpecialTokens

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_Batch = TypeVar("_Batch", bound="TensorBatch")


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """Hold one micro-batch of one rank: tensors, or None, with the samples in their first dimension.

    ALONG_SEQUENCE: fields whose second dimension is the sequence, of which each context parallel rank gets its part.
    """

    ALONG_SEQUENCE: ClassVar[tuple[str, ...]] = ()

    first_sample: int = 0
    """Global number of the first row's sample. Those of the other rows follow."""

    def map(self: _Batch, function: Callable[[str, Tensor], Tensor]) -> _Batch:
        """Return the batch with each tensor replaced by a function of its name and itself."""
        from torch import Tensor

        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: function(name, value) for name, value in tensors.items()})

    def to(self: _Batch, device: Any) -> _Batch:
        """Return the batch on another device. The copy does not block if the batch is pinned."""
        return self.map(lambda _, tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self: _Batch) -> _Batch:
        """Return the batch in page-locked memory."""
        return self.map(lambda _, tensor: tensor.pin_memory())

    def ignore_from(self, row: int) -> None:
        """Leave the rows from `row` on out of the loss, in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Say which samples a data-parallel rank takes: its own batch of each `world` batches in a row."""

    rank: int = 0
    world: int = 1
    batch: int = 1

    @property
    def stride(self) -> int:
        """Return the samples of all ranks' batches together."""
        return self.world * self.batch


@dataclass(frozen=True, kw_only=True)
class Part:
    """Say how samples are made from a position on (titan/config/phases.py): the state of the data, JSON-able with `asdict`.

    Args:
        first: position of its first sample.
        tokens: where each source begins, one integer each, counted over all epochs.
        seq_len: tokens of a sequence.
        weights: relative shares of the sources.
    """

    first: int
    tokens: list[int]
    seq_len: int
    weights: list[float]


class Samples(ABC):
    """Give an endless sequence of numbered samples; of text, rows of tokens."""

    special_tokens: SpecialTokens = SpecialTokens(None, None)
    """The ids that begin and end a document in these samples."""

    @property
    def num_samples(self) -> int | None:
        """Return the length of an epoch, or None if there is no end."""
        return None

    @abstractmethod
    def get(self, indices: np.ndarray) -> Any:
        """Return these samples as the task's `collate` wants them; of text, int64[len(indices), seq_len + 1]."""

    def seek(self, position: int, *, bookmark: Any = None) -> None:  # noqa: B027
        """Prepare for samples from `position` on. bookmark: of this place, if there is one."""

    def part(self) -> Part | None:  # noqa: B027
        """Return how samples are made now; None: it can never change."""

    def begin(self, part: Part) -> None:  # noqa: B027
        """Make samples as `part` says, numbered from 0."""

    def tokens_after(self, count: int, *, whole: bool) -> list[int]:
        """Return where each source is after `count` samples of this part, as `Part.tokens`.

        whole: go on to the nearest place where sequences of another length may begin.
        """
        raise NotImplementedError

    def bookmark(self) -> dict[str, Any] | None:
        """Return what a later `seek` to this place needs, JSON-able, or None if the position is enough."""
        return None


class Source(Samples):
    """Give the rows of one source of text. Their length may change; numbers count rows of the present length."""

    _seq_len: int

    def resize(self, seq_len: int) -> None:
        """Give rows of `seq_len` + 1 tokens from now on."""
        self._seq_len = seq_len

    def round_up(self, tokens: int) -> int:
        """Return the nearest place at or after so many tokens where rows of another length may begin."""
        return tokens
