"""Command `titan compare A B`: which of two recipes is better, in loss, tokens, time and money.

A and B are jobs, or folders of runs. Jobs are trained with the same seeds, each as a sweep. paired.py has the statistics.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from titan.base.untrusted import InputError, read_json
from titan.config.load import load_config
from titan.config.options import CommandParser, command_parser, mistake, put_json
from titan.config.phases import phases_of
from titan.sim.report.intervals import ratio_width
from titan.tools.plot import points

from . import paired, picture, sweep
from . import runs as reading
from .budget import simulated
from .law import load_law
from .paired import Curve, Estimate

SUMMARY = "Which of two recipes is better, in loss, tokens, time and money. docs/scaling.md"
# A difference of so many half widths is found in 79% of comparisons with three seeds, and in 90% with ten (drawn).
_SURE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 75 if a signal stopped the runs.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    options, words = _parser().parse_known_args(argv)
    picture.require_option(options)
    law = load_law(options.law) if options.law else None
    wanted, sides = options.nproc, options.sides
    jobs = [[str(path), *words] for path in sides]
    if all(path.suffix == ".toml" for path in sides):
        options.nproc = 1 if options.hardware else wanted
        code = _train(jobs, options)
        if code:
            return code
        sides = [options.folder / side for side in "ab"]
    elif words or options.short or options.hardware:
        word = [*words, *options.short, "--hardware"][0]
        raise mistake(word, "is for two jobs: runs are read as they are")
    unit, ((config, ranks, run), (_, _, other)), places, (curves, *others) = _read(sides)
    losses, speeds, memory = (
        [[*map(paired.final, pair)] for pair in column] for column in others
    )
    gap = paired.mean_of([b - a for a, b in losses])
    time = paired.mean_of([math.log(a / b) for a, b in speeds])
    nats = paired.slope_of([curve for pair in curves for curve in pair])
    if law:
        nats = Estimate(*law.slope(run.tokens))
    source = f"measured on {' and '.join(places)}"
    if options.hardware:
        ranks, source = wanted, f"simulated on {wanted} x {options.hardware}"
        facts = [simulated(job, options.hardware, ranks=ranks) for job in jobs]
        speeds = [[ranks * each["tokens_per_s_per_gpu"] for each in facts]]
        memory = [[each["memory"]["needed_gib"] for each in facts]]
        value, width = math.log(speeds[0][0] / speeds[0][1]), ratio_width(*facts)
        time = Estimate(value, value - width, value + width)
    elif len(places) > 1:
        raise InputError(f"time: {source}: --hardware simulates both on one machine")
    a, b = (1 / fmean(each) for each in zip(*speeds, strict=True))
    tokens = paired.price(gap, nats)
    cost = Estimate(*map(sum, zip(time, tokens, strict=True)))  # both errors at their worst
    changes = {"time a token": time, "tokens": tokens, "time": cost}
    answer = sentence(gap, unit, changes)
    if not put_json({"gap": gap, "changes": changes, "answer": answer}, options.json):
        price = config.simulator.run.gpu_hour_price * ranks * 1e9 / 3600
        rows = [
            f"{'A':>36}{'B':>12}",
            f"{f'loss, {unit}':24}{fmean(a for a, _ in losses):12.4f}{fmean(b for _, b in losses):12.4f}",
            f"{'time, µs a token':24}{1e6 * a:12.4g}{1e6 * b:12.4g}",
            f"{'memory, GiB':24}{fmean(a for a, _ in memory):12.4g}{fmean(b for _, b in memory):12.4g}",
            *[f"{'money for 1e9 tokens':24}{price * a:12.4g}{price * b:12.4g}"] * bool(price),
            f"\n{answer}",
            f"time: {source}",
            f"slope: {nats.value:.3g} {unit} for e times the tokens, by {options.law or 'the curves of the runs'}",
            f"runs: {len(losses)} seeds, {run.params:.3g} and {other.params:.3g} parameters, {run.tokens:.3g} tokens; other sizes may differ",
        ]
        print("\n".join(rows))
    if options.plot:
        picture.draw_comparison(curves, answer.replace("; ", "\n"), options.plot)
    return 0


def _parser() -> CommandParser:
    usage = (
        "A.toml B.toml [--section.key=value ...] [--seeds N] [--steps N] [--flavor F] [--hardware H --world-size N]\n"
        "       titan compare RUNS_A RUNS_B [--law law.json] [--json [FILE]] [--plot FILE.png]"
    )
    parser = command_parser("compare", usage, summary=SUMMARY)
    add = parser.add_argument
    about = "two jobs; or two folders of runs of one job with several seeds, such as sweeps"
    add("sides", type=Path, nargs=2, metavar="RECIPE", help=about)
    sweep.add_run_options(parser, seeds=3, folder="compare")
    for key in ("training.steps", "model.flavor"):
        about = f"{key} of the runs; the jobs' own is simulated"
        override = f"--{key}={{}}".format
        name = f"--{key.partition('.')[2]}"
        add(
            name,
            action="append",
            dest="short",
            metavar="X",
            type=override,
            default=[],
            help=about,
        )
    about = "simulate the time of both jobs on --world-size ranks of it; runs have one rank"
    add("--hardware", metavar="H", help=about)
    about = "law of `titan scaling --output`, which turns nats into tokens"
    add("--law", type=Path, metavar="FILE.json", help=about)
    picture.add_option(parser, "draw the losses, their difference and the cost")
    parser.add_json()
    parser.set_defaults(set=[])  # as a sweep without values
    return parser


def _train(jobs: Sequence[Sequence[str]], options: Namespace) -> int:
    """Check two jobs, train their runs that are missing, and return the exit code."""
    if options.seeds < 2:
        raise mistake("--seeds", "one does not tell how much seeds differ: at least 2")
    folders = [options.folder.absolute() / side for side in "ab"]
    a, b = (
        sweep.prepare([*job, *options.short], options, folder)
        for job, folder in zip(jobs, folders, strict=True)
    )
    _columns([(load_config(runs[0].job), options.nproc) for runs in (a, b)])
    # In turn, so that other work of the machine slows both.
    return sweep.run([trial for pair in zip(a, b, strict=True) for trial in pair], options)


def _columns(jobs: Sequence[tuple[Any, ...]]) -> tuple[str, str, str]:
    """Return in which unit the losses of two jobs compare, in which column over tokens, and in which at the end.

    Args:
        jobs: The jobs, their ranks, and more.

    Raises:
        InputError: They do not compare.
    """
    shared, tokenizers = [], set()
    for config, ranks, *_ in jobs:
        settings = reading.text_settings(config)
        settings["validation"] = config.validation.model_dump(exclude={"freq"})
        phases = phases_of(config, world_size=ranks)
        settings["tokens (steps x batch)"] = sum(phase.tokens for phase in phases)
        tokenizers.add((settings.pop("tokenizer.name"), settings.pop("tokenizer.path")))
        shared.append(settings)
    reading.require_shared(shared)
    last = "validation_loss" if jobs[0][0].validation.enable else "loss_mean"
    if len(tokenizers) == 1:
        return "nats", "loss_mean", last
    if last == "loss_mean":
        raise InputError(
            "tokenizers differ: only --validation.enable gives bits a byte, which compare"
        )
    return "bits a byte", "bits_per_byte", "bits_per_byte"


def _read(
    sides: Sequence[Path],
) -> tuple[str, list[Any], set[str], list[list[list[Curve]]]]:
    """Return the unit of losses, the first job of each side with its ranks and its size, the machines, and columns over tokens: of each seed that both sides have, of both.

    The columns are the loss, the loss that is compared at the end, tokens/s, and the memory.
    """
    read, jobs, places = [], [], set()
    for side in sides:
        folders = reading.folders_of(side)
        runs = [reading.of_folder(folder) for folder in folders]
        # A side is one recipe.
        seed = {"job": True, "debug": {"seed"}}
        reading.require_shared([config.model_dump(exclude=seed) for _, config, _ in runs])
        place = read_json(folders[0] / "environment.json", dict)
        places.add(f"{place['world_size']} x {place['device_names'][0]} of {place['hostname']}")
        jobs.append((runs[0][1], place["world_size"], runs[0][0]))
        read.append({config.debug.seed: rows for _, config, rows in runs})
    unit, curve, last = _columns(jobs)
    seeds = sorted(read[0].keys() & read[1].keys())
    if len(seeds) < 2:
        have = f"{sides[0]} and {sides[1]} have {len(seeds)} debug.seed in common"
        raise InputError(f"{have}: two or more tell how much seeds differ")
    keys = (curve, last, "tokens_per_s", "memory_gib")
    found = [
        [[points(runs[seed], "tokens", key) for runs in read] for seed in seeds] for key in keys
    ]
    return unit, jobs, places, found


def sentence(gap: Estimate, unit: str, changes: Mapping[str, Estimate]) -> str:
    """Return the answer in a sentence.

    Args:
        gap: Loss of B less that of A.
        unit: Unit of a loss.
        changes: Logarithms of factors from A to B, by what changes.
    """
    half = gap.high - gap.value
    found = f"no difference in loss found; one of {_SURE * half:.4f} {unit} would have been"
    if not any(gap):
        found = "both have the same losses"
    if abs(gap.value) > half:
        side, sign = ("higher", 1) if gap.value > 0 else ("lower", -1)
        low, high = sorted(sign * end for end in gap[1:])
        size = f"{abs(gap.value):.4f} {unit} {side} ({low:.4f} to {high:.4f})"
        found = f"its loss is {size}, which is {_change(changes, 'tokens')}"
    time, cost = _change(changes, "time a token"), _change(changes, "time")
    return f"B takes {time}; {found}; so the same loss costs {cost}"


def _change(changes: Mapping[str, Estimate], what: str) -> str:
    """Return one of the changes as text, such as "31% less time (27 to 34)"."""
    ratio = changes[what]
    if max(map(abs, ratio)) < 5e-4:
        return f"the same {what}"
    word, sign = ("more", 1) if ratio.value >= 0 else ("less", -1)
    value, *ends = (sign * 100 * math.expm1(min(end, 20)) for end in ratio)
    low, high = (f"{end:.{int(abs(end) < 10)}f}" for end in sorted(ends))
    text = f"{value:.{int(value < 10)}f}% {word} {what} ({low} to {high})"
    return text.replace("less tokens", "fewer tokens")
