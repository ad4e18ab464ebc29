"""Simulation of many variants of a job at once.

`titan sim --sweep`, `titan plan` and `titan check` choose the variants.

    titan sim JOB.toml --world-size 64 --hardware h100-sxm,h200-sxm --sweep training.local_batch_size=1,2,4 --sweep ...

Variants that the rules refuse are counted, with their reasons. Variants that differ only in
hardware or replicas share a trace (trace_cache.py). The table of a sweep marks the Pareto front of
speed against memory.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan.base.hardware import MARGIN
from titan.checks.rules import check_to_run, resolve_layout
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv
from titan.config.phases import Phase, phases_of
from titan.observe.columns import duration
from titan.sim.price.profiles import Profile
from titan.sim.record.ranks import remap_ranks
from titan.sim.record.trace import Trace, no_garbage_collection
from titan.sim.record.trace_cache import TraceRequest, get_traces
from titan.sim.replay.queues import ReplayError
from titan.sim.report.phases import combine_phases
from titan.sim.report.text import columns, degrees, say, utilization
from titan.sim.simulate import GIB, Facts, facts, not_simulated, price

from .point import Settings, words

WORLD_SIZE = "world_size"
"""A key of variants that is no key of the config: ranks in all."""


@dataclass
class Variant:
    """Settings of a job on some hardware, with their simulation.

    Attributes:
        settings: overrides of the job.
        hardware: name of the profile.
        facts: facts of titan.sim.simulate.facts, of all phases combined.
        problem: reason why there are none.
        parts: phases that are simulated so far.
    """

    settings: Settings
    hardware: str
    facts: Facts = field(default_factory=dict)
    problem: str = ""
    parts: list[tuple[Phase, Facts]] = field(default_factory=list, repr=False)

    @property
    def speed(self) -> float:
        """Tokens per second and GPU, or 0 if the variant does not run."""
        return self.facts["tokens_per_s_per_gpu"] if self.facts else 0.0

    @property
    def needed_gib(self) -> float:
        """Memory that the fullest rank takes from its device, or 0 if the variant does not run."""
        return self.facts["memory"]["needed_gib"] if self.facts else 0.0

    @property
    def fits(self) -> bool:
        """Whether the variant runs and leaves the margin free."""
        return bool(self.facts) and self.facts["fits"]

    @property
    def is_tight(self) -> bool:
        """Whether the variant runs, but leaves less than the margin free."""
        return bool(self.facts) and self.facts["tight"]

    @property
    def memory(self) -> str:
        """Memory as a table shows it."""
        note = "" if self.fits else " tight" if self.is_tight else " does not fit"
        return f"{self.needed_gib:.1f}{note}" if self.facts else ""


def combinations(axes: dict[str, list[str]]) -> Iterator[Settings]:
    """Yield every combination of the values of each key."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def simulate_variants(
    job: Sequence[str],
    settings: Iterable[Settings],
    *,
    world_size: int,
    profiles: Sequence[Profile],
    processes: int | None = None,
    progress: Callable[[int, Sequence[Variant]], None] = lambda done, variants: None,
) -> list[Variant]:
    """Simulate a job with each of these settings on each profile.

    Args:
        job: files and overrides, as on the command line.
        settings: overrides of each variant: keys of the config, and WORLD_SIZE.
        world_size: number of ranks, for variants that do not say.
        profiles: hardware to price every variant on.
        processes: number of processes that trace at once. All cores by default.
        progress: called with the number of variants that are done, and all. Those that run have
            facts.

    Returns:
        The variants, by settings and then by profile. A variant that cannot run has a `problem` and
            no `facts`.
    """
    variants: list[Variant] = []
    by_key = defaultdict[str, list[tuple[Variant, TraceRequest, Profile, Phase]]](list)
    phases_left = Counter[int]()
    for chosen in settings:
        # One Variant for each profile: the settings are checked and traced once for all of them.
        of_settings = [Variant(chosen, profile.name) for profile in profiles]
        variants += of_settings
        overrides = dict(chosen)
        ranks = int(overrides.pop(WORLD_SIZE, world_size))
        try:
            config = load_from_argv([*job, *words(overrides)])
            check_to_run(config, world_size=ranks)
        except ConfigError as error:
            # One reason is enough for a table that counts them.
            for variant in of_settings:
                variant.problem = error.problems[0].message
            continue
        for variant, profile in zip(of_settings, profiles, strict=True):
            variant.problem = not_simulated(config, profile)
            for phase in () if variant.problem else phases_of(config, world_size=ranks):
                layout = resolve_layout(phase.config, ranks)
                request = TraceRequest(phase.config.on_device(profile.device_kind), layout)
                # Variants that differ in hardware or replicas alone share a key, and so a trace.
                by_key[request.key].append((variant, request, profile, phase))
                phases_left[id(variant)] += 1

    def report() -> None:
        # Refused variants are done already.
        progress(len(variants) - len(+phases_left), variants)

    def done(traced: TraceRequest, traces: dict[int, Trace] | Exception) -> None:
        # One trace serves all variants of the key, each with its own replicas and hardware.
        for variant, request, profile, phase in by_key.pop(traced.key):
            _price(variant, request, traces, profile, phase)
            phases_left[id(variant)] -= 1
            if not phases_left[id(variant)]:
                variant.facts = {} if variant.problem else combine_phases(variant.parts)
                variant.parts.clear()
        report()

    report()
    with no_garbage_collection():
        requests = [parts[0][1] for parts in by_key.values()]
        get_traces(requests, processes=processes, done=done)
    return variants


def _price(
    variant: Variant, request: TraceRequest, traces: Any, profile: Profile, phase: Phase
) -> None:
    """Price and replay one phase of a variant."""
    if isinstance(traces, Exception):
        variant.problem = str(traces)
        return
    own = [remap_ranks(trace, request.layout) for trace in traces.values()]
    try:
        simulation = price(request.config, request.layout, {t.rank: t for t in own}, profile)
    except ReplayError as error:
        variant.problem = str(error)
        return
    variant.parts.append((phase, facts(simulation)))


@dataclass
class Search:
    """Search for settings of a job: it simulates the job with each of them. Every command that chooses settings has one.

    Attributes:
        job: files and overrides, as on the command line.
        world_size: number of ranks.
        profile: the hardware.
        processes: number of processes that trace at once. All cores by default.
        what: label of the progress.
        total: number of settings that will be simulated, as far as it is known.
        known: variants so far.
        stopped: whether Ctrl-C has ended the search, so that variants lack facts and problem. None:
            it ends the command.
    """

    job: Sequence[str]
    world_size: int
    profile: Profile
    processes: int | None = None
    what: str = "candidates simulated"
    total: int = 0
    known: list[Variant] = field(default_factory=list)
    stopped: bool | None = None
    began_s: float = field(default_factory=time.monotonic)

    def __call__(self, settings: Iterable[Settings]) -> list[Variant]:
        """Return the job with each of these settings, simulated."""
        # The job as it is counts with the next ones.
        before = sum(bool(variant.settings) for variant in self.known)
        found: Sequence[Variant] = []

        def progress(done: int, variants: Sequence[Variant]) -> None:
            nonlocal found
            found, done = variants, before + done
            left = max(self.total, before + len(variants)) - done
            text = f"{done} of {done + left} {self.what}"
            if done and left:
                spent_s = time.monotonic() - self.began_s
                text += f", about {duration(spent_s / done * left)} left"
            best = max((*self.known, *variants), key=lambda v: v.fits * v.speed, default=None)
            if best and best.fits:
                text += f", best so far {best.speed:,.0f} tokens/s/GPU: {degrees(best.facts)}"
            say(text)

        try:
            found = simulate_variants(
                self.job,
                settings,
                world_size=self.world_size,
                profiles=[self.profile],
                processes=self.processes,
                progress=progress,
            )
        except KeyboardInterrupt:
            if self.stopped is None:
                raise
            self.stopped = True
        self.known += found
        return [*found]


def front(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that fit and beat all others that need no more memory, the fastest first."""
    best: list[Variant] = []
    for variant in sorted(
        (v for v in variants if v.fits), key=lambda v: (-v.speed, v.needed_gib)
    ):
        # From the fastest down, a variant is on the front if it needs less memory than all before
        # it. The margin of one byte keeps out equals.
        if not best or variant.needed_gib < best[-1].needed_gib - 1 / GIB:
            best.append(variant)
    return best


def table(variants: Sequence[Variant], *, most: int = 40) -> str:
    """Return a table of the fastest variants that fit and of the front, and counts of the others."""
    on_front = {id(variant) for variant in front(variants)}
    fitting = sorted((v for v in variants if v.fits), key=lambda v: -v.speed)
    # The front is complete, also beyond the fastest rows.
    shown = fitting[:most] + [v for v in fitting[most:] if id(v) in on_front]
    keys = list(variants[0].settings) if variants else []
    several = len({variant.hardware for variant in variants}) > 1
    head = [*(["hardware"] if several else []), *(key.split(".")[-1] for key in keys)]
    rows = [[*head, "tokens/s/GPU", "MFU", "step s", "GiB", "front"]]
    for v in shown:
        which = [*([v.hardware] if several else []), *v.settings.values()]
        cost = [f"{v.facts['step_time_s']:.3f}", f"{v.needed_gib:.1f}"]
        mark = "*" if id(v) in on_front else ""
        rows.append([*which, f"{v.speed:,.0f}", utilization(v.facts), *cost, mark])
    others = _others(variants, num_fitting=len(fitting), num_shown=len(shown))
    return "\n".join([*columns(rows), "", *others])


def _others(variants: Sequence[Variant], *, num_fitting: int, num_shown: int) -> Iterator[str]:
    """Yield the counts of variants that the table does not show."""
    yield f"{len(variants)} variants: {num_fitting} fit" + (
        f", of which the fastest {num_shown} are shown" if num_shown < num_fitting else ""
    )
    if tight := sum(v.is_tight for v in variants):
        yield f"{tight} run, but leave less than {MARGIN:.0%} of the memory free"
    if too_big := sum(bool(v.facts) and not (v.fits or v.is_tight) for v in variants):
        yield f"{too_big} need more memory than there is"
    reasons = Counter(variant.problem for variant in variants if variant.problem)
    # Only the most frequent reasons: a sweep may have thousands.
    for reason, number in reasons.most_common(5):
        yield f"{number} cannot run: {reason}"
