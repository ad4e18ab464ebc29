"""Command `titan sim JOB.toml --world-size N --hardware H`: time and memory of a training step, with no GPU."""

from __future__ import annotations

import csv
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.base.run_folder import RunFolder
from titan.checks.rules import load_to_run
from titan.config.layout import stage_split
from titan.config.load import load_from_argv
from titan.config.options import known_options, mistake, put_json

from .extension import sim_extensions
from .price.profiles import Profile, load_profile, with_figures
from .report.text import (
    job_parser,
    other_groups,
    page,
    require_writable,
    say,
)
from .search.auto import resolve

if TYPE_CHECKING:
    from titan.config.schema import JobConfig

    from .simulate import Facts, StepSimulation


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. titan.cli reports a `ConfigError`."""
    parser = _parser()
    # Arguments that argparse does not know are the job: files and overrides, which the config's
    # loader checks.
    options, job = parser.parse_known_args(argv)
    require_writable(options, "html", "csv", folders=["trace", *_files()])
    for code in (extension.run(options, job) for extension in sim_extensions()):
        if code is not None:
            return code
    # Not `required` in argparse, since an extension may need neither.
    swept = any(text.startswith("world_size=") for text in options.sweep)
    values = {"--world-size": options.world_size or swept, "--hardware": options.hardware}
    if missing := [name for name, value in values.items() if not value]:
        raise mistake(", ".join(missing), "missing; `titan sim --help` explains")
    return _sweep(options, job) if options.sweep else _simulate(options, job)


def _files() -> list[str]:
    return [name for extension in sim_extensions() for name in extension.files]


def _parser() -> ArgumentParser:
    """Return the parser of the command's own options."""
    parser = job_parser(
        "sim",
        "[--json FILE] [--trace FILE] [--html FILE] [--set FIGURE=+20%%] [--sweep KEY=A,B,...] [--quiet]",
        "Simulate a training step: time, exposed communication, memory. Needs no GPU and starts no process group.",
        required=False,
    )
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace for ui.perfetto.dev; into a folder, a file for each rank, as HTA reads them",
    )
    for extension in sim_extensions():
        extension.add_options(parser)
    add("--html", type=Path, metavar="FILE", help="a page: timeline, memory")
    add(
        "--measured",
        type=Path,
        metavar="RUN",
        help="set this run of the job beside it: time, memory",
    )
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="simulate every combination of these values; --hardware may then be a list, too",
    )
    add("--whole", action="store_true", help="trace every block, even if all are alike")
    add(
        "--run",
        action="store_true",
        help="the whole run, too: days, energy, failures, checkpoints, as [simulator.run] assumes",
    )
    add(
        "--phase",
        action="append",
        default=[],
        metavar="OVERLAY.toml",
        help="with --run: a job that follows, as an overlay",
    )
    add("--no-cache", action="store_true", help="trace again")
    add(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the job's pipeline schedule there, which a job can name",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIGURE=+20%",
        help="another figure of the hardware: nic_gb_per_s=+20%%, host_tiny_us=1.2; may be repeated",
    )
    return parser


def _simulate(options: Namespace, job: list[str]) -> int:
    """Simulate one job: print its page, and write the requested files.

    Return 1 if it does not fit.
    """
    profile = with_figures(load_profile(options.hardware), options.set)
    size = options.world_size
    if options.phase and not options.run:
        raise mistake("--phase", "is for --run")
    if (run := options.measured) and not RunFolder(run).metrics.is_file():
        raise mistake("--measured", f"{run} has no metrics.jsonl, as the folder of a run has")
    config, *later = (
        load_to_run(
            resolve([*job, *overlay], world_size=size, profile=lambda _: profile)[0],
            world_size=size,
            options=known_options(_parser()),
            device=profile.device_kind,
        )[0]
        for overlay in ([], *([file] for file in options.phase))
    )

    if options.csv:
        write_schedule(config, options.csv)
    if options.run and config.groups.enable:
        raise mistake(
            "--run", "does not know replica groups; add --fault_tolerance.enable=false"
        )

    # torch comes with these imports, so the config's mistakes are reported before.
    from .report.measured import compare
    from .report.phases import phase_rows, simulate_phases
    from .report.whole_run import whole_run, whole_run_page
    from .simulate import facts

    if run and config.phase:
        raise mistake("--measured", "is for a job of one phase")
    how: dict[str, Any] = {
        "world_size": size,
        "profile": profile,
        "say": say,
        "processes": options.processes,
        "whole": options.whole,
        "use_cache": not options.no_cache,
    }

    def run_job() -> tuple[StepSimulation, Facts, str]:
        parts = simulate_phases(config, **how)
        simulation, more = parts[0][1], ""
        figures = facts(simulation) | {"phases": phase_rows(parts)}
        if run:
            figures["measured"] = compare(simulation, run)
        if options.run:
            jobs = [parts, *(simulate_phases(job, **how) for job in later)]
            figures["run"] = whole_run([one for job in jobs for _, one in job])
            more = whole_run_page(figures["run"])
        return simulation, figures, more

    return show(options, run_job)


def write_schedule(config: JobConfig, file: Path) -> None:
    """Write the schedule of a job's pipeline as a CSV that `pipeline_parallel_schedule_csv` reads.

    Args:
        config: the job.
        file: written file.
    """
    schedule = stage_split(config, num_layers=config.model.sizes.n_layers).schedule
    with file.open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(schedule.order)


def show(options: Namespace, run: Callable[[], tuple[StepSimulation, Facts, str]]) -> int:
    """Run a simulation, print its page and write the requested files.

    Return 1 if it does not fit.
    """
    from .replay.queues import ReplayError
    from .report.phases import phase_lines
    from .simulate import FAILURES, alternatives

    try:
        simulation, figures, more = run()
        figures |= alternatives(simulation)
        say("")
        # --json - leaves standard output to the data.
        if not put_json(figures, options.json):
            print(*phase_lines(figures.get("phases", ())), page(figures), more, sep="\n")
        if options.trace:
            from .report.perfetto import write_trace

            write_trace(simulation, options.trace)
        for extension in sim_extensions():
            extension.write(simulation, options)
        if options.html:
            from .report.html import write_page

            write_page(simulation, figures, options.html)
    # titan.cli handles it: the reader has gone, which is no error.
    except BrokenPipeError:  # of `titan sim ... | head`
        raise
    except (*FAILURES, OSError) as error:
        say("")
        print(error, file=sys.stderr)
        # A replay that cannot end is a bug of titan; other errors follow from the job or the
        # hardware.
        return 1 if isinstance(error, ReplayError) else 2
    phases_run = all(row["fits"] or row["tight"] for row in figures.get("phases", ()))
    return 0 if simulation.runs and phases_run else 1


def _sweep(options: Namespace, job: list[str]) -> int:
    """Simulate all variants of a sweep. Print a table, or all data with --json."""
    from .search.variants import WORLD_SIZE, combinations, simulate_variants, table

    single = ("trace", "html", "csv", "set", "measured", "whole", "no_cache", "run")
    for name in (*single, *_files()):
        if getattr(options, name):
            raise mistake(f"--{name.replace('_', '-')}", "is for one job, not for a sweep")
    axes: dict[str, list[str]] = {}
    jobs: list[JobConfig] = []
    known = known_options(_parser())
    for text in options.sweep:
        key, _, values = text.partition("=")
        if not values:
            message = f"'{text}': expected KEY=A,B,..., such as training.local_batch_size=1,2,4"
            raise mistake("--sweep", message)
        # Each value once, in the order given.
        axes[key] = list(dict.fromkeys(values.split(",")))
        # A wrong key or value is a mistake of the user, not a variant that cannot run.
        for value in axes[key]:
            if key == WORLD_SIZE:
                if not value.isdecimal() or not int(value):
                    raise mistake("--sweep", f"'{text}': expected numbers of at least 1")
                continue
            jobs.append(load_from_argv([*job, f"--{key}={value}"], options=known))
    profiles: dict[str, Profile] = {}
    for profile in map(load_profile, options.hardware.split(",")):
        if profiles.setdefault(profile.name, profile) != profile:
            message = (
                f"two profiles are named '{profile.name}', which results could not tell apart"
            )
            raise mistake("--hardware", message)
    # Report mistakes of the job itself before thousands of variants.
    jobs.append(load_from_argv(job, options=known))
    start = time.monotonic()
    variants = simulate_variants(
        job,
        combinations(axes),
        world_size=options.world_size or 1,
        profiles=[*profiles.values()],
        processes=options.processes,
        progress=lambda done, all_: say(f"{done:,} of {len(all_):,} variants"),
    )
    say("")
    if not put_json([asdict(variant) for variant in variants], options.json, indent=None):
        groups = other_groups(max(one.groups.num_groups for one in jobs))
        print(table(variants), *groups, sep="\n")
        print(f"simulated in {time.monotonic() - start:.1f} s")
    return 0
