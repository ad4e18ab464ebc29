"""Command `titan sweep JOB.toml --set KEY=VALUE,VALUE ... [--seeds N]`."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from titan.checks.rules import load_to_run
from titan.config.options import JOB, command_parser, positive
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
    usage = (
        f"{JOB} --set KEY=VALUE,VALUE ... [--seeds N] [--jobs N] [--folder DIR] [--ray [ADDRESS]]"
    )
    parser = command_parser("sweep", usage, summary=SUMMARY)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="KEY=V,V", help="a key and its values; may be repeated: all combinations run")  # fmt: skip
    add("--seeds", type=positive, default=1, metavar="N", help="runs of each combination, with debug.seed 0 to N - 1; default: 1")  # fmt: skip
    add("--folder", type=Path, default=Path("sweep"), metavar="DIR", help="folder of the sweep; default: sweep")  # fmt: skip
    add("--jobs", type=positive, default=1, metavar="N", help="runs that train at the same time; default: 1")  # fmt: skip
    add("--nproc", type=positive, default=1, metavar="N", help="processes of each run; default: 1")
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help="run on a Ray cluster; default address: auto")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.png", help="draw the losses")
    add("--report", action="store_true", help="run nothing: say what the folder's runs have reached")  # fmt: skip
    options, job = parser.parse_known_args(argv)
    if options.report and (job or options.set):
        parser.error(f"--report takes the runs of the folder: remove {[*job, *options.set][0]}")
    if options.plot:
        require("matplotlib", extra="plot", asked_by="--plot")
    require_writable(options, "plot")
    folder = options.folder.absolute()
    trials = grid.read(folder) if options.report else _prepare(job, options, folder)
    code, how = 0, {"processes": options.nproc, "say": lambda line: print(line, flush=True)}
    if not options.report:
        todo = [trial for trial in trials if not trial.is_done]
        print(f"{len(trials) - len(todo)} of {len(trials)} runs are done", flush=True)
        if options.ray:
            code = execute.run_on_ray(todo, options.ray, **how)
        elif todo:
            code = execute.run_here(todo, at_a_time=options.jobs, **how)
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
    trials: list[tuple[Trial, JobConfig]] = []
    for values, seed in grid.combinations(settings, options.seeds):
        name = grid.name_of(values, seed, seeds=options.seeds)
        words = [*job, *grid.arguments(values, seed, folder / name)]
        config, _ = load_to_run(words, world_size=options.nproc, warn=not trials)
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
