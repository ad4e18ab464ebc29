"""What replica groups compare, and the error of a group that gives way to the others.

Every key of their jobs must be equal, except the keys that are known to be harmless.
titan.checkpoint.identity answers another question, which settings of a run have changed since its checkpoint. A resume may
have another layout, batch or library. Groups may not: they would hold other tensors, or apply the same sum differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from titan.checkpoint.identity import change_lines, differing, leaves
from titan.config.toml import table_beside, tomllib
from titan.ops.replicas import ReplicaError

# Quorums in a row whose groups cannot connect. A group that would join ends after two (replica_groups.py), so before the others.
MOST_APART = 3

# What a group writes about itself, what it reads in advance and what `titan sim` assumes. A section covers its keys.
HARMLESS: list[str] = table_beside(__file__, "tables.toml")["harmless"]


class GroupLeaves(ReplicaError):
    """Error: this group ends, so that the others go on. It may be started again, and takes their state then."""

    kind = "group_leaves"


def apart(names: Sequence[str], own: str, reason: str) -> GroupLeaves:
    """Return the error of a group that cannot connect to the others. The first of the names goes on."""
    return GroupLeaves(
        f"{', '.join(names)} reach the lighthouse, but not each other ({MOST_APART} quorums: {reason.rstrip('.')}). "
        f"{own} ends, so that {names[0]} goes on; GLOO_SOCKET_IFNAME chooses the network card"
    )


def require_same_samples(
    names: Sequence[str], rows: Sequence[Sequence[int]], *, own: int, facts: Sequence[str]
) -> None:
    """Check that this group's facts about the next step are those of most groups.

    If as many groups say one as the other, those that have trained together for fewer steps are wrong, then higher ranks.

    Args:
        names: names of the groups, by rank.
        rows: of each group the values of the facts, and the steps that it has trained with the others.
        own: this group's rank.
        facts: names of the facts.

    Raises:
        GroupLeaves: This group is wrong.
    """
    votes = Counter(tuple(row[:-1]) for row in rows)
    ranks = range(len(rows))  # `max` takes the first of equals
    right = max(ranks, key=lambda rank: (votes[tuple(rows[rank][:-1])], rows[rank][-1]))
    pairs = zip(facts, rows[own][:-1], rows[right][:-1], strict=True)
    if wrong := [
        f"{fact} {mine}, not {theirs}" for fact, mine, theirs in pairs if mine != theirs
    ]:
        raise GroupLeaves(
            f"{names[own]} would train other samples than {names[right]}: {', '.join(wrong)}. "
            f"{names[own]} ends; started again, it takes the state of {names[right]}"
        )


def differences(theirs: str, ours: str) -> list[str]:
    """Return `key: their value -> our value` for each key that must be equal and is not.

    Args:
        theirs: another group's resolved config, as TOML.
        ours: this group's.
    """
    found = differing(*(dict(leaves(tomllib.loads(text))) for text in (theirs, ours)))
    return change_lines(
        {
            key: found[key]
            for key in sorted(found)
            if not any(f"{key}.".startswith(f"{known}.") for known in HARMLESS)
        }
    )
