"""How sure a predicted speed is: an interval, from the errors of the classes of work that a step consists of.

A step is a sum of classes: matmuls, attention, transfers within a node, ... The simulator misses
the time of each class by some factor, of which `sigma` is the standard deviation. A step of which a
class is the share s is off by s sigma, so that

    log(measured / predicted)   has the variance   floor^2 + sum over classes (s sigma)^2

scripts/sim_accuracy.py fits `sigma` and `floor` to published runs, and writes errors.toml beside
this file. `factor` is the number of such standard deviations that held 90% of the runs, each
predicted without the runs of its own publication. Example: 60% matmuls (sigma .05) and 20%
transfers (sigma .3), floor .02, factor 1.6: the root of (.02^2 + .03^2 + .06^2) is .07, and the
interval is the prediction times exp(+-.11).

Two variants of one job share most of their error: a machine whose matmuls are slower than predicted
slows both. Only shares that differ count in a comparison, (s_a sigma - s_b sigma)^2, with a floor
of its own. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from math import exp, hypot, log
from pathlib import Path
from typing import Any, NamedTuple

from titan.config.toml import read_toml
from titan.sim.price.profiles import Profile
from titan.sim.record.trace import Trace
from titan.sim.replay.timeline import KernelGroup, Timeline, axis_of

ERRORS = Path(__file__).with_name("errors.toml")
HARDWARE = "this card's figures"
"""Class of a whole step on hardware that no published run supports."""
TENSOR = "tensor parallelism"
"""Class of a whole step with it: what DTensor launches beside matmuls differs more between versions than other work."""
UNRATED = 0.25
"""Standard deviation of the time of attention in a kernel without rates, beside attention's own: that of a class without runs."""
_WAITS = {"pp": "waiting for stages", "ep": "experts' dispatch"}
"""Classes of transfers of these axes. The others are transfers within a node or between nodes."""


class SpeedInterval(NamedTuple):
    """Interval of a predicted speed, in tokens/s/GPU.

    Attributes:
        low: its lower end.
        high: its upper end.
        level: share of the measurements that such intervals hold.
        reason: classes that make it wide, the worst first.
    """

    low: float
    high: float
    level: float
    reason: str


@cache
def errors() -> dict[str, Any]:
    """Return errors.toml: `level`, `factor`, `floor`, `pair_floor`, `untested_card`, `sigma` and `runs` by class, numbers of runs by `devices`."""
    return read_toml(ERRORS)[0]


def shares(
    timeline: Timeline, traces: Mapping[int, Trace], profile: Profile
) -> dict[str, float]:
    """Return the share of each class in a simulated step, as a mean over the traced ranks. They add up to 1."""
    groups = {axis_of(g): g for t in traces.values() for g in t.groups.values()}
    per_node = profile.gpus_per_node
    seconds = defaultdict[str, float](float)
    for rank in timeline.ranks.values():
        for work, s in rank.by_work_s.items():
            seconds[_class_of(work, is_split="cp" in rank.num_sent)] += s
        for axis, s in rank.exposed_s.items():
            is_near = axis in groups and len({n // per_node for n in groups[axis].ranks}) == 1
            link = "transfers within a node" if is_near else "transfers between nodes"
            seconds[next((_WAITS[a] for a in axis.split("+") if a in _WAITS), link)] += s
        seconds["eager kernels"] += rank.copies_s
        seconds["waiting for the host"] += rank.host_s
        seconds["waiting for stages"] += rank.peers_s
    total = sum(seconds.values())
    return {name: s / total for name, s in seconds.items() if s}


def _class_of(work: KernelGroup, *, is_split: bool) -> str:
    """Return the class of kernels. is_split: their sequences are split over ranks."""
    kind, host, dtype, module = work
    if kind == "matmul":
        return "matmuls in 8 bits" if dtype.startswith("float8") else "matmuls"
    if kind.startswith("attention"):
        return "attention across ranks" if is_split else "attention"
    if {"moe", "experts", "router"} & {*module.split(".")}:
        return "experts' dispatch"
    return "compiled kernels" if host == "compiled" else "eager kernels"


def rests_on(profile: Profile) -> dict[str, str]:
    """Return the source of the time of each class: measured tables or rates of the card, datasheets, estimates."""
    table = f"measured table of {profile.measured}" if profile.measured else "datasheet"
    traced = "step" in profile.sources["matmul_share"].partition(";")[0]
    level = "a traced step" if traced else "a benchmark"
    kernels = "bytes, at the datasheet's bandwidth times a share by size"
    attention = "published rates of the kernel by length"
    host = profile.sources["host_tiny_us"].partition(":")[0].partition(" ")[0]
    return {
        "matmuls": f"{table}, at the level of {level}",
        "matmuls in 8 bits": f"{table}, at the level of a benchmark",
        "attention": attention,
        "attention across ranks": attention,
        "eager kernels": kernels,
        "compiled kernels": kernels,
        "experts' dispatch": f"{table}, and bytes",
        "transfers within a node": table,
        "transfers between nodes": "datasheet of the network cards",
        "waiting for the host": f"counted calls; a tiny operation is {'an estimate' if host == 'estimate' else 'measured'}",
    }


def lacks_runs(profile: Profile) -> str:
    """Return why no published run supports a profile, or an empty text."""
    if profile.unsupported:
        return "its main figures have no sources"
    return "" if profile.device in errors()["devices"] else "no published run tests this device"


def interval_facts(
    speed: float,
    timeline: Timeline,
    traces: Mapping[int, Trace],
    profile: Profile,
    *,
    has_rates: bool = True,
) -> dict[str, Any]:
    """Return the interval of a simulated speed as data, with the shares of the step that it comes from.

    Args:
        speed: tokens/s/GPU.
        timeline: the step.
        traces: traces by global rank.
        profile: the hardware.
        has_rates: whether the profile has rates of the step's kernels of attention.
    """
    mix = shares(timeline, traces, profile)
    if any("tp" in group.axes for trace in traces.values() for group in trace.groups.values()):
        mix[TENSOR] = 1.0
    known = errors()
    whole = known["sigma"][HARDWARE]
    runs = known["devices"].get(profile.device, 0)
    card = whole if profile.unsupported else 0.0 if runs else known["untested_card"]
    attention = sum(share for name, share in mix.items() if name.startswith("attention"))
    deviation = card if has_rates else hypot(card, UNRATED * attention)
    if deviation:
        mix[HARDWARE] = deviation / whole
    rest = {name: text for name, text in rests_on(profile).items() if mix.get(name)}
    found = of_speed(speed, mix)
    return {"shares": mix, "rests_on": rest, "runs": runs, **found._asdict()}


def of_speed(speed: float, mix: Mapping[str, float]) -> SpeedInterval:
    """Return the interval of a predicted speed.

    Args:
        speed: tokens/s/GPU.
        mix: shares of the classes.
    """
    known, sigma = errors(), errors()["sigma"]
    deviation = _deviation(mix, known["floor"], sigma)
    width = known["factor"] * deviation
    # The classes that make a fifth of the variance or more.
    worst = sorted(mix, key=lambda name: -mix[name] * sigma[name])
    worst = [n for n in worst[:2] if (mix[n] * sigma[n]) ** 2 > deviation**2 / 5]
    seen = {
        n: f" ({mix[n]:.0%} of the step, seen in {known['runs'][n] or 'no'} runs)"
        for n in worst
    }
    whole = (HARDWARE, TENSOR)  # they are of a step, and no share of it
    reason = " and ".join(n + ("" if n in whole else seen[n]) for n in worst)
    return SpeedInterval(speed * exp(-width), speed * exp(width), known["level"], reason)


def _deviation(mix: Mapping[str, float], floor: float, sigma: Mapping[str, float]) -> float:
    """Return the standard deviation of log(measured / predicted)."""
    return hypot(floor, *(share * sigma[name] for name, share in mix.items()))


def cannot_tell_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two variants of a job are equally fast, as far as the simulator can tell.

    Args:
        a: facts of one variant, from titan.sim.simulate.facts.
        b: facts of the other.
    """
    return abs(log(a["tokens_per_s_per_gpu"] / b["tokens_per_s_per_gpu"])) <= ratio_width(a, b)


def ratio_width(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the half width of the interval of log(speed of a / speed of b)."""
    known, one, other = errors(), a["interval"]["shares"], b["interval"]["shares"]
    return known["factor"] * ratio_deviation(one, other, known["sigma"], known["pair_floor"])


def ratio_deviation(
    a: Mapping[str, float], b: Mapping[str, float], sigma: Mapping[str, float], floor: float
) -> float:
    """Return the standard deviation of the error of a predicted ratio, from the shares of both steps.

    The error of a class is one number for both steps, so that the difference of its shares counts.
    """
    apart = {name: a.get(name, 0.0) - b.get(name, 0.0) for name in {*a, *b}}
    return _deviation(apart, floor, sigma)
