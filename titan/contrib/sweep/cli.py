"""Command `titan sweep JOB.toml --set KEY=VALUE,VALUE ... [--seeds N]`."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from titan.checks.rules import load_to_run
from titan.config.options import JOB, command_parser, positive, whole
from titan.config.schema import JobConfig
from titan.observe.sinks import require
from titan.sim.report.text import require_writable
from titan.untrusted import InputError

from . import execute, grid, results
from .grid import Trial

SUMMARY = "Train a job with several values of its keys, and say which is better. docs/scaling.md"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0 if all runs are done, 75 if a signal stopped them, 1 if one failed.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    usage = f"{JOB} --set KEY=VALUE,VALUE ... [--seeds N] [--jobs N] [--folder DIR] [--slurm | --ray [ADDRESS]] [-- --time=T ...]"
    parser = command_parser("sweep", usage, summary=SUMMARY)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="KEY=V,V", help="a key and its values; may be repeated: all combinations run")  # fmt: skip
    add("--seeds", type=positive, default=1, metavar="N", help="runs of each combination, with debug.seed 0 to N - 1; default: 1")  # fmt: skip
    add("--folder", type=Path, default=Path("sweep"), metavar="DIR", help="folder of the sweep; default: sweep")  # fmt: skip
    add("--jobs", type=positive, default=1, metavar="N", help="runs that train at the same time; default: 1")  # fmt: skip
    add("--nproc", type=positive, default=1, metavar="N", help="processes of each run; default: 1")
    add("--halving", type=positive, metavar="R", help="train all for a few steps, then the best 1 / R of them R times as long, and so on")  # fmt: skip
    add("--slurm", action="store_true", help="write a script for sbatch with a task for each run")
    add("--submit", action="store_true", help="with --slurm, submit it")
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help="run on a Ray cluster; default address: auto")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.png", help="draw the losses")
    add("--only", type=whole, metavar="I", help="run the I-th run of the folder's sweep, as a task of --slurm does")  # fmt: skip
    add("--report", action="store_true", help="run nothing: say what the folder's runs have reached")  # fmt: skip
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    options, job = parser.parse_known_args(words[:cut])
    reads = options.report or options.only is not None
    if reads and (job or options.set):
        parser.error(f"--report and --only take the runs of the folder: remove {[*job, *options.set][0]}")  # fmt: skip
    if options.halving and (options.halving < 2 or options.slurm):
        parser.error("--halving: must be 2 or more, and without --slurm, whose tasks all train to their ends")  # fmt: skip
    if options.plot:
        require("matplotlib", extra="plot", asked_by="--plot")
    require_writable(options, "plot")
    folder = options.folder.absolute()
    trials = grid.read(folder) if reads else _prepare(job, options, folder)
    code, how = 0, {"processes": options.nproc, "say": lambda line: print(line, flush=True)}
    if options.only is not None:
        if options.only >= len(trials):
            parser.error(f"--only {options.only}: the sweep has {len(trials)} runs")
        trial = trials[options.only]
        todo = [] if trial.has_reached(trial.steps) else [trial]
        code = execute.run_here(todo, at_a_time=1, **how)
        return code or int(not trial.has_reached(trial.steps))
    if options.slurm:
        given = {"processes": options.nproc, "options": words[cut + 1 :]}
        script = execute.write_array(folder, len(trials), at_a_time=options.jobs, **given)
        print(f"wrote {script}: {len(trials)} tasks; afterwards: titan sweep --folder {options.folder} --report")  # fmt: skip
        return subprocess.run(["sbatch", str(script)]).returncode if options.submit else 0
    if not options.report:
        for rung, steps in _rungs(trials, options.halving):
            todo = [trial for trial in rung if not trial.has_reached(min(steps, trial.steps))]
            done = f"{len(rung) - len(todo)} of {len(rung)} runs are done"
            print(f"{steps} steps: {done}" if options.halving else done, flush=True)
            more = [f"--training.steps={steps}"] if options.halving else []
            if options.ray:
                code = execute.run_on_ray(todo, options.ray, more=more, **how)
            elif todo:
                code = execute.run_here(todo, at_a_time=options.jobs, more=more, **how)
            if code:
                break
    rows = [results.row_of(trial) for trial in trials]
    results.write_rows(rows, folder)
    groups = results.groups_of(rows)
    print("\n".join(["", *results.table(groups), "", results.verdict(groups)]))
    if options.plot:
        results.draw(rows, options.plot)
        print(f"wrote {options.plot}")
    failed = [row for row in rows if row["state"] not in ("done", "diverged", "stopped early")]
    for row in failed:
        print(f"{row['name']}: {row['state']} {row['reason']}", file=sys.stderr)
    return code or int(bool(failed))


def _prepare(job: list[str], options: Namespace, folder: Path) -> list[Trial]:
    """Check the job of each run, write them, and return the runs."""
    settings = grid.parse_settings(options.set)
    if options.halving and "training.steps" in settings:
        raise InputError("titan sweep: --halving compares runs after equal steps: remove --set training.steps")  # fmt: skip
    trials: list[tuple[Trial, JobConfig]] = []
    for values, seed in grid.combinations(settings, options.seeds):
        name = grid.name_of(values, seed, seeds=options.seeds)
        words = [*job, *grid.arguments(values, seed, folder / name)]
        config, _ = load_to_run(words, world_size=options.nproc, warn=not trials)
        if options.halving:
            if not config.checkpoint.enable:
                raise InputError("titan sweep: --halving goes on from checkpoints: set checkpoint.enable = true")  # fmt: skip
            if config.phase:
                raise InputError("titan sweep: --halving stops runs before their phases begin: remove it, or [[phase]]")  # fmt: skip
            if config.lr_scheduler.total_steps is None:
                # A run that is stopped early is on the schedule of the whole run.
                words.append(f"--lr_scheduler.total_steps={config.training.steps}")
                config, _ = load_to_run(words, world_size=options.nproc, warn=False)
        trials.append((Trial(name, folder, values, seed, config.training.steps), config))
    first: dict[str, Trial] = {}
    for trial, config in trials:
        job_of_run = str(config.model_dump() | {"job": config.job.description})
        for what, same in (("name", trial.name), ("job", job_of_run)):
            if (other := first.setdefault(same, trial)) is not trial:
                texts = " and ".join(results.text_of(each.settings) for each in (other, trial))
                raise InputError(f"titan sweep: two runs have the same {what}: {texts}; remove one, or use another value")  # fmt: skip
    grid.write(trials, folder)
    return [trial for trial, _ in trials]


def _rungs(trials: list[Trial], factor: int | None) -> Iterator[tuple[list[Trial], int]]:
    """Yield runs and the steps that they train to. Each time, the best settings of the time before are left.

    Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943).
    """
    steps = max(trial.steps for trial in trials)
    rungs = 1
    while factor and factor**rungs <= len({str(trial.settings) for trial in trials}):
        rungs += 1
    for rung in reversed(range(rungs)):
        yield trials, max(1, steps // (factor or 1) ** rung)
        rows = [results.row_of(trial) | {"state": "done"} for trial in trials]
        groups = results.groups_of([row for row in rows if row["loss"] is not None])
        kept = {group.settings for group in groups[: -(-len(groups) // (factor or 1))]}
        trials = [trial for trial in trials if results.text_of(trial.settings) in kept]
