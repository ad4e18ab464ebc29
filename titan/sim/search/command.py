"""Common parts of the commands that choose settings of a job: options, the table of a comparison, the overlay."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from titan.config.load import load_from_argv
from titan.config.options import known_options, put_json
from titan.config.schema import JobConfig
from titan.sim.price.profiles import load_profile
from titan.sim.report.text import (
    columns,
    memory_limit,
    speed_range,
    utilization,
)

from .point import Settings
from .reasons import lost_to
from .variants import Search, Variant


def read_command(
    parser: ArgumentParser, argv: Sequence[str] | None
) -> tuple[Namespace, Search, JobConfig]:
    """Return a command's options, a search on the profile with the memory that --memory allows, and the job.

    Args:
        parser: parser with the command's own options. It gets --memory, too.
        argv: arguments; None for those of the process.

    Raises:
        ConfigError: an option or the job has a mistake.
    """
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="of a device, to be used; default: 90%% of it",
    )
    options, job = parser.parse_known_args(argv)
    profile = memory_limit(load_profile(options.hardware), options.memory)
    config = load_from_argv(job, options=known_options(parser))
    return options, Search(job, options.world_size, profile, options.processes), config


def show(
    options: Namespace,
    search: Search,
    config: JobConfig,
    data: dict[str, Any],
    results: Mapping[str, Variant],
    chosen: Settings,
) -> None:
    """Write the chosen settings and the data as the options say, and print the comparison: gains are over the first result."""
    command = f"titan train {' '.join(search.job)} {options.only}.toml"
    overlay = settings_overlay(chosen, command if chosen else "the job as it is")
    if options.output:
        options.output.write_text(overlay, encoding="utf-8")
    facts = {name: variant.facts for name, variant in results.items()}
    if put_json(data | {"results": facts}, options.json):
        return
    base = next(iter(results.values())).speed
    rows = [["", *(names := figure_names(config))]]
    for name, variant in results.items():
        cells = figures(variant, base)
        # The limit may be below that of the device on which it was simulated.
        too_big = variant.fits and variant.needed_gib > search.profile.usable_gib
        rows.append([name, *cells[:-1], cells[-1] + (" does not fit" if too_big else "")])
    print(*columns(rows, left=(0, len(names) - 1)), sep="\n")
    print(f"wrote {options.output}" if options.output else f"\n{overlay.rstrip()}")


def figure_names(config: JobConfig) -> list[str]:
    """Return the heads of `figures`. MFU names the attention that it counts."""
    mfu = "MFU causal" if config.metrics.mfu_convention == "causal" else "MFU full (causal)"
    return ["tokens/s/GPU (90%)", "gain", mfu, "step s", "lost to", "GiB"]


def figures(variant: Variant, base: float) -> list[str]:
    """Return the cells of a variant's figures; gains are over `base`, a speed."""
    if not (facts := variant.facts):
        return ["cannot run", *[""] * 5]
    gain = f"{variant.speed / base - 1:+.1%}" if base else "-"
    mfu, step = utilization(facts), f"{facts['step_time_s']:.3f}"
    if facts["mfu_convention"] == "full" and facts["mfu"]:
        mfu += f" ({facts['mfu_causal']:.1%})"
    return [speed_range(facts, ""), gain, mfu, step, lost_to(facts), variant.memory]


def settings_overlay(settings: Settings, *comments: str) -> str:
    """Return settings, by dotted key, as a TOML overlay below lines of comment."""
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        is_number = value.lstrip("-").replace(".", "", 1).isdecimal()
        plain = value if is_number or value == "[]" else json.dumps(value)
        if value.startswith('["'):  # a list, with a line for each text
            plain = "[\n    " + value[1:-1].replace('", "', '",\n    "') + ",\n]"
        sections.setdefault(section, []).append(f"{name} = {plain}")
    lines = [f"# {comment}" for comment in comments]
    for section, values in sections.items():
        lines += ["", f"[{section}]", *values]
    return "\n".join(lines) + "\n"
