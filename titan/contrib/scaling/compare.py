"""Command `titan compare A B`: which of two recipes is better, in loss, tokens and time.

A and B are jobs, or folders of runs. Jobs are trained with the same seeds, each as a sweep. sides.py reads the runs and
says whether their losses and speeds compare, paired.py has the statistics. What does not compare is said below a table of what does.
"""

from __future__ import annotations

import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from titan.base.signals import child_environment
from titan.base.untrusted import InputError, read_json
from titan.config.load import load_config, load_from_argv
from titan.config.options import mistake, put_json, table_parser
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.config.toml import table_beside
from titan.data.tokenizer_files import with_tokenizer
from titan.numerics.diff.command import differing_keys
from titan.sim.report.intervals import ratio_width

from . import paired, sweep
from .paired import FAR, Curve, Estimate
from .sides import Recipe, measure_of, why_speeds_differ

# A difference of so many half widths is found in 79% of comparisons with three seeds, and in 90% with ten (drawn).
_SURE = 2
_DECAYS = (
    "the learning rate decays, so that prices in tokens are the least that the gap is worth"
)


@dataclass
class PairReport:
    """Result of a comparison.

    Attributes:
        unit: unit of a loss.
        seeds: seeds whose runs both sides finished.
        notes: lines below the answer.
        rows: rows of the table: a name, and the cells of A and B.
        lost: runs that diverged or did not finish, in words.
        gap: loss of B less that of A; None with fewer than two pairs.
        changes: logarithms of factors from A to B, by what changes, as far as they are known.
    """

    unit: str
    seeds: list[int]
    notes: list[str]
    rows: list[list[str]] = field(default_factory=lambda: [["", "A", "B"]])
    lost: list[str] = field(default_factory=list)
    gap: Estimate | None = None
    changes: dict[str, Estimate] = field(default_factory=dict)

    def add(self, name: str, form: str, columns: Sequence[Sequence[float]]) -> None:
        """Add a row of the means of A's and B's figures, with a dash for no figure."""
        self.rows.append([name, *(format(fmean(c), form) if any(c) else "-" for c in columns)])


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 75 if a signal stopped the runs.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    types = {"steps": "--training.steps={}".format, "flavor": "--model.flavor={}".format}
    parser = table_parser(
        "compare", table_beside(__file__, "commands.toml")["compare"], **types
    )
    parser.add_json()
    parser.set_defaults(set=[])  # as a sweep without values
    options, words = parser.parse_known_args(argv)
    jobs = [[str(path), *words] for path in options.sides]
    paths, nproc = options.sides, options.nproc
    if trains := all(path.suffix == ".toml" for path in paths):
        options.nproc = 1 if options.hardware else nproc
        if code := _train(jobs, options):
            return code
        paths = [options.folder / side for side in "ab"]
    elif words or options.short or options.hardware:
        word = [*words, *options.short, "--hardware"][0]
        raise mistake(word, "is for two jobs: runs are read as they are")
    a, b = (Recipe.read(n, path, is_own=trains) for n, path in zip("AB", paths, strict=True))
    configs = [side.first.config for side in (a, b)]
    differing = _require_different(configs, options)
    read = [with_tokenizer(side.first.config, run=side.first.folder) for side in (a, b)]
    unit, curve, last, note = measure_of(read, [side.first.ranks for side in (a, b)])
    report = PairReport(unit, sorted(a.done.keys() & b.done.keys()), [note, *differing])
    _add_losses(report, a, b, last)
    if options.hardware:
        _add_simulation(report, jobs, options.hardware, ranks=nproc)
    else:
        _add_measured(report, a, b)
    curves = [[side.curve(seed, curve) for side in (a, b)] for seed in report.seeds]
    decays = any(run.decays for side in (a, b) for run in side.done.values())
    _add_price(report, curves, decays=decays)
    answer = sentence(report.gap, unit, report.changes, report.lost)
    # JSON has no infinite number.
    changes = {
        what: [x if math.isfinite(x) else None for x in c] for what, c in report.changes.items()
    }
    found = {"gap": report.gap, "changes": changes, "answer": answer, "notes": report.notes}
    if not put_json({**found, "rows": report.rows}, options.json):
        table = [f"{name:24}{a:>12}{b:>12}" for name, a, b in report.rows]
        print("\n".join([*table, "", answer, *report.notes]))
    return 0


def _train(jobs: Sequence[Sequence[str]], options: Namespace) -> int:
    """Check two jobs, train their runs that are missing, and return the exit code."""
    if options.seeds < 2:
        raise mistake("--seeds", "one does not tell how much seeds differ: at least 2")
    words = [[*job, *options.short] for job in jobs]
    _require_different([load_from_argv(job, warn=False) for job in words], options)
    folders = [options.folder.absolute() / side for side in "ab"]
    a, b = (
        sweep.prepare(job, options, folder) for job, folder in zip(words, folders, strict=True)
    )
    measure_of([load_config(runs[0].job) for runs in (a, b)], [options.nproc] * 2)
    # In turn, so that other work of the machine slows both.
    return sweep.run([trial for pair in zip(a, b, strict=True) for trial in pair], options)


def _require_different(configs: Sequence[JobConfig], options: Namespace) -> list[str]:
    """Return a line for each of the first keys in which two jobs differ.

    Raises:
        InputError: They differ in none, without --null.
    """
    texts = []
    for config in configs:
        # Seeds are paired, so that those of the first runs say nothing.
        debug = config.debug.model_copy(update={"seed": 0})
        texts.append(to_toml(config.model_copy(update={"debug": debug, "job": configs[0].job})))
    if not options.null and texts[0] == texts[1]:
        raise InputError(
            "A and B are the same job: change one, or see with --null what noise does"
        )
    return differing_keys(*texts)


def _add_losses(report: PairReport, a: Recipe, b: Recipe, last: str) -> None:
    """Add the losses, and what became of the runs."""
    losses = []
    for seed in report.seeds:
        pair = [side.curve(seed, last) for side in (a, b)]
        if last != "loss_mean":
            pair = paired.in_common(*pair)
        if pair[0][0]:
            losses.append(paired.finals(*pair))
    if len(losses) > 1:
        report.gap = paired.mean_of([y - x for x, y in losses])
    report.add(f"loss, {report.unit}", ".4f", [*zip(*losses, strict=True)] or [(), ()])
    for state in ("diverged", "did not finish"):
        counts = [[run.state for run in side.runs.values()].count(state) for side in (a, b)]
        texts = [f"{n} of {len(side.runs)}" for n, side in zip(counts, (a, b), strict=True)]
        if any(counts):
            report.rows.append([f"seeds that {state}", *texts])
        named = zip("AB", counts, texts, strict=True)
        report.lost += [f"{name} {state} in {text} seeds" for name, n, text in named if n]
    report.notes.append(f"runs: {len(losses)} seeds that both finished")


def _add_measured(report: PairReport, a: Recipe, b: Recipe) -> None:
    """Add time, memory and ranks of the runs, and the change of the time if it compares."""
    speeds, memory = (
        [
            [paired.final(c) for seed in report.seeds if (c := side.curve(seed, key))[0]]
            for side in (a, b)
        ]
        for key in ("tokens_per_s", "memory_gib")
    )
    _add_times(report, speeds, memory)
    report.add("ranks", ".0f", [[a.first.ranks], [b.first.ranks]])
    why = why_speeds_differ(a, b, report.seeds)
    if why:
        why += "; --hardware simulates both on one machine"
    elif min(map(len, speeds)) < 2:
        why = "fewer than two pairs have one"
    else:
        logs = [math.log(x / y) for x, y in zip(*speeds, strict=True)]
        report.changes["time a token"] = paired.mean_of(logs)
    report.notes.append(
        f"times do not compare: {why}" if why else f"time: measured on {a.first.machine}"
    )


def _add_simulation(
    report: PairReport, jobs: Sequence[Sequence[str]], hardware: str, *, ranks: int
) -> None:
    """Add time and memory of both jobs by simulation."""
    source = f"simulated on {ranks} x {hardware}"
    try:
        facts = [simulated(job, hardware, ranks=ranks) for job in jobs]
    except InputError as error:
        report.notes.append(f"times do not compare: not {source}: {error}")
        return
    speeds = [ranks * each["tokens_per_s_per_gpu"] for each in facts]
    value, width = math.log(speeds[0] / speeds[1]), ratio_width(*facts)
    report.changes["time a token"] = Estimate(value, value - width, value + width)
    memory = [[each["memory"]["needed_gib"]] for each in facts]
    _add_times(report, [[speed] for speed in speeds], memory)
    report.notes.append(f"time: {source}")


def simulated(job: Sequence[str], hardware: str, *, ranks: int) -> dict[str, Any]:
    """Return the facts of `titan sim` about a job, from a separate process.

    Raises:
        InputError: It cannot be simulated.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder, "sim.json")
        command = [sys.executable, "-m", "titan.cli", "sim", *job, f"--json={file}"]
        command += [f"--world-size={ranks}", f"--hardware={hardware}"]
        done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
        if not file.exists():
            raise InputError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        return read_json(file, dict)


def _add_times(
    report: PairReport, speeds: Sequence[Sequence[float]], memory: Sequence[Sequence[float]]
) -> None:
    """Add the rows of times and memory."""
    times = [[1e6 / fmean(side)] if side else [] for side in speeds]
    report.add("time, µs a token", ".4g", times)
    report.add("memory, GiB", ".4g", memory)


def _add_price(report: PairReport, curves: Sequence[Sequence[Curve]], *, decays: bool) -> None:
    """Add what the gap costs in tokens, and in time for the same loss."""
    gap, time = report.gap, report.changes.get("time a token")
    if gap is None:
        return
    try:
        nats = paired.slope_of([curve for pair in curves for curve in pair])
        report.notes.append(
            f"slope: {nats.value:.3g} {report.unit} for e times the tokens, by the curves of the runs"
        )
        if decays:
            report.notes.append(_DECAYS)
        if abs(gap.value) > gap.high - gap.value:
            report.changes["tokens"] = paired.price(gap, nats, decays=decays)
    except InputError as error:
        report.notes.append(f"tokens: no price: {error}")
    if not any(gap):
        report.changes["tokens"] = gap
    if time and (tokens := report.changes.get("tokens")):
        # Both errors at their worst.
        report.changes["time"] = Estimate(*map(sum, zip(time, tokens, strict=True)))


def sentence(
    gap: Estimate | None,
    unit: str,
    changes: Mapping[str, Estimate | None],
    lost: Sequence[str] = (),
) -> str:
    """Return the answer in a sentence.

    Args:
        gap: loss of B less that of A.
        unit: unit of a loss.
        changes: logarithms of factors from A to B, by what changes.
        lost: runs that have no part in it, in words.
    """
    parts = [*lost]
    time, tokens = changes.get("time a token"), changes.get("tokens")
    if time:
        parts.append(f"B takes {_change('time a token', time)}")
    if gap is None:
        parts.append(
            "fewer than two seeds that both finished do not tell how much seeds differ, so losses do not compare"
        )
    elif not any(gap):
        parts.append("both have the same losses")
    elif abs(gap.value) > (half := gap.high - gap.value):
        side, sign = ("higher", 1) if gap.value > 0 else ("lower", -1)
        low, high = sorted(sign * end for end in gap[1:])
        size = f"{abs(gap.value):.4f} {unit} {side} ({low:.4f} to {high:.4f})"
        worth = f", which is {_change('tokens', tokens)}" if tokens else ""
        parts.append(f"{'its loss' if time else 'the loss of B'} is {size}{worth}")
    else:
        parts.append(
            f"no difference in loss found; one of {_SURE * half:.4f} {unit} would have been"
        )
    if cost := changes.get("time"):
        parts.append(f"so the same loss costs {_change('time', cost)}")
    return "; ".join(parts)


def _change(what: str, ratio: Estimate) -> str:
    """Return a change as text, such as "31% less time (27 to 34)"."""
    if max(map(abs, ratio)) < 5e-4:
        return f"the same {what}"
    if abs(ratio.value) > FAR:
        return (
            f"{'more than 10 times' if ratio.value > 0 else 'less than a tenth of'} the {what}"
        )
    word, sign = ("more", 1) if ratio.value >= 0 else ("less", -1)
    value, *ends = (sign * 100 * math.expm1(end) for end in ratio)
    shown = [f"{end:.{int(abs(end) < 10)}f}" for end in ends]
    low, high = shown[::sign]
    between = f"{low} to {high}"
    if math.inf in map(abs, ratio):
        is_up = (ratio.high == math.inf) == (sign > 0)
        between = f"{low} or more" if is_up else f"{high} or less"
    text = f"{value:.{int(value < 10)}f}% {word} {what} ({between})"
    return text.replace("less tokens", "fewer tokens")
