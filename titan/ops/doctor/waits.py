"""Waits of ranks for each other, from their flight recorders side by side.

If all ranks of a group call the same collectives in the same order, one collective has the same
number on each of them. So if a rank has begun fewer collectives than another rank of its group, the
other rank waits for it. A rank that has begun another operation, or other sizes, under the same
number is a mismatch. Sends and receives are counted per pair and direction.

Other ranks may wait for a rank that waits itself, in other groups (FSDP's behind a pipeline's). The
first rank of such a chain does not wait, and others wait for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .evidence import Call, Dump, Message

# Collectives with equal sizes on all ranks. Ranks may pass different sizes to others.
_SAME_SIZES = ("allreduce", "allgather", "reducescatter", "broadcast")


@dataclass(frozen=True)
class Wait:
    """Wait for a rank that has not begun a collective.

    Attributes:
        rank: rank that is behind.
        waiting: ranks that have begun the collective.
        axis: mesh axis of the group.
        seq: number of the collective in its group.
        what: operation and sizes.
        line: source line of the call.
        since_unix_s: time of the call on a waiting rank.
    """

    rank: int
    waiting: tuple[int, ...]
    axis: str
    seq: int
    what: str
    line: str
    since_unix_s: float


@dataclass(frozen=True)
class Mismatch:
    """Different calls of ranks under one number.

    Attributes:
        axis: mesh axis of the group.
        seq: number of the collective in its group.
        calls: ranks by the text of their call, the most frequent text first.
        lines: source line by the text of the call.
        differs: "operation", "dtype" or "shape".
    """

    axis: str
    seq: int
    calls: dict[str, tuple[int, ...]]
    lines: dict[str, str]
    differs: str


def find_waits(dumps: dict[int, Dump]) -> list[Wait]:
    """Return a row for each rank and group in which the rank is behind."""
    return [*_waits_in_groups(dumps), *_waits_of_pairs(dumps)]


def root(waits: Iterable[Wait], dumps: dict[int, Dump]) -> Wait | None:
    """Return the wait that causes all others; None if no rank is behind, or each rank waits for another."""
    waits = list(waits)
    waiting = {rank for wait in waits for rank in wait.waiting}
    # A rank that does not wait is surely the root. A rank that waits for no recorded rank may be it.
    active = [wait for wait in waits if not dumps[wait.rank].main_thread.waits]
    candidates = active or [wait for wait in waits if wait.rank not in waiting]
    return min(candidates, key=lambda wait: wait.since_unix_s, default=None)


def find_mismatch(dumps: dict[int, Dump]) -> Mismatch | None:
    """Return the first mismatch among the entries that all ranks of a group still record."""
    calls: dict[tuple[str, str, int], dict[int, Call]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            # Sends and receives are compared by pair, below.
            if not entry.p2p_seq:
                calls[entry.group, entry.backend, entry.seq][rank] = entry
    mismatches = []
    for (group, _, seq), by_rank in calls.items():
        # The operation first: two operations differ in their sizes as well.
        for differs in ("operation", "dtype", "shape"):
            if len({_signature(entry, differs) for entry in by_rank.values()}) > 1:
                first = min(entry.enqueued_unix_s or 0 for entry in by_rank.values())
                mismatches.append((first, group, seq, differs, by_rank))
                # One difference for each number is enough.
                break
    if not mismatches:
        return None
    # Later mismatches follow from the first.
    _, group, seq, differs, by_rank = min(mismatches, key=lambda row: row[0])
    texts = {rank: describe(entry) for rank, entry in by_rank.items()}
    frequent = [text for text, _ in Counter(texts.values()).most_common()]
    return Mismatch(
        axis=next((d.groups[group].axis for d in dumps.values() if group in d.groups), ""),
        seq=seq,
        calls={text: tuple(r for r in sorted(texts) if texts[r] == text) for text in frequent},
        lines={texts[rank]: entry.line for rank, entry in by_rank.items()},
        differs=differs,
    )


def describe(entry: Call) -> str:
    """Format a call, such as "all_gather of 4 x 16 float"."""
    # At most two operands: lists of many tensors would fill the page.
    sizes = " and ".join(" x ".join(map(str, size)) for size in entry.input_sizes[:2])
    dtype = entry.input_dtypes[0].lower() if entry.input_dtypes else ""
    operands = f" of {sizes} {dtype}" if sizes else ""
    return f"{entry.called or entry.operation}{operands}"


def _signature(entry: Call, what: str) -> str:
    name = entry.operation.lower().replace("_", "")  # NCCL's names have underscores
    if what == "operation":
        return name
    if not name.startswith(_SAME_SIZES):
        return ""
    return str(entry.input_dtypes if what == "dtype" else entry.input_sizes)


def _waits_in_groups(dumps: dict[int, Dump]) -> Iterator[Wait]:
    # By group and backend: a group may have both backends, and each has its own count.
    begun: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for name, group in dump.groups.items():
            # 0 for a rank that has begun no collective in the group.
            for backend in ("gloo", "nccl"):
                begun[name, backend][rank] = group.begun.get(backend, 0)
    for (name, backend), counts in begun.items():
        for rank, num in counts.items():
            ahead = [other for other, n in sorted(counts.items()) if n > num]
            if not ahead:
                continue
            # The recorder of a rank ahead has the missing collective, unless it is too old.
            key = (name, backend, num + 1)
            entries = dumps[ahead[0]].entries
            entry = next((e for e in entries if (e.group, e.backend, e.seq) == key), None)
            yield Wait(
                rank=rank,
                waiting=tuple(ahead),
                axis=dumps[rank].groups[name].axis,
                seq=num + 1,
                what=describe(entry) if entry else "a collective",
                line=entry.line if entry else "",
                since_unix_s=(entry.enqueued_unix_s if entry else None) or 0,
            )


def _waits_of_pairs(dumps: dict[int, Dump]) -> Iterator[Wait]:
    last: dict[tuple[int, int, bool], Message] = {}  # by rank, peer, and whether it sends
    for rank, dump in dumps.items():
        # The newest message of each direction: its number counts all before it.
        for row in dump.p2p:
            last[rank, row.peer, row.sends] = row
    for (rank, peer, sends), row in last.items():
        # The other end of the pair, in the same direction.
        other = last.get((peer, rank, not sends))
        seq = other.seq if other else 0
        # Without a dump of the peer nothing can be compared.
        if peer not in dumps or seq >= row.seq:
            continue
        verb = f"its {'receive from' if sends else 'send to'} rank {rank}"
        size = " x ".join(map(str, row.size))
        yield Wait(
            rank=peer,
            waiting=(rank,),
            axis=row.axis,
            seq=seq + 1,
            what=f"{verb} of {size} {row.dtype}",
            line=row.line,
            since_unix_s=row.enqueued_unix_s,
        )
