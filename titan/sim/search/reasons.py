"""Why a layout is fast or slow, in numbers from the facts of its simulation: what it waits for, and what changed against the job.

A step is kernels, and what is lost: exposed transfers by axis, the pipeline's bubble, waits for the
host and for copies, and recomputation. The parts add up to the step, so their differences explain
the difference of two layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from titan.sim.report.text import duration
from titan.sim.simulate import Facts

_NAMES = {
    "pp": "PP",
    "dp_replicate": "HSDP",
    "dp_shard": "FSDP",
    "efsdp": "FSDP of experts",
    "cp": "CP",
    "tp": "TP",
    "ep": "EP",
}
_SHOWN = 0.01  # of a step or of the bytes: less is not worth a word
KERNELS = "kernels"
_WORDS = {
    KERNELS: "kernels take {}",
    "recomputation": "recomputes {}",
    "pp bubble": "{} of pp bubble",
    "host": "waits {} for the host",
}


def parts(facts: Facts) -> dict[str, float]:
    """Return the seconds of a step by what they go to. They add up to the step."""
    time, by_axis = facts["time"], facts["comm"]["by_axis"]
    recomputed = time["by_phase_s"].get("recompute", 0.0)
    found = {KERNELS: time["compute_s"] - recomputed, "recomputation": recomputed}
    found |= {"host": time["host_s"], "copies": time["copies_s"]}
    bubble = time["peers_s"]
    for axis, row in by_axis.items():
        if "pp" in axis.split("+"):
            bubble += row["exposed_s"]
        else:
            found[axis.replace("+", " x ")] = row["exposed_s"]
    # Only a pipeline has ranks that wait for others here: the rest of a rank's time is its own.
    return found | {"pp bubble" if len(facts["per_rank"]) > 1 else "other ranks": bubble}


def lost_to(facts: Facts, *, most: int = 3) -> str:
    """Return the causes of lost time in a step, the largest first, as shares of the step: "dp_shard 53%, pp bubble 12%"."""
    found = parts(facts)
    total = sum(found.values())
    shares = {name: s / total for name, s in found.items() if name != KERNELS}
    order = sorted(
        (name for name in shares if shares[name] >= _SHOWN), key=lambda n: -shares[n]
    )
    return ", ".join(f"{name} {shares[name]:.0%}" for name in order[:most]) or "-"


def reason(facts: Facts, job: Facts | None = None) -> str:
    """Return in one line what a layout sends and loses, as differences from the job if its facts are given."""
    found = [_across(facts, job), ", ".join(_times(facts, job))]
    return "; ".join(filter(None, found)) or ("as the job" if job else "loses no time")


def _times(facts: Facts, job: Facts | None) -> Iterator[str]:
    """Yield the parts of a step that changed most, or what the step loses most time to."""
    now, before = parts(facts), parts(job) if job else {}
    names = [name for name in {**before, **now} if job or name != KERNELS]
    change = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in names}
    least = _SHOWN * sum((before or now).values())
    for name in sorted(names, key=lambda name: -abs(change[name]))[:3]:
        if abs(change[name]) >= least:
            sign = "" if job is None else " more" if change[name] > 0 else " less"
            text = _WORDS.get(name, f"waits {{}} for {name}").format(
                f"{duration(abs(change[name]))}{sign}"
            )
            yield text + (_cause(name, facts, job) if job else "")


def _cause(name: str, facts: Facts, job: Facts) -> str:
    """Return the numbers behind a change of a part of the step, or an empty text."""
    pair = (facts, job)
    if name == KERNELS:
        batches = [one["sequences_at_once"] for one in pair]
        degrees = [re.findall(r"tp (\d+)", one["layout"])[0] for one in pair]
        changed = {"sequences at a time: ": batches, "TP ": degrees}
        texts = [f"{what}{a} instead of {b}" for what, (a, b) in changed.items() if a != b]
        return f" ({', '.join(texts)})" if texts else ""
    rows = [one["comm"]["by_axis"].get(name.replace(" x ", "+")) for one in pair]
    if not all(rows) or any(row["card_bytes"] for row in rows):
        return ""  # not both have the axis, or the bytes over the card are named already
    new, old = (row["bytes"] for row in rows)
    return f" ({_size(new)} instead of {_size(old)})" if abs(new - old) > 0.1 * old else ""


def crossing(facts: Facts) -> str:
    """Return which axes cross nodes, and which stay inside them, as text; an empty text within a single node."""
    rows = facts["comm"]["by_axis"]
    sent = {axis: row["card_bytes"] for axis, row in rows.items() if row["card_bytes"]}
    kept = {axis: row["bytes"] for axis, row in rows.items() if axis not in sent}
    # The loss and the norm of the gradients cross every axis in some bytes, which is not worth a
    # word.
    far, near = ([a for a in by if by[a] > _SHOWN * sum(by.values())] for by in (sent, kept))
    if not far:
        return ""
    stays = f", {_names(near)} stay{'s' * (len(near) == 1)} inside them" if near else ""
    return f"{_names(far)} cross{'es' * (len(far) == 1)} nodes{stays}"


def _across(facts: Facts, job: Facts | None) -> str:
    """Return which axes cross nodes, and the bytes that a network card sends, if either changed."""
    by_axis = [one["comm"]["by_axis"].values() for one in (facts, job) if one]
    sent, before = ([sum(row["card_bytes"] for row in rows) for rows in by_axis] + [0])[:2]
    where = crossing(facts) or ("nothing crosses nodes" if before else "")
    if job and where == crossing(job):
        where = ""
    if abs(sent - before) <= 0.05 * before:
        return where
    instead = f" instead of {_size(before)}" if before else ""
    card = f"a network card sends {_size(sent)} a step{instead}"
    return f"{where}: {card}" if where else card


def _names(axes: list[str]) -> str:
    names = ["+".join(_NAMES.get(part, part) for part in axis.split("+")) for axis in axes]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _size(num_bytes: float) -> str:
    """Return bytes as text."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB" if num_bytes else "nothing"
