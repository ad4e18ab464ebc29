"""Command `titan budget JOB.toml --hardware H --gpus N --days D [--law law.json]`: what sizes of a model could reach in that time.

The formula of the planner chooses each size's layout, and the simulator prices its whole run, failures included. The law says which loss
to expect of that many tokens.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan.base.untrusted import InputError, read_json
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv
from titan.config.model import family
from titan.config.options import JOB, check_target, command_parser, mistake, positive, put_json
from titan.config.render import to_toml
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.report.text import columns
from titan.sim.search.auto import choose

from . import picture
from .cli import load_law, times
from .law import CHINCHILLA, LEVEL, Fit

SUMMARY = "What sizes of a model would reach on these GPUs in this time, by a law and the simulator. docs/scaling.md"
_EXPERTS = "qwen3:30B-A3B"  # the alternative with experts
# Shares of the memory that the formula may use, until a layout fits by simulation. All of it, if there is none with less.
_SHARES = (0.9, 0.75, 0.6, 1)
_STEPS = 10_000  # of the run that is simulated; others are in proportion
_LAW_OF_OTHERS = (
    "the law is Chinchilla's (Hoffmann et al. 2022) as Besiroglu et al. 2024, arXiv:2404.10102, fitted it: of other text and another "
    "tokenizer, so it ranks sizes, and your runs will have other losses; `titan scaling` fits a law to yours, for --law"
)
_NOT_SCALED = "learning rate, warm-up and batch are the job's: they were not scaled to the size or to the length of the run"


@dataclass(frozen=True)
class Size:
    """A size of a model, priced.

    Attributes:
        name: Family and flavor.
        job: Its job on the command line, layout included.
        sizes: Sizes of the model.
        figures: What `titan sim --run --json` says of it.
    """

    name: str
    job: list[str]
    sizes: Any
    figures: dict[str, Any]

    @property
    def params(self) -> float:
        """Return the parameters that a token meets."""
        return float(self.sizes.num_active_params)


@dataclass(frozen=True)
class PricedRun:
    """A size that trains for some days.

    Attributes:
        size: The size.
        row: Its line of the table: days, tokens, loss, energy, money, failures and GPU hours. Days are infinite if it cannot
            reach the loss.
        rank: What is to be least: the loss, or the GPU hours to it.
    """

    size: Size
    row: dict[str, Any]
    rank: float


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    usage = f"{JOB} --hardware H --gpus N (--days D | --loss L) [--law law.json] [--sizes FLAVOR,...] [--output DIR] [--json [FILE]] [--plot FILE.png]"
    parser = command_parser("budget", usage, summary=SUMMARY)
    add = parser.add_argument
    add(
        "--law",
        default="chinchilla",
        metavar="FILE.json",
        help="law of `titan scaling --output`; default: chinchilla, which ranks sizes",
    )
    add("--hardware", required=True, metavar="H", help="GPU, as for `titan sim`")
    add("--gpus", "--world-size", type=positive, required=True, metavar="N")
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--days", type=_in_range, metavar="D", help="time of the run")
    aim.add_argument(
        "--loss", type=_in_range, metavar="L", help="find the cheapest way to this loss"
    )
    add(
        "--sizes",
        metavar="FLAVOR,...",
        help=f"flavors of the job's family, or FAMILY:FLAVOR; default: all from 0.1 billion parameters, and {_EXPERTS}",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="write the best as a job, and two alternatives",
    )
    picture.add_option(parser, "draw the expected losses over the sizes")
    parser.add_json()
    options, job = parser.parse_known_args(argv)
    found = CHINCHILLA if options.law == "chinchilla" else load_law(Path(options.law))
    picture.require_option(options)
    if options.output:
        check_target("--output", options.output, is_folder=True)
    if options.loss and not (found.law.B and found.law.b):
        raise InputError(
            f"by the law in {options.law}, more tokens change nothing: --loss needs another law"
        )
    plans = [_plan(size, found, options) for size in _priced(job, options)]
    plans = sorted((p for p in plans if p.row["days"] < math.inf), key=lambda plan: plan.rank)
    if not plans:
        raise InputError(
            f"no size can reach a loss of {options.loss}, by the law in {options.law}"
        )
    rows = [plan.row for plan in plans]
    notes = _notes(rows, found)
    results = {"law": found.law._asdict(), "level": LEVEL, "sizes": rows, "notes": notes}
    if not put_json(results, options.json):
        print("\n".join([*_table(rows), *notes]))
    if options.output:
        _write_jobs(plans, options)
    if options.plot:
        points = [(row["size"], row["params"], row["tokens"]) for row in rows]
        picture.draw_budget(points, found, options.plot)
    return 0


def _in_range(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-3 <= value <= 1e4:
        raise ArgumentTypeError(f"expected a number from 0.001 to 10,000, got {text[:40]!r}")
    return value


def _priced(job: list[str], options: Namespace) -> list[Size]:
    """Return the sizes, each simulated in a process, as many at a time as there are cores."""
    config = load_from_argv(job, warn=False)
    if config.phase:
        raise InputError(
            "the time decides a run's length, so a job with [[phase]] has no budget: remove its phases"
        )
    profile = load_profile(options.hardware)
    names = [*_flavors(config.model.name), _EXPERTS]
    if options.sizes is not None:
        names = list(dict.fromkeys(name.strip() for name in options.sizes.split(",")))
    if "" in names:
        raise mistake("--sizes", "expected flavors with commas between them, such as 1B,8B")
    changes = {"training.steps": _STEPS, "parallelism.layout": "auto"}
    # The simulator records each microbatch of zero-bubble schedules, which takes minutes.
    if "pipeline_parallel_schedule" not in config.parallelism.model_fields_set:
        changes["parallelism.pipeline_parallel_schedule"] = "Interleaved1F1B"
    jobs = {name: _of_size(name, job, changes) for name in names}
    # A mistake is reported before the first simulation. Large models take longest, so they are first.
    sizes = {name: load_from_argv(of, warn=False).model.sizes for name, of in jobs.items()}
    names.sort(key=lambda name: -sizes[name].num_params)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def price(name: str) -> Size | None:
            try:
                return _simulated(jobs[name], sizes[name], profile, options)
            except (ConfigError, InputError) as error:
                why = str(error).splitlines()[0]
                print(f"{name} is left out: {why}", file=sys.stderr)
                return None

        if found := [size for size in pool.map(price, names) if size]:
            return found
        raise InputError("no size can be priced on these GPUs")


def _of_size(name: str, job: list[str], changes: dict[str, Any]) -> list[str]:
    """Return a job of a size: `FLAVOR` of the job's own family, or `FAMILY:FLAVOR`."""
    kind, _, flavor = name.rpartition(":")
    changed = changes | {"model.flavor": flavor} | ({"model.name": kind} if kind else {})
    return [*job, *(f"--{key}={value}" for key, value in changed.items())]


def _simulated(job: list[str], sizes: Any, profile: Profile, options: Namespace) -> Size:
    """Return a size, priced in the first layout by formula that fits by simulation, too."""
    config, reason = load_from_argv(job, warn=False), ""
    for share in _SHARES:
        if share == 1 and reason:
            raise InputError(reason)
        less = profile.model_copy(update={"memory_gib": profile.memory_gib * share})
        try:
            chosen = choose(job, config, less, world_size=options.gpus, simulate=False)
        except ConfigError:
            if share == 1:
                raise
            continue
        words = [*job, *chosen.overrides]
        figures = simulated([*words, "--run"], options.hardware, ranks=options.gpus)
        if figures["fits"] or figures["tight"]:
            return Size(f"{config.model.name} {config.model.flavor}", words, sizes, figures)
        needed = f"{figures['memory']['needed_gib']:.1f} GiB by simulation"
        reason = f"its layout {figures['layout']}, by formula, needs {needed}"
    raise InputError(reason)


def simulated(job: Sequence[str], hardware: str, *, ranks: int) -> dict[str, Any]:
    """Return what `titan sim` says of a job, in a process of its own.

    Raises:
        InputError: It cannot be simulated.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder, "sim.json")
        command = [sys.executable, "-m", "titan.cli", "sim", *job, f"--json={file}"]
        command += [f"--world-size={ranks}", f"--hardware={hardware}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            raise InputError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        return read_json(file, dict)


def _flavors(family_name: str) -> list[str]:
    """Return the flavors of a family that are large enough for a budget."""
    flavors = family(family_name).FLAVORS
    found = [name for name, size in flavors.items() if size.num_params > 1e8]
    if not found:
        problem = f"{family_name} has no flavors of 0.1 billion parameters or more: name some"
        raise mistake("--sizes", problem)
    return found


def _plan(size: Size, found: Fit, options: Namespace) -> PricedRun:
    """Return a size's run, of the days that are given, or until the loss."""
    run, law, days = size.figures["run"], found.law, options.days
    if not days:
        left = options.loss - law.E - law.A / size.params**law.a
        tokens = math.inf
        with suppress(OverflowError):
            tokens = (law.B / left) ** (1 / law.b) if left > 0 else math.inf
        days = tokens / (run["tokens"] / run["days"])
    share = days / run["days"]
    parts = ("tokens", "energy_mwh", "cost", "failures", "gpu_hours")
    row = {part: run[part] * share for part in parts}
    loss, *interval = found.predict(size.params, row["tokens"])
    row |= {"size": size.name, "params": size.params, "days": days, "loss": loss}
    row |= {"loss_interval": interval, "layout": size.figures["layout"]}
    row["tokens_per_s_per_gpu"] = size.figures["tokens_per_s_per_gpu"]
    return PricedRun(size, row, loss if options.days else row["gpu_hours"])


def _table(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    head = (
        "size",
        "layout",
        "tokens/s/GPU",
        "days",
        "tokens",
        "tokens/param",
        f"loss ({LEVEL:.0%})",
        "MWh",
        "cost",
        "failures",
    )
    rows: list[tuple[str, ...]] = [head]
    for result in results:
        low, high = result["loss_interval"]
        layout = result["layout"].replace("pp 1 x ", "").replace("dp_replicate 1 x ", "")
        per_param = result["tokens"] / result["params"]
        row = (
            result["size"],
            layout,
            f"{result['tokens_per_s_per_gpu']:,.0f}",
            *(f"{x:.3g}" for x in (result["days"], result["tokens"], per_param)),
            f"{result['loss']:.4f}" + f" ({low:.4f} to {high:.4f})" * (low < high),
            f"{result['energy_mwh']:.3g}",
            f"{result['cost']:,.0f}" if result["cost"] else "-",
            f"{result['failures']:.2g}",
        )
        rows.append(row)
    return columns(rows, left=(0, 1))


def _notes(rows: list[dict[str, Any]], found: Fit) -> list[str]:
    """Return what to beware of."""
    lines = [_NOT_SCALED]
    if found is CHINCHILLA:
        lines.insert(0, _LAW_OF_OTHERS)
    if rows[0]["cost"]:
        lines.append("cost is in the currency of simulator.run.gpu_hour_price")
    farthest = max(6 * row["params"] * row["tokens"] for row in rows) / found.largest
    if farthest > 10:
        lines.append(
            f"the law is extrapolated: up to {times(farthest)} times the FLOPs of the largest run that it was fitted to"
        )
    fewest = min(run.tokens for run in found.runs)
    if few := [row["size"] for row in rows if row["tokens"] < fewest / 10]:
        lines.append(
            f"{', '.join(few)}: far fewer tokens than any of the law's runs had: do not trust their losses"
        )
    return lines


def _write_jobs(plans: list[PricedRun], options: Namespace) -> None:
    """Write the best size as a job, the best of the smaller ones, which trains longer, and the best of the other kind of model."""
    best = plans[0].size
    chosen = {"best": plans[0]}
    for plan in plans:
        if ("num_experts" in vars(plan.size.sizes)) != ("num_experts" in vars(best.sizes)):
            chosen.setdefault("other", plan)
        elif plan.size.params < best.params:
            chosen.setdefault("smaller", plan)
    for name, plan in chosen.items():
        size = plan.size
        steps = round(plan.row["tokens"] / size.figures["tokens_per_step"])
        steps = min(2**31 - 1, max(1, steps))
        ranks = f"{options.gpus} x {options.hardware}"
        reason = f"the fastest by formula on {ranks} that fits by simulation (titan budget)"
        changed = [
            f"--training.steps={steps}",
            "--parallelism.layout=fixed",
            f"--parallelism.layout_reason={reason}",
        ]
        own = load_from_argv(size.job, warn=False)
        changed.append(f"--job.dump_folder={own.job.dump_folder}-{size.name.replace(' ', '-')}")
        if own.lr_scheduler.total_steps is not None:
            changed.append(f"--lr_scheduler.total_steps={steps}")
        config = load_from_argv([*size.job, *changed], warn=False)
        file = options.output / f"{name}.toml"
        comment = f"# {size.name} on {ranks}, by titan budget: {_NOT_SCALED}.\n"
        file.write_text(comment + to_toml(config), encoding="utf-8")
        print(f"wrote {file}: {size.name}, {steps:,} steps")
