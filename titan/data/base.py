"""What the loader asks for, and on whose behalf: `Samples`, the endless numbered rows that samples.py and
streams.py provide, and `RankShare`, the share of them that one data-parallel rank takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan.data.special_tokens import SpecialTokens

NUM_LANES = 64
"""Parts a stream is dealt out to (streams.py); part of its order, so it never changes."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Which samples a data-parallel rank takes: of each world x batch in a row, its own batch."""

    rank: int = 0
    world: int = 1
    batch: int = 1

    @property
    def stride(self) -> int:
        return self.world * self.batch

    def lanes(self, position: int) -> set[int]:
        """Lanes of the samples this rank will take from `position` on; after 64 strides they repeat."""
        own = position + self.rank * self.batch
        rows = range(self.batch)
        return {(own + n * self.stride + j) % NUM_LANES for n in range(NUM_LANES) for j in rows}


class Samples(ABC):
    """What the loader reads."""

    num_samples: int | None = None
    """Length of an epoch; None where it is unknown or endless."""
    special_tokens: SpecialTokens
    """The ids that begin and end a document in these samples."""

    @abstractmethod
    def get(self, indices: np.ndarray) -> np.ndarray:
        """int64[len(indices), seq_len + 1]."""

    def seek(self, position: int, *, share: RankShare | None, bookmark: Any) -> None:  # noqa: B027
        """Samples from `position` on will be asked for: those of `share`, or any where it is None."""

    def bookmark(self) -> dict[str, Any] | None:
        """What makes a later `seek` to the present place quick; JSON-able; None where nothing does."""
        return None
