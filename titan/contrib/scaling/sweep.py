"""Command `titan sweep JOB.toml --set KEY=VALUE,VALUE ... [--seeds N]`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from titan.base.untrusted import InputError
from titan.checks.rules import load_to_run
from titan.config.options import mistake, put_json, table_parser
from titan.config.schema import JobConfig
from titan.config.toml import table_beside

from . import execute, results, trials
from .trials import Trial


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0 if all runs are done, 75 if a signal stopped them, 1 if one failed.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    parser = table_parser("sweep", table_beside(__file__, "commands.toml")["sweep"])
    parser.add_json()
    options, job = parser.parse_known_args(argv)
    if options.report and (job or options.set):
        raise mistake(
            "--report", f"takes the runs of the folder: remove {[*job, *options.set][0]}"
        )
    if not (options.report or options.set) and options.seeds == 1:
        raise mistake("--set", "missing: nothing differs between the runs; or give --seeds")
    folder = options.folder.absolute()
    every = trials.read(folder) if options.report else prepare(job, options, folder)
    code = 0 if options.report else run(every, options)
    rows = [results.row_of(trial) for trial in every]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "results.jsonl").write_text(text, encoding="utf-8")
    groups = results.groups_of(rows)
    verdict = results.verdict(groups)
    if not put_json({"runs": rows, "verdict": verdict}, options.json):
        print("\n".join(["", *results.table(groups), "", verdict]))
    for row in rows:
        if row["state"] not in ("done", "diverged", "stopped early"):
            print(f"{row['name']}: {row['state']} {row['reason']}", file=sys.stderr)
            code = code or 1
    return code


def run(every: list[Trial], options: Namespace) -> int:
    """Run what is not done, and return the exit code."""
    todo = [trial for trial in every if trial.state not in ("done", "diverged")]
    print(f"{len(every) - len(todo)} of {len(every)} runs are done", flush=True)
    if not todo:
        return 0
    return execute.run_here(todo, at_a_time=options.jobs, processes=options.nproc)


def prepare(job: list[str], options: Namespace, folder: Path) -> list[Trial]:
    """Check the job of each run, write them, and return the runs."""
    settings = trials.parse_settings(options.set)
    found: list[tuple[Trial, JobConfig]] = []
    first: dict[str, Trial] = {}
    for values, seed in trials.combinations(settings, options.seeds):
        name = trials.name_of(values, seed, seeds=options.seeds)
        own = {**values, trials.SEED: seed, "job.dump_folder": folder / name}
        words = [f"--{key}={value}" for key, value in own.items()]
        config, _ = load_to_run([*job, *words], world_size=options.nproc, warn=not found)
        found.append((Trial(name, values, seed, config.training.steps, folder), config))
    for trial, config in found:
        job_of_run = str(config.model_dump() | {"job": config.job.description})
        for what, same in (("name", trial.name), ("job", job_of_run)):
            other = first.setdefault(same, trial)
            if other is not trial:
                texts = " and ".join(results.text_of(each.settings) for each in (other, trial))
                raise InputError(
                    f"two runs have the same {what}: {texts}; remove one, or use another value"
                )
    trials.write(found, folder)
    return [trial for trial, _ in found]
