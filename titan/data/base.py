"""Say what the loader asks for: `Samples`, the endless numbered rows of samples.py and streams.py, and `RankShare`, the
part of them that one data-parallel rank takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.data.special_tokens import SpecialTokens

if TYPE_CHECKING:
    import numpy as np


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


class Samples(ABC):
    """Give an endless sequence of numbered rows of tokens."""

    special_tokens: SpecialTokens
    """The ids that begin and end a document in these samples."""

    @property
    def num_samples(self) -> int | None:
        """Return the length of an epoch, or None if there is no end."""
        return None

    @abstractmethod
    def get(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of these samples, int64[len(indices), seq_len + 1]."""

    def seek(self, position: int, *, bookmark: Any = None) -> None:  # noqa: B027
        """Prepare for samples from `position` on. bookmark: of this place, if there is one."""

    def bookmark(self) -> dict[str, Any] | None:
        """Return what a later `seek` to this place needs, JSON-able, or None if the position is enough."""
        return None
