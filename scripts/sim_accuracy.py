"""Compare the simulator with published measurements: rows in train_configs/published/accuracy.md, a table in docs/simulator.md.

    python scripts/sim_accuracy.py [ID ...] [--write]     some rows only: printed, and with --write written, too
    python scripts/sim_accuracy.py --intervals            how many measurements the saved predictions' intervals hold

train_configs/published/runs.toml has the measurements, ID.toml beside it each row's job. Rows marked "calibrate" set the
three factors of the profile (titan/sim/hardware/h100-96g-500w.toml); all others are predictions.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

import published_classes
import sim_intervals
from published_compat import imitation

from titan.checks.rules import check_to_run
from titan.config.load import load_config, load_from_argv
from titan.config.schema import JobConfig
from titan.config.toml import read_toml
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace_jobs import TraceError
from titan.sim.replay.queues import ReplayError
from titan.sim.report.intervals import ERRORS
from titan.sim.simulate import simulate, step_facts

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "train_configs" / "published"
ROWS, PAGE = JOBS / "accuracy.md", ROOT / "docs" / "simulator.md"
BEGIN, END = "<!-- accuracy: written by scripts/sim_accuracy.py -->", "<!-- end of accuracy -->"
TEMPLATE = Path(__file__).with_name("sim_accuracy.md")
MAIN, PAPER = "torchtitan-2024-12", "paper-2410.06511"
SPEED, MEMORY = "tokens_per_s_per_gpu", "memory_gib"
DISPATCH = "DeepEP over all-to-all, 671B on 512 GPUs"


@dataclass
class Row:
    """A measurement and its prediction; speed in tokens/s/GPU, memory in GiB reserved (or allocated: `memory_of`). failure: why
    there is none.

    Some rows have no measured memory, and one has no speed since it ran out of memory.
    """

    run: dict[str, Any]
    speed: float = 0.0
    memory: float = 0.0
    fits: bool = True
    wall_s: float = 0.0
    failure: str = ""
    shares: dict[str, float] = field(default_factory=dict)

    def error(self, key: str) -> float:
        """Return the relative error of the speed or the memory, by its key in runs.toml."""
        return {SPEED: self.speed, MEMORY: self.memory}[key] / self.run[key] - 1


def main(arguments: list[str]) -> int:
    if "--intervals" in arguments:
        print("\n".join(sim_intervals.table()))
        return 0
    request = [argument for argument in arguments if argument != "--write"]
    every = read_toml(JOBS / "runs.toml")[0]["run"]
    runs = [run for run in every if run["id"] in request or not request]
    rows: dict[str, Row] = {}
    known: dict[Any, Row] = {}  # the paper measured some jobs again
    for run in runs:
        config = load_config(JOBS / f"{run['id']}.toml")
        setting = (config.model_dump_json(exclude={"job"}), run["gpus"], run["profile"])
        row = (
            replace(known[setting], run=run, wall_s=0.0)
            if setting in known
            else predict(run, config)
        )
        known[setting] = rows[run["id"]] = row
        speed = _against(row.speed, run, SPEED, ",.0f")
        memory = _against(row.memory, run, MEMORY, ".1f")
        result = (
            row.failure
            or f"{' '.join(speed[1:])} tokens/s/GPU, {' '.join(memory[1:])} GiB, {row.wall_s:.0f} s"
        )
        print(f"{run['id']:>24} {run['use']:<9} {result}", flush=True)
    if not request or "--write" in arguments:
        done = {
            n: {"speed": r.speed, "shares": r.shares} for n, r in rows.items() if not r.failure
        }
        sim_intervals.save(done)
        ERRORS.write_text(sim_intervals.document(), encoding="utf-8")
        rows = {run["id"]: rows.get(run["id"], Row(run, failure="not run")) for run in every}
        ROWS.write_text(document(rows), encoding="utf-8")
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return any(row.failure for row in rows.values())


def updated(page: str) -> str:
    """Return docs/simulator.md with the means over TorchTitan's runs, the first of the file of rows, in its table."""
    means = re.findall(r"^\| ([^|]+) \| ([\d.]+%) \| ([+-][\d.]+%) \|$", ROWS.read_text(encoding="utf-8"), re.M)  # fmt: skip
    lines = ["| | mean absolute error | worst |", "|---|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in means[:6]]
    before, rest = page.split(BEGIN)
    return "\n".join([before + BEGIN, *lines, END]) + rest.split(END)[1]


def predict(run: dict[str, Any], config: JobConfig, *, imitate: bool = True) -> Row:
    start = time.monotonic()
    check_to_run(config, world_size=run["gpus"])
    profile = str(JOBS / run["profile"]) if run["profile"].endswith(".toml") else run["profile"]
    try:
        simulation = simulate(
            config,
            world_size=run["gpus"],
            profile=load_profile(profile),
            prepare=imitation(run) if imitate else None,
        )
    except (TraceError, ReplayError) as error:
        return Row(run, failure=str(error))
    fullest = simulation.fullest
    is_allocated = run.get("memory_of") == "allocated"
    peak = fullest.peak_active_bytes if is_allocated else fullest.peak_reserved_bytes
    speed, wall_s = simulation.tokens_per_s_per_gpu, time.monotonic() - start
    return Row(
        run,
        speed,
        peak / 2**30,
        simulation.runs,
        wall_s,
        shares=step_facts(simulation)["interval"]["shares"],
    )


def document(rows: dict[str, Row]) -> str:
    """Return the page: sim_accuracy.md with the figures in place."""
    tables, apart = published_classes.TABLES, tuple(published_classes.TABLES["apart"])
    experts = {name: row for name, row in rows.items() if "ep" in row.run}
    rows = {name: row for name, row in rows.items() if name not in experts}
    others = [r for r in rows.values() if r.run["source"] not in (MAIN, PAPER)]
    report = [
        r
        for r in rows.values()
        if r.run["source"].startswith(("torchtitan", "paper", "trainy", "torchao"))
        and r.run["use"] == "report"
        and not r.failure
    ]
    kept = [r for r in report if not r.run["id"].startswith(apart)]
    ring = [r for r in report if r.run["id"] in ("C2", "C3", "C4")]
    reply = [r for r in report if r.run["id"].startswith("N592")]
    page = [r for r in report if r.run["source"] == MAIN]
    fits = [r for r in report if r.run["source"] == "torchtitan-pr-1690"]
    summaries = [
        ("tokens/s/GPU", kept, SPEED),
        ("tokens/s/GPU, with C2 to C4", kept + ring, SPEED),
        ("tokens/s/GPU, with C2 to C4 and N592", kept + ring + reply, SPEED),
        ("reserved memory", kept + ring, MEMORY),
        ("tokens/s/GPU, page", page, SPEED),
        ("reserved memory, page", page, MEMORY),
    ]
    groups = [
        (what, [r for r in others if any(fnmatchcase(r.run["id"], n) for n in names.split())])
        for what, names in tables["elsewhere"].items()
    ]
    ratios = [(what, rows[over], rows[under]) for what, over, under in tables["ratios"]]
    known = [
        _ratio_error(over, under)
        for _, over, under in ratios
        if not (over.failure or under.failure or over.run["id"].startswith((*apart, "NIBM")))
    ]
    memory = _errors(experts.values(), MEMORY)
    then, now = _today(rows["R1"].run)
    figures = {
        "then": then.speed,
        "then_error": then.error(SPEED),
        "now": now.speed,
        "now_error": now.error(SPEED),
        "num_report": len(kept),
        "num_page": len(page),
        "num_right": sum(r.fits != r.run.get("out_of_memory", False) for r in fits),
        "num_fits": len(fits),
        "experts_memory": "not known"
        if not memory
        else f"{mean(map(abs, memory)):.1%} on average and {max(memory, key=abs):+.1%} at most",
    }
    lines = {
        "overall": [_summary(what, _errors(of, key)) for what, of, key in summaries],
        "own_rows": [_line(row) for row in rows.values() if row not in others],
        "groups": [_summary(what, _errors(of, SPEED)) for what, of in groups],
        "other_rows": map(_line, others),
        "dispatch": [_ratio(DISPATCH, experts["M1-DeepEP"], experts["M1"])],
        **{
            f"{use}_experts": [
                f"{_line(row).replace('| report |', '|')} {row.run['unlike']} |"
                for row in experts.values()
                if row.run["use"] == use
            ]
            for use in ("report", "unexplained")
        },
        "profiled": published_classes.profiled(),
        "kernels": published_classes.kernels(),
        "intervals": sim_intervals.table(),
        "known_ratios": [_summary(f"{len(known)} ratios of the rows above", known)],
        "ratios": [_ratio(*ratio) for ratio in ratios],
        "scale": _scale(tables["weak"]),
    }
    texts = {name: "\n".join(of) for name, of in lines.items()}
    return TEMPLATE.read_text(encoding="utf-8").format(**figures, **texts)


def _today(run: dict[str, Any]) -> list[Row]:
    """Return what the calibrated row would be with the program of today, with its kernel of attention and with torch's choice."""
    jobs = [
        [str(JOBS / f"{run['id']}.toml"), f"--simulator.attention_kernel={kernel}"]
        for kernel in ("flash2", "auto")
    ]
    return [predict(run, load_from_argv(job), imitate=False) for job in jobs]


def _errors(rows: Iterable[Row], key: str) -> list[float]:
    return [row.error(key) for row in rows if key in row.run and not row.failure]


def _summary(what: str, errors: list[float]) -> str:
    if not errors:
        return f"| {what} | | |"
    return f"| {what} | {mean(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%} |"


def _line(row: Row) -> str:
    run = row.run
    degrees = ", ".join(
        f"{axis} {run[key]}"
        for axis, key in (
            *(("replicas", "dp_replicate"), ("FSDP", "dp_shard"), ("TP", "tp"), ("PP", "pp")),
            *(("CP", "cp"), ("EP", "ep")),
        )
        if run.get(key, 1) > 1
    )
    job = ", ".join(
        [
            _model(run["model"]),
            f"{run['gpus']} GPUs",
            degrees,
            f"{run['seq_len']:,} tokens",
            f"AC {run['ac']}",
            *run["options"],
            *filter(None, [run.get("schedule")]),
        ]
    )
    use = "calibrated" if run["use"] == "calibrate" else "report"
    speed = _against(row.speed, run, SPEED, ",.0f")
    memory = _against(row.memory, run, MEMORY, ".1f")
    if run.get("out_of_memory"):
        speed = ["out of memory", speed[1] if row.fits else "out of memory", ""]
    if row.failure:
        speed, memory = [speed[0], "", ""], [memory[0], "", row.failure]
    return f"| {' | '.join([run['id'], job, use, *speed, *memory])} |"


def _model(name: str) -> str:
    if name == "qwen3-32b":
        return "Qwen3 32B"
    if not name.startswith("llama"):
        return name
    family, size = name.removeprefix("llama").split("-")
    return size.upper() if family == "3" else f"Llama {family} {size.upper()}"


def _against(predicted: float, run: dict[str, Any], key: str, form: str) -> list[str]:
    """What was published, if it was; what is predicted; and the error."""
    if key not in run:
        return ["", f"{predicted:{form}}", ""]
    return [f"{run[key]:,}", f"{predicted:{form}}", f"{predicted / run[key] - 1:+.1%}"]


def _scale(weak: list[Any]) -> list[str]:
    """Return the lines of weak scaling, where the straggler's part of a step is all that grows."""
    profile = load_profile("h100-sxm")
    lines, errors = [], []
    for what, (few, few_s), (many, many_s) in weak:
        predicted = profile.straggler(many) / profile.straggler(few)
        published = many_s / few_s
        errors.append(predicted / published - 1)
        cells = f"{published:.3f} | {predicted:.3f} | {errors[-1]:+.1%}"
        lines.append(f"| {what} | {few} to {many:,} | {cells} |")
    worst = max(errors, key=abs)
    return [*lines, f"| mean, worst | | | {mean(map(abs, errors)):.1%} | {worst:+.1%} |"]


def _ratio_error(over: Row, under: Row) -> float:
    return (1 + over.error(SPEED)) / (1 + under.error(SPEED)) - 1


def _ratio(what: str, over: Row, under: Row) -> str:
    published = over.run[SPEED] / under.run[SPEED]
    if over.failure or under.failure:
        return f"| {what} | {published:.3f} | | |"
    error = _ratio_error(over, under)
    return f"| {what} | {published:.3f} | {published * (1 + error):.3f} | {error:+.1%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
