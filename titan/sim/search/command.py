"""Common parts of the commands that choose settings of a job: options, the table of a comparison, the overlay."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from titan.config.load import load_from_argv
from titan.config.schema import JobConfig
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.report.text import (
    columns,
    duration,
    known_options,
    memory_limit,
    put_json,
    require_folders,
    require_positive,
)
from titan.sim.simulate import Facts


def read_command(
    parser: ArgumentParser, argv: Sequence[str] | None, *, positive: Sequence[str], folders: Sequence[str] = ()
) -> tuple[Namespace, list[str], Profile, JobConfig]:  # fmt: skip
    """Return a command's options, the job's arguments, the profile with the memory that --memory allows, and the job.

    Args:
        parser: Parser with the command's own options. It gets --memory, too.
        argv: Arguments; None for those of the process.
        positive: Options that must be at least 1.
        folders: Options whose files must be in existing folders.

    Raises:
        ConfigError: An option or the job has a mistake.
    """
    memory = "of a device, to be used; default: 90%% of it"
    parser.add_argument("--memory", type=float, metavar="GIB", help=memory)
    options, job = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    require_positive(options, "world_size", *positive)
    require_folders(options, "json", *folders)
    profile = memory_limit(load_profile(options.hardware), options.memory)
    return options, job, profile, load_from_argv(job, options=known_options(parser))


def show(options: Namespace, data: object, results: Mapping[str, Facts], overlay: str, *, limit_gib: float) -> None:  # fmt: skip
    """Write the overlay and the data as the options say, and print the comparison."""
    if options.output:
        options.output.write_text(overlay, encoding="utf-8")
    if not put_json(data, options.json):
        print(comparison(results, limit_gib=limit_gib))
        print(f"wrote {options.output}" if options.output else f"\n{overlay.rstrip()}")


def comparison(results: Mapping[str, Facts], *, limit_gib: float) -> str:
    """Return a table of ways to run a job: step, speed, exposed communication and memory.

    Gains are over the first result. Results without facts cannot run.
    """
    rows = [["", "step", "tokens/s/GPU", "gain", "exposed", "GiB", ""]]
    base = next(iter(results.values()))
    for name, one in results.items():
        if not one:
            rows.append([name, *[""] * 5, "cannot run"])
            continue
        step, needed = one["step_time_s"], one["memory"]["needed_gib"]
        gain = f"{base['step_time_s'] / step - 1:+.2%}" if base else ""
        note = "does not fit" if needed > limit_gib else "tight" if one["tight"] else ""
        exposed = duration(one["comm"]["exposed_s"])
        speed = f"{one['tokens_per_s_per_gpu']:,.0f}"
        rows.append([name, duration(step), speed, gain, exposed, f"{needed:.1f}", note])
    return "\n".join(columns(rows, left=(0, 6)))


def settings_overlay(settings: Mapping[str, str], *comments: str) -> str:
    """Return settings, by dotted key, as a TOML overlay below lines of comment."""
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        plain = value if value.lstrip("-").isdecimal() else json.dumps(value)
        sections.setdefault(section, []).append(f"{name} = {plain}")
    lines = [f"# {comment}" for comment in comments]
    for section, values in sections.items():
        lines += ["", f"[{section}]", *values]
    return "\n".join(lines) + "\n"
