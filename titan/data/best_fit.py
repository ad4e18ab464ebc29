"""Samples of whole documents: each document goes where it leaves the least room (best-fit decreasing, arXiv:2404.10830).

Documents of one shard share sequences. A document that does not fit into a sequence is cut into full sequences and a rest,
and the rest is packed like a document. Every token that follows another token of its document is predicted exactly once. The
free end of a sequence is padding, whose labels are ignored. A plan for each shard lists the pieces of every sequence. The plan
depends on the shard and seq_len alone, and is mapped from a file in the cache. So any number of ranks can look up sequence i.

Example: seq_len 4, so a sequence has 5 tokens. The shard has three documents, each ended by the id 9:

    index    0 1 2 | 3 4 5 6 7 8 9 | 10 11
    token    1 2 9 | 3 4 5 6 7 8 9 |  1  9

The second document has 6 labels: one full sequence of 4 labels (tokens 3 to 7), and a rest of 2 labels (tokens 7 to 9), which
begins with the last token of the full sequence. `best_fit` places the pieces of 3, 3 and 2 tokens: the last one joins the
rest. `plan_rows` returns int64[3, 4], a column for each piece:

    sequence   0 1 2  2
    start      0 3 7 10      sequence 0 is 1 2 9 and two of padding
    length     3 5 3  2      sequence 2 is 7 8 9 1 9

samples.py makes these samples for `data.packing = "best_fit"`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

from titan.base.run_writer import write_atomically
from titan.data.cache import cache_entry, exclusive
from titan.data.order import derive_key
from titan.data.shard_samples import SampleOptions, ShardSamples
from titan.data.shards import TokenShards
from titan.data.special_tokens import KIND_SHIFT, PREDICTED, START, SpecialTokens
from titan.losses.loss import IGNORED

logger = logging.getLogger(__name__)

_FORMAT = 1  # version of the plan files; another number makes new plans
_BLOCK_TOKENS = 2**22  # tokens that are searched for document marks at once


class BestFitSamples(ShardSamples):
    """Samples that whole documents of the shards are packed into."""

    def __init__(self, shards: TokenShards, options: SampleOptions, **named: Any) -> None:
        assert options.num_lengths == 1, "rows of one length; the rules see to it"
        self._folder = cache_entry(options.data.cache_folder, "packing")
        super().__init__(shards, options, **named)

    def _count_rows(self) -> int:
        self._plans = [self._plan(number) for number in range(len(self._shards.ends))]
        rows = [plan[0, -1] + 1 if plan.size else 0 for plan in self._plans]
        self._ends = np.cumsum(rows, dtype=np.int64)
        return int(self._ends[-1]) if rows else 0

    def _plan(self, number: int) -> np.ndarray:
        """Return the plan of a shard, int64[3, pieces]: sequence (ascending), start in the shard, length."""
        index, tokens = self._shards.index, self._shards.tokens_of(number)
        key = derive_key(
            _FORMAT, index.key, self._shards.split, number, len(tokens), self._seq_len
        )
        file = self._folder / f"{key:016x}.npy"
        with exclusive(self._folder):
            if not file.is_file():
                plan = plan_rows(
                    tokens, self.special_tokens, seq_len=self._seq_len, kinds=index.kinds
                )
                content = BytesIO()
                np.save(content, plan)
                write_atomically(file, content.getvalue(), durable=False)
        return np.load(file, mmap_mode="r").view(np.ndarray)

    def _row(self, place: int, read: Callable[..., np.ndarray]) -> np.ndarray:
        number = int(self._ends.searchsorted(place, side="right"))
        plan, begin = self._plans[number], self._shards.begin_of(number)
        local = place - (int(self._ends[number - 1]) if number else 0)
        first, end = plan[0].searchsorted([local, local + 1])
        row, filled = np.full(self._seq_len + 1, IGNORED, dtype=np.int64), 0
        for start, length in plan[1:, first:end].T.tolist():
            row[filled : filled + length] = read(begin + start, count=length)
            filled += length
        return row


def plan_rows(
    tokens: np.ndarray, marks: SpecialTokens, *, seq_len: int, kinds: bool = False
) -> np.ndarray:
    """Compute the packing plan of a shard. The module's docstring has an example.

    Args:
        tokens: the ids of the shard, of shape (tokens,).
        marks: ids that begin and end a document.
        seq_len: labels of a sequence, which has one token more.
        kinds: the tokens are those of conversations, and their ids have kinds (special_tokens.py).

    Returns:
        int64[3, pieces]: sequence (ascending), start in the shard, and length of each piece.
    """
    # Cut.
    full = np.zeros(0, dtype=np.int64)
    if kinds:
        starts, lengths = _whole_conversations(tokens, seq_len=seq_len)
        opens = np.zeros(len(starts), dtype=bool)
    else:
        full, starts, lengths = _cut(tokens, marks, seq_len)
        # If only begin tokens mark documents, the rest of a document must come first in its
        # sequence, since no token separates it from the document before. With end tokens, nothing
        # may follow a document that continues in the next shard.
        ends_open = (starts + lengths == len(tokens)) & (tokens[-1] != marks.eos_id)
        opens = tokens[starts] != marks.bos_id if marks.eos_id is None else ends_open
    # Order: the pieces that come first in a sequence, then the others, each from long to short.
    order = np.lexsort((-lengths, ~opens))
    starts, lengths, opens = starts[order], lengths[order], opens[order]
    # Fit. With end tokens, a piece that comes first takes a whole sequence.
    taken = lengths if marks.eos_id is None else np.where(opens, seq_len + 1, lengths)
    rows = best_fit(taken.tolist(), opens.tolist(), capacity=seq_len + 1)
    # Full sequences are numbered from -1 downwards.
    rows = np.concatenate([np.array(rows, dtype=np.int64), -1 - np.arange(len(full))])
    starts = np.concatenate([starts, full])
    lengths = np.concatenate([lengths, np.full(len(full), seq_len + 1)])
    return _in_order(rows, starts, lengths, len(tokens))


def _cut(
    tokens: np.ndarray, marks: SpecialTokens, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the starts of full sequences, and the starts and lengths of the rests of documents."""
    mark, after = (marks.eos_id, 1) if marks.bos_id is None else (marks.bos_id, 0)
    blocks = range(0, len(tokens), _BLOCK_TOKENS)
    found = [np.flatnonzero(tokens[b : b + _BLOCK_TOKENS] == mark) + b + after for b in blocks]
    # A shard may begin and end within a long document.
    edges = np.unique(np.concatenate([[0], *found, [len(tokens)]]))
    begins, num_labels = edges[:-1], np.diff(edges) - 1
    # Full sequences overlap in one token, as sequences of cut text do.
    num_full, rest = np.divmod(num_labels, seq_len)
    count = np.arange(num_full.sum()) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    full = np.repeat(begins, num_full) + count * seq_len
    has_rest = rest > 0
    return full, (begins + num_full * seq_len)[has_rest], rest[has_rest] + 1


def _whole_conversations(tokens: np.ndarray, *, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length of the conversations in a shard, cut to whole answers.

    A conversation that does not fit into a sequence ends after the last answer that fits. If no answer fits, it is left out.
    """
    kinds = tokens >> KIND_SHIFT
    starts = np.flatnonzero(kinds == START)
    lengths = np.diff(starts, append=len(tokens))
    is_long = lengths > seq_len + 1
    # Index of the token after each answer.
    ends = np.flatnonzero((kinds[:-1] == PREDICTED) & (kinds[1:] != PREDICTED)) + 1
    fitting = ends.searchsorted(starts + seq_len + 1, side="right") - 1
    shortened = np.where(fitting >= 0, ends[fitting] if len(ends) else 0, 0) - starts
    lengths = np.where(is_long, np.maximum(shortened, 0), lengths)
    kept = lengths > 1
    if num_long := int(is_long.sum()):
        logger.warning(
            "%d of %d conversations have more than %d tokens: %d end after an earlier answer, and %d, whose first answer does "
            "not fit, are left out; raise training.seq_len to keep them whole",
            num_long,
            len(starts),
            seq_len + 1,
            int((is_long & kept).sum()),
            int((~kept).sum()),
        )
    return starts[kept], lengths[kept]


def _in_order(
    rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, num_tokens: int
) -> np.ndarray:
    """Return the plan of these pieces, with sequences numbered in the order of the text."""
    # A sequence is placed by its earliest piece, and keeps the order of its pieces.
    _, rows = np.unique(rows, return_inverse=True)
    first = np.full(rows.max(initial=-1) + 1, num_tokens)
    np.minimum.at(first, rows, starts)
    rows = first.argsort().argsort()[rows]
    return np.stack([rows, starts, lengths])[:, np.argsort(rows, kind="stable")]


def best_fit(lengths: list[int], opens: list[bool], *, capacity: int) -> list[int]:
    """Assign each piece, in order, to the fullest sequence that has room for it, or to a new sequence.

    Args:
        lengths: tokens of each piece.
        opens: whether each piece must come first in its sequence.
        capacity: tokens of a sequence.

    Returns:
        The sequence of each piece.
    """
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit n is set if a sequence has room for n tokens
    rows, num_rows = [], 0
    for length, is_first in zip(lengths, opens, strict=True):
        fitting = 0 if is_first else rooms >> length
        if fitting:
            # The lowest bit that is set is the least room that is enough.
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            row, room, num_rows = num_rows, capacity, num_rows + 1
        by_room[room - length].append(row)
        if room > length:
            rooms |= 1 << (room - length)
        rows.append(row)
    return rows
