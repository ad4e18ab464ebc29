"""Command `titan plan JOB.toml --world-size N --hardware H`: fast layouts of a job that fit, each as a TOML overlay.

The search varies the degrees of the axes, ZeRO-2 or ZeRO-3, batch, schedule, stages and
recomputation; on request also compile, float8 and asynchronous TP. Model, data and global batch
stay the job's, which is simulated as it is, too.

    job       the job as it is, and its single changes of recomputation, ZeRO, TP or EP, are simulated
    all       every legal combination is scored by a formula, thousands in a second
    first     the best of each kind are simulated
    then      neighbours of the fastest that fit (one setting changed), until `budget` candidates are simulated
    batch     the fastest is simulated with twice the global batch, or with --free global_batch with several

candidates.py has the formula, and reasons.py the words. `budget` does not count the first row,
except for degrees of EP. The page shows the best of each kind of layout (axes in use, and which
cross nodes) before variants of it.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from titan.base.signals import EXIT_INTERRUPTED
from titan.checks.rules import advise
from titan.config.errors import choose
from titan.config.load import print_warnings
from titan.config.model import model_title
from titan.config.options import check_target, mistake, positive, put_json
from titan.sim.report.intervals import cannot_tell_apart
from titan.sim.report.text import (
    columns,
    degrees,
    job_parser,
    price_rows,
    say,
    unsupported,
    utilization,
)

from . import fsdp
from .candidates import LayoutSearch
from .command import figure_names, figures, read_command, settings_overlay
from .exploration import Exploration
from .point import ALSO, Kind, Point
from .reasons import reason
from .variants import Variant

_BUDGET = 20  # candidates that are simulated
_SLOW = 0.5  # of the best speed: a kind of layout that is slower gets no row before variants of faster ones


Ranked: TypeAlias = "tuple[Point, Variant]"


@dataclass
class Plan:
    """Result of a search.

    Attributes:
        job: the job as it is.
        ranked: candidates that run: first those that fit, the fastest first, then the tight ones.
        batches: the first of them, by other global batches in sequences.
    """

    job: Variant
    ranked: list[Ranked]
    batches: dict[int, Ranked]


def plan(search: LayoutSearch, *, budget: int, free_batch: bool = False) -> Plan:
    """Simulate the job, its single changes, `budget` other candidates, and the best with another global batch.

    Args:
        search: search of the job.
        budget: number of candidates to simulate, without single changes of the job.
        free_batch: whether to try several global batches, rather than twice the job's alone.

    Returns:
        The job, and the candidates that run.
    """
    explored, own = Exploration(search), search.own()
    singles: list[Point] = []
    if own is not None:
        search.seen.add(own)
        singles = search.single_changes(own)
    # The job costs nothing of the budget, nor do its single changes, except those of EP.
    num_free = sum(own is not None and point.ep == own.ep for point in singles)
    alone = explored.seeds()
    # Half of the budget explores, the rest improves the results.
    num_first = budget // 2 - len(alone) - len(singles) + num_free
    search.total = budget = budget + num_free
    points = [*singles, *alone, *search.first(max(1, num_first))]
    [job] = explored.simulate(points, {})
    if own is not None and job.facts:
        explored.tried[own] = replace(job, settings=search.settings(own))
        budget += 1
    while not search.stopped:
        # A sixth of the budget in each round, so that later rounds start from better centres.
        count = max(0, min(budget - len(explored.tried), max(2, search.total // 6)))
        alone = explored.lighter(alone)[:count]
        ranked, fitting = explored.ranked(own), explored.fitting
        # A tight candidate may have a neighbour that fits and is faster than those that do.
        centres = [*ranked[: min(2, len(fitting))], *ranked[len(fitting) :][:1]]
        # If nothing runs, try the next best candidates of the formula.
        count -= len(alone)
        more = search.neighbours(centres, count) if centres else search.first(count)
        points = [*alone, *more]
        if not points:
            break
        explored.simulate(points)
    if search.stopped:
        search.seen &= {own, *explored.tried}
    # The job has a row of its own. As a candidate it is shown only if nothing is faster.
    ranked = explored.ranked(own)
    shown = [(p, explored.tried[p]) for n, p in enumerate(ranked) if n == 0 or p != own]
    has_time = shown and not search.stopped
    batches = try_batches(search, shown[0], free=free_batch) if has_time else {}
    return Plan(job, shown, batches)


def try_batches(search: LayoutSearch, best: Ranked, *, free: bool) -> dict[int, Ranked]:
    """Simulate the best plan with other global batches, and return the fastest that fits with each.

    Args:
        search: search of the job.
        best: the best plan.
        free: whether to try half, 2, 4 and 8 times the batch, each with several local batches and
            modes of recomputation, rather than twice the batch once.
    """
    if search.config.phase:  # which may have batches of their own
        return {}
    point, variant = best
    pairs: list[tuple[int, Point]] = []
    for sequences in (int(search.global_batch * f) for f in ((0.5, 2, 4, 8) if free else (2,))):
        other = LayoutSearch(
            search.job,
            search.config,
            search.profile,
            world_size=search.world_size,
            global_batch=sequences,
        )
        near = [p for p in other.same_layout(point) if free or p.recompute == point.recompute]
        # The formula's memory, corrected by what it misses of the best plan.
        missed = variant.needed_gib - search.estimated_gib(point)
        near = [p for p in near if other.estimated_gib(p) + missed < search.profile.usable_gib]
        # The best mode of recomputation for each local batch: the formula knows little of what a
        # larger one gains.
        modes = {p.batch: p for p in sorted(near, key=other.seconds, reverse=True)}
        largest = sorted(modes.values(), key=lambda p: -p.batch)[: 3 if free else 1]
        pairs += [(sequences, p) for p in largest]
    layers = search.model.n_layers
    found = search(p.settings(sequences, num_layers=layers) for sequences, p in pairs)
    # Of each batch, the fastest that fits, or what needs least.
    tries = [(*pair, one) for pair, one in zip(pairs, found, strict=True) if one.facts]
    tries.sort(key=lambda one: (one[2].fits * one[2].speed, -one[2].needed_gib))
    return dict(sorted({sequences: (p, one) for sequences, p, one in tries}.items()))


# ---- the command ---------------------------------------------------------------------------------


def kinds_first(search: LayoutSearch, ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return the candidates with the best of each kind before variants of the same kinds, slow kinds after them, tight ones last."""
    firsts: dict[Kind, Point] = {}
    least = _SLOW * max((variant.speed for _, variant in ranked), default=0.0)
    for point, variant in ranked:
        if variant.speed >= least:
            firsts.setdefault(search.kind(point), point)
    best = {*firsts.values()}
    return sorted(ranked, key=lambda one: (one[1].is_tight, one[0] not in best))


def table(search: LayoutSearch, job: Variant, shown: Sequence[Ranked]) -> Iterator[str]:
    """Yield a table of the job and of plans: layout, batch, speed, memory and what they lose time to. Then the reasons."""
    named = [("job", search.own(), job)]
    named += [(f"{number} ", *one) for number, one in enumerate(shown, 1)]
    base = job.speed if job.fits or job.is_tight else 0.0
    head = ["", "layout", "ZeRO", "batch", "schedule", "AC", "also"]
    rows = [[*head, *figure_names(search.config)]]
    for name, point, variant in named:
        cells = ["-"] * 5  # settings that are not searched
        if point is not None:
            schedule, batch = "-", str(point.batch)
            if point.pp > 1:
                schedule = f"{point.schedule} x {point.stages}".removesuffix(" x 1")
                batch += f" by {point.microbatch}"
            also = " ".join(point.also) or "-"
            cells = [str(point.zero), batch, schedule, _mode(point), also]
            # Memory tells those that fit from tight ones, so their speeds are not compared.
            is_comparable = name not in ("job", "1 ") and variant.fits == shown[0][1].fits
            if is_comparable and cannot_tell_apart(shown[0][1].facts, variant.facts):
                name = name.replace(" ", "=")
        layout = degrees(variant.facts) if variant.facts else variant.problem[:60]
        rows.append([name, layout, *cells, *figures(variant, base)])
    # A column in which no row has anything is left out.
    used = [column for column in zip(*rows, strict=True) if {*column[1:]} - {"-", ""}]
    rows = [list(row) for row in zip(*used, strict=True)]
    yield from columns(rows, left=(0, 1, rows[0].index("lost to")))
    yield "\nwhy" + (", against the job" if job.facts else "")
    for name, _, variant in named:
        if variant.facts:
            before = job.facts if job.facts and variant is not job else None
            yield f"  {name:<4} {reason(variant.facts, before)}"
    rows = price_rows(shown[0][1].facts["interval"])
    bases = ", ".join(f"{work} {share} ({runs})" for work, share, runs, _ in rows)
    yield f"plan 1 rests on published runs of each class of its work: {bases}"


def refused(search: LayoutSearch, best: Point) -> list[Point]:
    """Return the first point of each kind that the formula ranks above `best` and the job's rules refuse."""
    tried = {*map(search.kind, search.seen)}
    found: dict[Kind, Point] = {}
    for point in search.points:
        if search.seconds(point) >= search.seconds(best):
            break
        kind = search.kind(point)
        if kind not in tried and not search.legal(point):
            found.setdefault(kind, point)
    return [*found.values()]


def _mode(point: Point) -> str:
    """Return the mode of recomputation as a table shows it."""
    return f"every {point.recompute}nd" if point.recompute.isdecimal() else point.recompute


def _remarks(search: LayoutSearch, found: Plan, *, wall_s: float) -> Iterator[str]:
    """Yield explanations of the table, and advice."""
    profile = search.profile
    num_seen = len(search.seen - {search.own()})  # the job itself is no candidate
    ranked = [variant for point, variant in found.ranked if point != search.own()]
    num_fitting = sum(variant.fits for variant in ranked)
    yield (
        f"\n{num_seen} candidates simulated in {wall_s:.0f} s: {num_fitting} fit, {len(ranked) - num_fitting} tight, {num_seen - len(ranked)} do not run. "
        f"GiB: peak reserved by the allocator, and what is outside of it, on the fullest rank, of {profile.memory_gib:g}. What fits "
        f"leaves {profile.margin:.0%} free; what is tight leaves less, or gives back its cache"
    )
    yield (
        "'=': as fast as the first, as far as the simulator can tell: within the interval of the ratio of the two speeds. Lost to: "
        "shares of the step that exposed transfers of an axis, the bubble, the host and recomputation take. MFU counts "
        f"{search.config.metrics.mfu_convention} attention"
    )
    if num_seen < min(_BUDGET, len(search.points)):
        yield (
            f"few candidates: {num_seen} of {len(search.points):,} that may fit were simulated; --simulate {_BUDGET}, "
            "the default, or more may find a faster one"
        )
    best = found.ranked[0][0]
    for point in refused(search, best)[:2]:
        share = search.seconds(best) / search.seconds(point) - 1
        yield f"refused: {point}, {share:.0%} faster than plan 1 by formula ({search.refusals[point]})"
    if untried := search.untried():
        guess = untried[0]
        share = search.seconds(best) / search.seconds(guess)
        yield (
            f"kinds of layout (axes in use, and which of them cross nodes) not simulated: {len(untried)}; the best by formula is "
            f"{guess}, with {share:.0%} of the speed that the formula gives to plan 1"
        )


def _fixed(search: LayoutSearch, also: Sequence[str]) -> str:
    """Return the settings that no candidate changes."""
    config, training = search.config, search.config.training
    techniques = (
        config.compile.enable,
        bool(config.model.converters),
        config.parallelism.enable_async_tensor_parallel,
    )
    on = dict(zip(ALSO, techniques, strict=True))
    fixed = [f"{name} {'on' if on[name] else 'off'}" for name in on if name not in also]
    if config.phase:
        of_run = "speed and step are means of the run, all else is of the fullest"
        fixed.append(f"{len(config.phase) + 1} phases ({of_run})")
    return (
        f"held fixed: {config.model.name} {model_title(config.model)}, {training.seq_len:,} tokens a sequence, global batch {search.global_batch:,} "
        f"sequences, {training.compute_dtype}, {config.optimizer.name}, context parallelism by "
        f"{config.parallelism.context_parallel_rotate_method}, {', '.join(fixed) or 'nothing else'}"
    )


def _prices(search: LayoutSearch, found: Plan, *, free: bool) -> Iterator[str]:
    """Yield the price of the fixed global batch: what others gain."""
    speed = found.ranked[0][1].speed
    if not (found.batches or search.config.phase):
        yield "2 x the batch: plan 1 has no room for it, by the formula of its memory"
    for sequences, (point, variant) in found.batches.items():
        times = sequences / search.global_batch
        fits = "fits" if variant.fits else "tight" if variant.is_tight else "does not fit"
        how = f"plan 1 with local batch {point.batch}, AC {_mode(point)}"
        yield (
            f"{times:g} x the batch: {variant.speed / speed - 1:+.0%}, {fits} in {variant.needed_gib:.1f} GiB "
            f"({sequences:,} sequences, {variant.speed:,.0f} tokens/s/GPU; {how})"
            + ("" if free else "; --free global_batch tries others")
        )


def _overlay(name: str, variant: Variant, job: Sequence[str]) -> str:
    """Return a plan as a TOML overlay."""
    facts = variant.facts
    mfu = "" if facts["mfu"] is None else f", {utilization(facts)} MFU"
    needed = f"{variant.needed_gib:.1f} GiB" + (", tight" if variant.is_tight else "")
    where = f"{needed}, on {facts['world_size']} x {facts['hardware']}"
    summary = f"{name}: {variant.speed:,.0f} tokens/s/GPU{mfu}, {where}"
    return settings_overlay(
        variant.settings, summary, f"titan train {' '.join(job)} {name}.toml"
    )


def _parser() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = job_parser(
        "plan",
        f"[--only fsdp|sac] [--free global_batch] [--simulate {_BUDGET}] [--also A,B] [--most 5] [--memory GIB] [--output DIR] [--json FILE]",
        "The fastest ways to run a job on so many devices, by simulation, as TOML overlays, beside the job as it is. Model, data and "
        "global batch stay; degrees, ZeRO, batch, schedule and recomputation are searched.",
    )
    add = parser.add_argument
    add(
        "--simulate",
        type=positive,
        default=_BUDGET,
        metavar="C",
        help=f"layouts to simulate, in addition to single changes of the job; default: {_BUDGET}",
    )
    add(
        "--also",
        default="",
        metavar="A,B",
        help=f"search with and without these, too: {', '.join(ALSO)}",
    )
    add("--most", type=positive, default=5, metavar="M", help="overlays; default: 5")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="write DIR/plan-1.toml, ...; with --only, a file",
    )
    add(
        "--only",
        choices=["fsdp", "sac"],
        help="choose one thing, and nothing else: what FSDP gathers together, keeps and gathers ahead; or what each block keeps and recomputes (selective activation checkpointing)",
    )
    add(
        "--free",
        choices=["global_batch"],
        help="also try half, 2, 4 and 8 times the global batch with the best plan",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 1 if nothing fits."""
    parser = _parser()
    options, given, config = read_command(parser, argv)
    job, profile = given.job, given.profile
    if options.output:
        check_target("--output", options.output, is_folder=not options.only)
    if options.only:
        if options.only == "sac":
            from . import autosac  # imports torch

            return autosac.run(options, given, config)
        return fsdp.run(options, given, config)
    print_warnings(advise(config, device=profile.device_kind))
    also = list(filter(None, options.also.split(",")))
    for name in also:
        if name not in ALSO:
            raise mistake("--also", f"unknown: '{name}'{choose(name, ALSO)}")
    if "float8" in also and config.model.converters:
        raise mistake(
            "--also", "the job has model.converters already; float8 would replace them"
        )
    search = LayoutSearch(
        job,
        config,
        profile,
        world_size=given.world_size,
        processes=given.processes,
        also=also,
    )
    search.stopped = False
    start = time.monotonic()
    free = options.free == "global_batch"
    found = plan(search, budget=options.simulate, free_batch=free)
    say("")
    shown = kinds_first(search, found.ranked)[: options.most]
    code = EXIT_INTERRUPTED if search.stopped else int(not shown)
    rows = {id(variant): number for number, (_, variant) in enumerate(shown, 1)}
    candidates = [asdict(one) | {"row": rows.get(id(one))} for _, one in found.ranked]
    batches = [asdict(one) | {"global_batch": n} for n, (_, one) in found.batches.items()]
    data = {"job": asdict(found.job), "candidates": candidates, "batches": batches}
    if put_json(data, options.json):
        return code
    if search.stopped:
        end = "the best so far:" if shown else "nothing that fits so far"
        print(f"stopped by Ctrl-C; {end}", file=sys.stderr)
    elif not shown:
        print(
            f"none of {len(search.seen - {search.own()})} candidates runs on {options.world_size} x {profile.name} ({profile.memory_gib:g} GiB); "
            "more ranks, a smaller global batch, or --simulate with a larger number",
            file=sys.stderr,
        )
    if not shown:
        return code
    print(*unsupported(shown[0][1].facts), *table(search, found.job, shown), sep="\n")
    print(
        *_remarks(search, found, wall_s=time.monotonic() - start),
        _fixed(search, also),
        sep="\n",
    )
    print(*_prices(search, found, free=free), sep="\n")
    plans = {f"plan-{number}": variant for number, (_, variant) in enumerate(shown, 1)}
    if free:
        plans |= {f"plan-batch-{n}": variant for n, (_, variant) in found.batches.items()}
    for name, variant in plans.items():
        text = _overlay(name, variant, job)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            file = options.output / f"{name}.toml"
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
        else:
            print(f"\n{text}", end="")
    return code
