"""Command `titan budget JOB.toml --law law.json --hardware H --gpus N --days D`: what sizes of a model could reach in that time.

The formula of the planner chooses each size's layout, and the simulator prices its whole run, failures included. The law says which loss
to expect of that many tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan.config import model as models
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv
from titan.config.options import JOB, command_parser, positive
from titan.config.render import to_toml
from titan.observe.sinks import require
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.report.text import check_target, columns, mistake, require_writable
from titan.sim.search.auto import choose
from titan.untrusted import InputError, read_json

from .cli import load_law
from .law import LEVEL, Fit, Run

SUMMARY = "What sizes of a model would reach on these GPUs in this time, by a law and the simulator. docs/scaling.md"  # fmt: skip
_EXPERTS = "qwen3:30B-A3B"  # the alternative with experts
# Shares of the memory that the formula may use, until a layout fits by simulation. All of it, if there is none with less.
_SHARES = (0.9, 0.75, 0.6, 1)
_STEPS = 10_000  # of the run that is simulated; others are in proportion


@dataclass(frozen=True)
class Size:
    """A size of a model, priced.

    Attributes:
        name: Family and flavor.
        job: Its job on the command line, layout included.
        params: Parameters that a token meets.
        figures: What `titan sim --run --json` says of it.
    """

    name: str
    job: list[str]
    params: float
    figures: dict[str, Any]

    @property
    def tokens_a_day(self) -> float:
        """Return the tokens of a day, with failures, saves and validations."""
        return self.figures["run"]["tokens"] / self.figures["run"]["days"]

    def at(self, days: float) -> dict[str, float]:
        """Return tokens, energy, money and failures of so many days."""
        run = self.figures["run"]
        share = days / run["days"]
        parts = ("tokens", "energy_mwh", "cost", "failures", "gpu_hours")
        return {"days": days} | {part: run[part] * share for part in parts}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    usage = f"{JOB} --law law.json --hardware H --gpus N (--days D | --loss L) [--sizes FLAVOR,...] [--out DIR] [--plot FILE.png]"
    parser = command_parser("budget", usage, summary=SUMMARY)
    add = parser.add_argument
    add("--law", type=Path, required=True, metavar="FILE.json", help="of `titan scaling --out`")
    add("--hardware", required=True, metavar="H", help="GPU, as for `titan sim`")
    add("--gpus", type=positive, required=True, metavar="N")
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--days", type=_in_range, metavar="D", help="time of the run")
    aim.add_argument("--loss", type=_in_range, metavar="L", help="find the cheapest way to this loss")  # fmt: skip
    add("--sizes", metavar="FLAVOR,...", help=f"flavors of the job's family, or FAMILY:FLAVOR; default: all from 0.1 billion parameters, and {_EXPERTS}")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="write the best as a job, and two alternatives")
    add("--plot", type=Path, metavar="FILE.png", help="draw the expected losses over the sizes")
    options, job = parser.parse_known_args(argv)
    if options.plot:
        require("matplotlib", extra="plot", asked_by="--plot")
    found, content = load_law(options.law)
    require_writable(options, "plot")
    if options.out:
        check_target("--out", options.out, is_folder=True)
    if options.loss and not (found.law.B and found.law.b):
        raise InputError(f"titan budget: by the law in {options.law}, more tokens change nothing: --loss needs another law")  # fmt: skip
    rows = [(size, size.at(_days(size, found, options))) for size in _priced(job, options)]
    ranked = [row for row in rows if _rank(row, found, options) < float("inf")]
    if not ranked:
        raise InputError(f"titan budget: no size can reach a loss of {options.loss}, by the law in {options.law}")  # fmt: skip
    ranked.sort(key=lambda row: _rank(row, found, options))
    print("\n".join(_table(ranked, found, content["runs"])))
    if options.out:
        _write_jobs(ranked, options.out)
    if options.plot:
        _draw(ranked, found, options.plot)
        print(f"wrote {options.plot}")
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
        raise InputError("titan budget: the time decides a run's length, so a job with [[phase]] has no budget: remove its phases")  # fmt: skip
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
    jobs = dict(sorted(jobs.items(), key=lambda each: -_model(each[1]).num_params))
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def price(name: str) -> Size | None:
            try:
                file = Path(folder, f"{name.replace(':', '-')}.json")
                return _simulated(jobs[name], file, profile, options)
            except (ConfigError, InputError) as error:
                print(f"titan budget: {name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)  # fmt: skip
                return None

        if found := [size for size in pool.map(price, jobs) if size]:
            return found
        raise InputError("titan budget: no size can be priced on these GPUs")


def _of_size(name: str, job: list[str], changes: dict[str, Any]) -> list[str]:
    """Return a job of a size: `FLAVOR` of the job's own family, or `FAMILY:FLAVOR`."""
    family, _, flavor = name.rpartition(":")
    changed = changes | {"model.flavor": flavor} | ({"model.name": family} if family else {})
    return [*job, *(f"--{key}={value}" for key, value in changed.items())]


def _simulated(job: list[str], file: Path, profile: Profile, options: Namespace) -> Size:
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
        command = [sys.executable, "-m", "titan.cli", "sim", *words, "--run", f"--json={file}"]
        command += [f"--world-size={options.gpus}", f"--hardware={options.hardware}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            raise InputError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        figures = read_json(file, dict)
        if figures["fits"] or figures["tight"]:
            sizes = _model(job)
            params = float(getattr(sizes, "num_active_params", sizes.num_params))
            return Size(f"{config.model.name} {config.model.flavor}", words, params, figures)
        reason = f"its layout {figures['layout']}, by formula, needs {figures['memory']['needed_gib']:.1f} GiB by simulation"  # fmt: skip
        file.unlink()
    raise InputError(reason)


def _flavors(family: str) -> list[str]:
    """Return the flavors of a family that are large enough for a budget."""
    sizes = models.family(family).FLAVORS
    found = [name for name, size in sizes.items() if getattr(size, "num_params", 0) > 1e8]
    if not found:
        raise mistake("--sizes", f"{family} has no flavors of 0.1 billion parameters or more: name some")  # fmt: skip
    return found


def _days(size: Size, found: Fit, options: Namespace) -> float:
    """Return the days of a size's run: those given, or until the loss, infinite if it cannot be reached."""
    if options.days:
        return options.days
    law = found.law
    left = options.loss - law.E - law.A / size.params**law.a
    try:
        return (law.B / left) ** (1 / law.b) / size.tokens_a_day if left > 0 else float("inf")
    except OverflowError:
        return float("inf")


def _rank(row: tuple[Size, dict[str, float]], found: Fit, options: Namespace) -> float:
    """Return what is to be least: the loss, or the GPU hours to it."""
    size, reached = row
    if reached["days"] == float("inf"):
        return float("inf")
    return float(found.law.loss(size.params, reached["tokens"])) if options.days else reached["gpu_hours"]  # fmt: skip


def _table(ranked: list[tuple[Size, dict[str, float]]], found: Fit, runs: list[Run]) -> list[str]:
    """Return the table's lines, and what to beware of."""
    head = ("size", "layout", "tokens/s/GPU", "days", "tokens", "tokens/param", f"loss ({LEVEL:.0%})", "MWh", "cost", "failures")  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    farthest, largest = 0.0, max(run.flops for run in runs)
    fewest = min(run.tokens for run in runs)
    for size, reached in ranked:
        loss, low, high = found.predict(size.params, reached["tokens"])
        farthest = max(farthest, Run("", size.params, reached["tokens"], loss).flops / largest)
        rows.append((
            size.name, size.figures["layout"].replace("pp 1 x ", "").replace("dp_replicate 1 x ", ""),
            f"{size.figures['tokens_per_s_per_gpu']:,.0f}", f"{reached['days']:.3g}", f"{reached['tokens']:.3g}",
            f"{reached['tokens'] / size.params:.3g}", f"{loss:.4f} ({low:.4f} to {high:.4f})",
            f"{reached['energy_mwh']:.3g}", f"{reached['cost']:,.0f}" if reached["cost"] else "-", f"{reached['failures']:.2g}",
        ))  # fmt: skip
    lines = columns(rows, left=(0, 1))
    if farthest > 10:
        lines.append(f"up to {farthest:,.0f} times the FLOPs of the law's largest run: train larger ones before you trust this")  # fmt: skip
    if few := [size.name for size, reached in ranked if reached["tokens"] < fewest / 10]:
        lines.append(f"{', '.join(few)}: far fewer tokens than any of the law's runs had: do not trust their losses")  # fmt: skip
    return lines


def _write_jobs(ranked: list[tuple[Size, dict[str, float]]], folder: Path) -> None:
    """Write the best size as a job, the best of the smaller ones, which trains longer, and the best of the other kind of model."""
    best = ranked[0][0]
    kind = "num_experts" in vars(_model(best.job))
    has_experts = [s for s, _ in ranked if ("num_experts" in vars(_model(s.job))) != kind]
    smaller = [size for size, _ in ranked if size.params < best.params and size not in has_experts]
    chosen = {"best": [best], "smaller": smaller, "other": has_experts}
    for name, (size, *_) in ((name, sizes) for name, sizes in chosen.items() if sizes):
        days = next(reached for each, reached in ranked if each is size)
        steps = min(2**31 - 1, max(1, round(days["tokens"] / size.figures["tokens_per_step"])))
        changed = [f"--training.steps={steps}", "--parallelism.layout=fixed"]
        own = load_from_argv(size.job, warn=False)
        changed.append(f"--job.dump_folder={own.job.dump_folder}-{size.name.replace(' ', '-')}")
        if own.lr_scheduler.total_steps is not None:
            changed.append(f"--lr_scheduler.total_steps={steps}")
        config = load_from_argv([*size.job, *changed], warn=False)
        file = folder / f"{name}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        print(f"wrote {file}: {size.name}, {steps:,} steps")


def _model(job: list[str]) -> Any:
    return models.model_config(load_from_argv(job, warn=False).model)


def _draw(ranked: list[tuple[Size, dict[str, float]]], found: Fit, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for size, reached in ranked:
        loss, low, high = found.predict(size.params, reached["tokens"])
        axes.errorbar(size.params, loss, [[loss - low], [high - loss]], fmt="o", capsize=3)
        axes.annotate(f" {size.name}", (size.params, loss))
    axes.set(xscale="log", xlabel="parameters that a token meets", ylabel="expected loss")
    figure.savefig(file, dpi=110, format="png")
