"""Command `titan plan JOB.toml --world-size N --hardware H`: fast layouts of a job that fit, each as a TOML overlay.

The search varies the degrees of the axes, ZeRO-2 or ZeRO-3, batch, schedule, stages and
recomputation; on request also compile, float8 and asynchronous TP. Model, data and global batch
stay the job's, which is simulated as it is, too.

    job       the job as it is, and its single changes of recomputation, ZeRO or TP, are simulated
    all       every legal combination is scored by a formula, thousands in a second
    first     the best of each kind are simulated
    then      neighbours of the fastest that fit (one setting changed), until `budget` candidates are simulated

candidates.py has the formula. `budget` does not count the first row.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan.checks.rules import advise
from titan.config.errors import choose
from titan.config.load import print_warnings
from titan.config.schema import JobConfig
from titan.sim.report.text import (
    columns,
    degrees,
    job_parser,
    mistake,
    put_json,
    say,
    utilization,
)
from titan.sim.search import fsdp
from titan.sim.search.candidates import ALSO, Point, Search
from titan.sim.search.command import read_command, settings_overlay
from titan.sim.search.variants import Variant, simulate_variants
from titan.sim.simulate import Facts

WIDTHS = {
    "batch": 0.016,
    "recompute": 0.016,
    "replicate": 0.016,
    "zero": 0.03,
    "schedule": 0.03,
    "shard": 0.03,
}
"""Mean errors of predicted ratios between jobs that differ in these settings alone (train_configs/published/accuracy.md). Speeds this
close to the fastest are shown as equal to it."""
WIDTH = 0.05
"""The same of any other setting, such as the degree of TP."""

_BUDGET = 24  # candidates that are simulated


@dataclass
class Plan:
    """Result of a search.

    Attributes:
        job: The job as it is.
        ranked: Candidates that run: first those that fit, the fastest first, then the tight ones.
    """

    job: Variant
    ranked: list[tuple[Point, Variant]]


def plan(
    search: Search,
    *,
    budget: int,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Simulate the job, its single changes, and `budget` other candidates.

    Args:
        search: Search of the job.
        budget: Number of candidates to simulate, without single changes of the job.
        processes: Number of processes that trace at once. All cores by default.
        progress: Called with the number of candidates that are done, and of all.

    Returns:
        The job, and the candidates that run.
    """
    results: dict[Point, Variant] = {}
    ranked: list[Point] = []

    def simulated(settings: list[dict[str, str]]) -> list[Variant]:
        before = len(results)
        return simulate_variants(
            search.job,
            settings,
            world_size=search.world_size,
            profiles=[search.profile],
            processes=processes,
            progress=lambda done, total: progress(before + done, max(budget, before + total)),
        )

    own = search.own()
    singles: list[Point] = []
    if own is not None:
        search.seen.add(own)
        singles = search.single_changes(own)
    # Two thirds of the budget explore, the rest improves the results.
    points = [*singles, *search.first(max(1, budget * 2 // 3))]
    job, *variants = simulated([{}, *map(search.settings, points)])
    # The job costs nothing of the budget, nor do its single changes.
    budget += len(singles)
    while True:
        results |= zip(points, variants, strict=True)
        known = results
        if own is not None and job.facts:
            known = results | {own: replace(job, settings=search.settings(own))}
        ranked = sorted(
            (p for p in known if known[p].fits or known[p].is_tight),
            key=lambda p: (known[p].is_tight, -known[p].speed),
        )
        # A sixth of the budget in each round, so that later rounds start from better centres.
        count = max(0, min(budget - len(results), max(2, budget // 6)))
        # If nothing fits, try the next best candidates of the formula.
        points = search.neighbours(ranked[:3], count) if ranked else search.first(count)
        if not points:
            break
        variants = simulated([*map(search.settings, points)])
    # The job has a row of its own. As a candidate it is shown only if nothing is faster.
    shown = [point for n, point in enumerate(ranked) if n == 0 or point != own]
    return Plan(job, [(point, known[point]) for point in shown])


# ---- the command ---------------------------------------------------------------------------------


def _summary(facts: Facts) -> str:
    """Return a candidate's speed, utilization and memory as a line."""
    mfu = "" if facts["mfu"] is None else f", {utilization(facts)} MFU"
    needed = f"{facts['memory']['needed_gib']:.1f} GiB" + (", tight" if facts["tight"] else "")
    return f"{facts['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU{mfu}, {needed}, on {facts['world_size']} x {facts['hardware']}"


def width(one: Point, other: Point) -> float:
    """Return the error with which the simulator compares two candidates, as a share of the speed."""
    a, b = asdict(one), asdict(other)
    return max((WIDTHS.get(key, WIDTH) for key in a if a[key] != b[key]), default=0.0)


def table(found: Plan, config: JobConfig, *, most: int) -> str:
    """Return a table of the job and the fastest candidates: layout, batch, speed and memory."""
    rows = [["", "layout", "ZeRO", "batch", "schedule", "AC", "also", "tokens/s/GPU", "of the job", "MFU", "step s", "bubble", "GiB"]]  # fmt: skip
    base = found.job.speed if found.job.fits or found.job.is_tight else 0.0
    parallel, ac = config.parallelism, config.activation_checkpoint
    given = [
        "job",
        found.job.problem[:60] or degrees(found.job.facts),
        parallel.fsdp_reshard_after_forward,
    ]
    given += [
        str(config.training.local_batch_size),
        parallel.pipeline_parallel_schedule if parallel.pipeline_parallel_degree > 1 else "-",
    ]
    given += [ac.mode, "-"]
    rows.append([*given, *(_figures(found.job, base) if found.job.facts else [""] * 6)])
    best, fastest = found.ranked[0]
    for number, (point, variant) in enumerate(found.ranked[:most], 1):
        schedule, batch = "-", str(point.batch)
        if point.pp > 1:
            schedule = f"{point.schedule} x {point.stages}" if point.stages > 1 else point.schedule
            batch += f" by {point.microbatch}"
        # Memory tells those that fit from tight ones, so their speeds are not compared.
        is_near = variant.speed > fastest.speed * (1 - width(best, point))
        is_equal = number > 1 and is_near and variant.fits == fastest.fits
        recompute = f"every {point.recompute}nd" if point.recompute.isdecimal() else point.recompute
        what = [
            f"{number}{'=' if is_equal else ' '}",
            degrees(variant.facts),
            str(point.zero),
            batch,
        ]
        also = " ".join(point.also) or "-"
        rows.append([*what, schedule, recompute, also, *_figures(variant, base)])
    return "\n".join(columns(rows, left=(0, 1)))


def _figures(variant: Variant, base: float) -> list[str]:
    """Return the cells of a variant's figures."""
    facts = variant.facts
    gain = f"{variant.speed / base:.2f}x" if base else "-"
    bubble = f"{facts['pipeline']['bubble_fraction']:.0%}"
    speed = [f"{variant.speed:,.0f}", gain, utilization(facts), f"{facts['step_time_s']:.3f}"]
    return [*speed, bubble, variant.memory]


def _remarks(search: Search, variants: Sequence[Variant], *, wall_s: float) -> Iterator[str]:
    """Yield explanations of the table, and advice."""
    profile = search.profile
    num_seen = len(search.seen - {search.own()})  # the job itself is no candidate
    num_fitting = sum(variant.fits for variant in variants)
    yield (
        f"\n{num_seen} candidates simulated in {wall_s:.0f} s: {num_fitting} fit, {len(variants) - num_fitting} tight. "
        f"GiB: peak reserved by the allocator, and what is outside of it, on the fullest rank, of {profile.memory_gib:g}. What fits "
        f"leaves {profile.margin:.0%} free; what is tight leaves less, or gives back its cache"
    )
    yield (
        f"'=': as fast as the first, as far as the simulator can tell: {min(WIDTHS.values()):.1%} where batch or recomputation "
        f"differ, up to {WIDTH:.0%} where more does"
    )
    if num_seen < min(_BUDGET, len(search.points)):
        yield (
            f"few candidates: {num_seen} of {len(search.points):,} that may fit were simulated; --simulate {_BUDGET}, "
            "the default, or more may find a faster one"
        )


def _fixed(search: Search, also: Sequence[str]) -> str:
    """Return the settings that no candidate changes."""
    config, training = search.config, search.config.training
    on = {
        "compile": config.compile.enable,
        "float8": bool(config.model.converters),
        "async_tp": config.parallelism.enable_async_tensor_parallel,
    }
    fixed = [f"{name} {'on' if on[name] else 'off'}" for name in on if name not in also]
    if config.phase:
        of_run = "speed and step are means of the run, GiB that of the fullest"
        fixed.append(f"{len(config.phase) + 1} phases ({of_run})")
    return (
        f"{config.model.name} {config.model.flavor}, {training.seq_len:,} tokens a sequence, global batch {search.global_batch:,} "
        f"sequences, {training.compute_dtype}, {config.optimizer.name}, context parallelism by "
        f"{config.parallelism.context_parallel_rotate_method}, {', '.join(fixed) or 'nothing else'}"
    )


def _parser() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = job_parser(
        "plan",
        f"[--only fsdp] [--simulate {_BUDGET}] [--also A,B] [--most 5] [--memory GIB] [--output DIR] [--json FILE]",
        "The fastest ways to run a job on so many devices, by simulation, as TOML overlays, beside the job as it is. Model, data and "
        "global batch stay; degrees, ZeRO, batch, schedule and recomputation are searched.",
    )
    help_ = f"candidates, beside single changes of the job; default: {_BUDGET}"
    parser.add_argument("--simulate", type=int, default=_BUDGET, metavar="C", help=help_)
    parser.add_argument(
        "--also",
        default="",
        metavar="A,B",
        help=f"search with and without these, too: {', '.join(ALSO)}",
    )
    parser.add_argument("--most", type=int, default=5, metavar="M", help="overlays; default: 5")
    output = "write DIR/plan-1.toml, ...; with --only, a file"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    only = "choose what FSDP gathers together, keeps and gathers ahead, and nothing else"
    parser.add_argument("--only", choices=["fsdp"], help=only)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 1 if nothing fits."""
    parser = _parser()
    positive = ["simulate", "most"]
    options, job, profile, config = read_command(parser, argv, positive=positive)
    if options.only:
        return fsdp.run(options, job, profile, config)
    print_warnings(advise(config, device=profile.device_kind))
    also = list(filter(None, options.also.split(",")))
    for name in also:
        if name not in ALSO:
            raise mistake("--also", f"unknown: '{name}'{choose(name, ALSO)}")
    if "float8" in also and config.model.converters:
        raise mistake("--also", "the job has model.converters already; float8 would replace them")
    search = Search(job, config, profile, world_size=options.world_size, also=also)
    start = time.monotonic()
    found = plan(
        search,
        budget=options.simulate,
        processes=options.processes,
        progress=lambda done, total: say(f"{done} of {total} candidates simulated"),
    )
    say("")
    variants = [variant for _, variant in found.ranked]
    data = {"job": asdict(found.job), "candidates": [asdict(variant) for variant in variants]}
    if put_json(data, options.json):
        return 0 if variants else 1
    if not variants:
        print(
            f"none of {len(search.seen - {search.own()})} candidates runs on {options.world_size} x {profile.name} ({profile.memory_gib:g} GiB); "
            "more ranks, a smaller global batch, or --simulate with a larger number",
            file=sys.stderr,
        )
        return 1
    shown = variants[: options.most]
    print(table(found, config, most=options.most))
    print("\n".join(_remarks(search, variants, wall_s=time.monotonic() - start)))
    print(f"held fixed: {_fixed(search, also)}")
    for number, variant in enumerate(shown, 1):
        name = f"plan-{number}.toml"
        command = f"titan train {' '.join(job)} {name}"
        text = settings_overlay(variant.settings, f"{number}: {_summary(variant.facts)}", command)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / name).write_text(text, encoding="utf-8")
            print(f"wrote {options.output / name}")
        else:
            print(f"\n{text}", end="")
    return 0
