"""Linear attention and short convolutions over a sequence that ranks share (context parallelism).

Such a module carries little from one position to the next: linear attention a state of K x V numbers for each head, a
convolution the last few tokens. So a rank computes with its own tokens alone, and gets from the others only what enters its part:

    linear attention   The state at the end of a piece is an affine function of the state before it, S -> A + M S. Each rank computes
                       A and M of its pieces from a state of zeros, gathers those of all pieces, and applies them in the order of the
                       sequence to find the states before its own pieces. What such a state adds to the piece is linear in it.
    convolution        Each rank gathers the last tokens of all pieces.

An example with 2 ranks and 8 tokens: rank 0 holds the tokens 0, 1 and 6, 7 (its head and tail, see ring.py), rank 1 the tokens 2, 3
and 4, 5. These are four pieces. The state before piece 3, the tokens 6 and 7, is A2 + M2 (A1 + M1 A0). Contiguous parts are one
piece for each rank. Both splits have equal work for all ranks, and contiguous parts have half of the maps to gather.

Gathering is differentiable: the gradient of a map is the sum over all ranks, in fp32. Documents need nothing more: the first token
of a document drops the state before it, so M is zero for a piece in which a document starts.

B batch, P pieces of each rank, C ranks, S local positions, H heads, K size of a key, V size of a value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan.parallel.collectives import all_gather
from titan.parallel.context import shard_sequence, unshard_sequence
from titan.parallel.documents import DocumentMask
from titan.parallel.module_kinds import SequenceModule
from titan.parallel.ring import SequencePart

State = Tensor | Callable[[Tensor, Tensor], Tensor] | None
"""State before the first position, (B, H, K, V). None: zeros. Or a function that returns it, for
which the sequence is an affine map: it takes the state after the last position if that before the
first is zero, and the linear map of the rest, (B, H, K, K)."""


@dataclass(frozen=True)
class SequenceBorders:
    """The borders of this rank's part of a sequence, and what crosses them.

    A `Bordered` module has one.

    Attributes:
        part: the part of the sequence that this rank holds. None: all of it.
    """

    part: SequencePart | None = None

    @property
    def num_pieces(self) -> int:
        """Return the number of contiguous pieces that this rank holds of a sequence, P."""
        return 2 if self.part is not None and self.part.balanced else 1

    def split(self, x: Tensor, *, dim: int) -> Tensor:
        """Return each piece as a separate sequence: (B, ..., S, ...) -> (B * P, ..., S / P, ...)."""
        return x.unflatten(dim, (self.num_pieces, -1)).movedim(dim, 1).flatten(0, 1)

    def join(self, x: Tensor, *, dim: int) -> Tensor:
        """Undo `split`."""
        return x.unflatten(0, (-1, self.num_pieces)).movedim(1, dim).flatten(dim, dim + 1)

    def starts(self, documents_BS: Tensor | DocumentMask | None) -> Tensor | None:
        """Return where a document starts, as booleans (B, S), or None if there are no documents.

        The first position of a whole sequence starts none, so that a state from before the sequence enters it.

        Args:
            documents_BS: document ids of the local positions, or the mask that `share_document_mask` made of them.
        """
        if isinstance(documents_BS, DocumentMask):
            assert documents_BS.starts_BS is not None, "share_document_mask made the mask"
            return documents_BS.starts_BS
        if documents_BS is None:
            return None
        ids = self.split(documents_BS, dim=1)
        before = ids[:, :1] if self.part is None else self.before(ids[:, -1:])
        return self.join(ids != torch.cat([before, ids[:, :-1]], dim=1), dim=1)

    def before(self, last: Tensor) -> Tensor:
        """Return `last` of the piece before each of this rank's pieces, zeros for the first piece. Differentiable.

        Args:
            last: a tensor of each of this rank's pieces, (B * P, ...).
        """
        pieces = self._all_pieces(last)
        return self._own([torch.zeros_like(pieces[0]), *pieces[:-1]])

    def states_before(self, added: Tensor, linear: Tensor) -> Tensor:
        """Return the state before each of this rank's pieces, (B * P, H, K, V). Differentiable.

        Args:
            added: the state after each piece if the state before it is zero, (B * P, H, K, V).
            linear: the linear map of each piece, (B * P, H, K, K).
        """
        pieces = self._all_pieces(torch.cat([added, linear], dim=-1))
        states = [torch.zeros_like(added[:: self.num_pieces])]
        for piece in pieces[:-1]:
            own, through = piece.split([added.shape[-1], linear.shape[-1]], dim=-1)
            states.append(own + through @ states[-1])
        return self._own(states)

    def _all_pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return x of all pieces of the sequence, in order: (B * P, ...) -> 2 * C or C tensors (B, ...)."""
        part = self.part
        assert part is not None, "a whole sequence has no other pieces"
        # (P, B, ...) of each rank -> (C, P, B, ...) on all
        x_PB = x.unflatten(0, (-1, self.num_pieces)).movedim(1, 0)
        pieces = all_gather(x_PB, group=part.group, size=part.size).flatten(0, 1)
        return unshard_sequence(pieces, dim=0, size=part.size, balanced=part.balanced).unbind()

    def _own(self, pieces: list[Tensor]) -> Tensor:
        """Return this rank's pieces of all, (B * P, ...).

        The result depends on all pieces, for autograd: each rank must take part in the collective of the backward pass, also
        one that holds the first piece only.
        """
        part = self.part
        assert part is not None, "a whole sequence has no other pieces"
        own_PB = shard_sequence(
            torch.stack(pieces),
            dim=0,
            rank=part.rank,
            size=part.size,
            balanced=part.balanced,
        )
        return own_PB.movedim(0, 1).flatten(0, 1)


class Bordered(SequenceModule):
    """Module with borders of this rank's part of the sequence, which begin as those of a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.borders = SequenceBorders()

    def hold(self, part: SequencePart) -> None:
        """Compute with the part of the sequence that this rank holds."""
        self.borders = SequenceBorders(part)

    def starts(self, document_ids_BS: Tensor) -> Tensor | None:
        """Return where a document starts in the rank's part of the sequence, as booleans (B, S)."""
        return self.borders.starts(document_ids_BS)
