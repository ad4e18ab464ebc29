"""Many variants of a job at once: which of them fit, which are fast, which are on the Pareto front of speed against memory.

    titan sim JOB.toml --world-size 64 --hardware h100-sxm,h200-sxm --sweep training.local_batch_size=1,2,4 --sweep ...

Variants that the rules refuse are counted, with their reasons. Those that differ in hardware or replicas only share a trace (trace_cache.py).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan.config.errors import ConfigError
from titan.config.load import load_from_argv
from titan.config.rules import check_to_run

from .profiles import Profile
from .replay import ReplayError
from .simulate import GIB, Facts, facts, not_simulated, price
from .trace import Trace, no_garbage_collection
from .trace_cache import TraceRequest, get_traces, remap_ranks


@dataclass
class Variant:
    """A combination of settings on some hardware. facts: as titan.sim.simulate.facts gives them; problem: why there are none."""

    settings: dict[str, str]
    hardware: str
    facts: Facts = field(default_factory=dict)
    problem: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second and GPU; 0 where it does not run."""
        return self.facts["tokens_per_s_per_gpu"] if self.facts else 0.0

    @property
    def reserved_gib(self) -> float:
        return self.facts["memory"]["peak_reserved_gib"] if self.facts else 0.0

    @property
    def fits(self) -> bool:
        return bool(self.facts) and self.facts["fits"]


def combinations(axes: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Every combination of the values of each key."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def sweep(
    job: Sequence[str],
    variants: Iterable[dict[str, str]],
    *,
    world_size: int,
    profiles: Sequence[Profile],
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Variant]:
    """All variants on all hardware, in the order given. job: files and overrides; progress: variants done, of how many."""
    found = [Variant(settings, profile.name) for settings in variants for profile in profiles]
    by_key: defaultdict[str, list[tuple[Variant, TraceRequest, Profile]]] = defaultdict(list)
    request: dict[str, TraceRequest] = {}
    by_name = {profile.name: profile for profile in profiles}
    settled = 0
    for settings, group in itertools.groupby(found, key=lambda variant: variant.settings):
        same = list(group)
        try:
            config = load_from_argv(
                [*job, *(f"--{key}={value}" for key, value in settings.items())]
            )
            layout = check_to_run(config, world_size=world_size)
        except ConfigError as error:
            for variant in same:
                variant.problem = error.problems[0].message
            settled += len(same)
            continue
        one = TraceRequest(config, layout)
        for variant in same:
            variant.problem = not_simulated(config, by_name[variant.hardware])
        able = [
            (variant, one, by_name[variant.hardware]) for variant in same if not variant.problem
        ]
        settled += len(same) - len(able)
        if able:
            request.setdefault(one.key, one)
            by_key[one.key] += able
    progress(settled, len(found))

    def done(one: TraceRequest, traces: dict[int, Trace] | Exception) -> None:
        nonlocal settled
        for variant, this, profile in by_key[one.key]:
            _price(variant, this, traces, profile)
            settled += 1
            progress(settled, len(found))

    with no_garbage_collection():
        get_traces(list(request.values()), processes=processes, done=done)
    return found


def _price(variant: Variant, request: TraceRequest, traces: Any, profile: Profile) -> None:
    if isinstance(traces, Exception):
        variant.problem = str(traces)
        return
    own = [remap_ranks(trace, request.layout) for trace in traces.values()]
    try:
        simulation = price(request.config, request.layout, {t.rank: t for t in own}, profile)
    except ReplayError as error:
        variant.problem = str(error)
        return
    variant.facts = facts(simulation)


def front(variants: Sequence[Variant]) -> list[Variant]:
    """Those that fit and are faster than every other that needs no more memory, the fastest first."""
    best: list[Variant] = []
    for variant in sorted(
        (v for v in variants if v.fits), key=lambda v: (-v.speed, v.reserved_gib)
    ):
        if not best or variant.reserved_gib < best[-1].reserved_gib - 1 / GIB:
            best.append(variant)
    return best


def table(variants: Sequence[Variant], *, most: int = 40) -> str:
    """The fastest variants that fit, with the Pareto front marked; then what became of the others."""
    on_front = {id(variant) for variant in front(variants)}
    fitting = sorted((v for v in variants if v.fits), key=lambda v: -v.speed)
    shown = fitting[:most] + [v for v in fitting[most:] if id(v) in on_front]
    keys = list(variants[0].settings) if variants else []
    several = len({variant.hardware for variant in variants}) > 1
    head = [*(["hardware"] if several else []), *(key.split(".")[-1] for key in keys)]
    rows = [
        [
            *([v.hardware] if several else []),
            *(v.settings[key] for key in keys),
            f"{v.speed:,.0f}",
            "n/a" if v.facts["mfu"] is None else f"{v.facts['mfu']:.1%}",
            f"{v.facts['step_time_s']:.3f}",
            f"{v.reserved_gib:.1f}",
            "*" if id(v) in on_front else "",
        ]
        for v in shown
    ]
    rows.insert(0, [*head, "tokens/s/GPU", "MFU", "step s", "GiB", "front"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += ["", *_others(variants, num_fitting=len(fitting), num_shown=len(shown))]
    return "\n".join(lines)


def _others(variants: Sequence[Variant], *, num_fitting: int, num_shown: int) -> Iterator[str]:
    yield f"{len(variants)} variants: {num_fitting} fit" + (
        f", of which the fastest {num_shown} are shown" if num_shown < num_fitting else ""
    )
    too_big = sum(bool(v.facts) and not v.fits for v in variants)
    if too_big:
        yield f"{too_big} need more memory than there is"
    reasons = Counter(variant.problem for variant in variants if variant.problem)
    for reason, number in reasons.most_common(5):
        yield f"{number} cannot run: {reason}"
