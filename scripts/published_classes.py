"""Compare kernels by class with published profiles, and single kernels with published times: errors that a total may hide.

scripts/sim_accuracy.py puts `profiled` and `kernels` on its page. `python scripts/published_classes.py` prints them. The published
figures are in sim_accuracy.toml.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from titan.checks.rules import check_to_run
from titan.config.load import load_config
from titan.config.toml import read_toml
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Kernel, Launch, Transfer
from titan.sim.simulate import Simulation, simulate

JOBS = Path(__file__).parents[1] / "train_configs" / "published"
TABLES = read_toml(Path(__file__).with_name("sim_accuracy.toml"))[0]


def class_of(event: Launch | Transfer, patterns: list[tuple[str, str]]) -> str:
    """Return the class of a kernel or transfer: that of the first pattern, or its kind."""
    if isinstance(event, Transfer):
        kind, text = event.kind, f"transfer {event.kind}|"
    else:
        kind, text = event.kernel.kind, f"{event.kernel.kind}|{event.kernel.name}"
    return next((name for pattern, name in patterns if re.search(pattern, text)), kind)


def classes(
    simulation: Simulation, patterns: list[tuple[str, str]]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return milliseconds and launches of rank 0's kernels and transfers by class."""
    ms, counts = defaultdict[str, float](float), Counter[str]()
    for _, start, end, event in simulation.timeline.ranks[0].intervals:
        name = class_of(event, patterns)
        ms[name] += (end - start) * 1e3
        counts[name] += event.kernel.num_launches if isinstance(event, Launch) else 1
    return ms, counts


def profiled() -> list[str]:
    """Return a table for each published profile."""
    lines = []
    for run in TABLES["profiled"]:
        config = load_config(JOBS / f"{run['job']}.toml")
        check_to_run(config, world_size=run["gpus"])
        simulation = simulate(
            config, world_size=run["gpus"], profile=load_profile(run["profile"])
        )
        ms, counts = classes(simulation, run["classes"])
        speed, published = simulation.tokens_per_s_per_gpu, run["tokens_per_s"]
        others = sorted(set(ms) - set(run["ms"]), key=lambda name: -ms[name])
        lines += [
            f"**{run['job']}** on {run['gpus']} {run['profile']} ({run['source']}):",
            "",
            "| class | kernels published | simulated | ms published | simulated | error |",
            "|---|--:|--:|--:|--:|--:|",
            *(
                f"| {name} | {run['counts'].get(name, '')} | {counts[name]} | {was:,.1f} | {ms[name]:,.1f} | {ms[name] / was - 1:+.0%} |"
                for name, was in run["ms"].items()
            ),
            *(f"| {name} | | {counts[name]} | | {ms[name]:,.1f} | |" for name in others),
            f"| tokens/s/GPU | | | {published:,.0f} | {speed:,.0f} | {speed / published - 1:+.1%} |",
            "",
            run["note"],
            "",
        ]
    return lines[:-1]


def kernels() -> list[str]:
    """Return a line for each kernel whose time was published."""
    lines = []
    for row in TABLES["attention"]:
        for length, *times in row["ms"]:
            for way, ms in zip(("forward", "backward"), times, strict=True):
                what = f"attention of {row['model']}, {length:,} tokens, {way}"
                lines.append(_line(what, row["profile"], _attention(row, length, way), ms))
    for row in TABLES["grouped"]:
        kernel = _grouped(*row["sizes"])
        lines.append(
            _line(f"grouped product, {row['what']}", row["profile"], kernel, row["ms"])
        )
    for size, groups, most in TABLES["grouped_at_most"]:
        priced = _priced_ms("h100-sxm", _grouped(groups, size, size, size))
        what = f"grouped product, {groups} x {size:,}³, less than cublasLt's of pytorch 185530"
        lines.append(f"| {what} | h100-sxm | < {most:.3f} | {priced:.3f} | |")
    return lines


def _attention(row: dict[str, Any], length: int, way: str) -> Kernel:
    (heads, groups), (qk, v) = row["heads"], row["sizes"]
    shapes = ((2, heads, length, qk), (2, groups, length, qk), (2, groups, length, v))
    kind = "attention" if way == "forward" else "attention_backward"
    return Kernel("aten::attention", kind, shapes, "bfloat16", causal=True)


def _grouped(groups: int, m: int, k: int, n: int) -> Kernel:
    moved = 2 * groups * (m * k + k * n), 2 * groups * m * n
    shapes = ((groups, m, k), (groups, k, n))
    name, flops = "aten::_grouped_mm", 2 * groups * m * k * n
    return Kernel(name, "matmul", shapes, "bfloat16", flops, *moved, num_launches=2)


def _line(what: str, profile: str, kernel: Kernel, ms: float) -> str:
    priced = _priced_ms(profile, kernel)
    return f"| {what} | {profile} | {ms:,.3f} | {priced:,.3f} | {priced / ms - 1:+.0%} |"


def _priced_ms(profile: str, kernel: Kernel) -> float:
    return Cost(load_profile(profile)).kernel_s(kernel) * 1e3


if __name__ == "__main__":
    print("\n".join([*profiled(), "", *kernels()]))
