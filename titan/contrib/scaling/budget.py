"""Command `titan budget JOB.toml --hardware H --gpus N --days D [--law law.json]`: what sizes of a model could reach in that time.

The formula of the planner chooses each size's layout, and the simulator prices its whole run, failures included. The law says which loss
to expect of that many tokens.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan.base.signals import child_environment, handled
from titan.base.untrusted import InputError, read_json
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv
from titan.config.model import family
from titan.config.options import put_json, table_parser
from titan.config.toml import table_beside
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.report.text import columns
from titan.sim.search.auto import choose

from .cli import times
from .law import CHINCHILLA, LEVEL, Fit, load_law
from .runs import number_in

_EXPERTS = "qwen3:30B-A3B"  # the alternative with experts
# Shares of the memory that the formula may use, until a layout fits by simulation. All of it, if there is none with less.
_SHARES = (0.9, 0.75, 0.6, 1)
_STEPS = 10_000  # of the run that is simulated; others are in proportion
_LAW_OF_OTHERS = (
    "the law is Chinchilla's (Hoffmann et al. 2022) as Besiroglu et al. 2024, arXiv:2404.10102, fitted it: of other text and another "
    "tokenizer, so it ranks sizes, and your runs will have other losses; `titan scaling` fits a law to yours, for --law"
)
_NOT_SCALED = "learning rate, warm-up and batch are the job's: they were not scaled to the size or to the length of the run"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError, InputError: A mistake of the user, which titan.cli reports.
    """
    parser = table_parser("budget", table_beside(__file__, "commands.toml")["budget"])
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--days", type=_in_range, metavar="D", help="time of the run")
    about = "find the cheapest way to this loss"
    aim.add_argument("--loss", type=_in_range, metavar="L", help=about)
    parser.add_json()
    options, job = parser.parse_known_args(argv)
    found = load_law(options.law) if options.law else CHINCHILLA
    if options.loss and not found.law.B * found.law.b:
        raise InputError("by this law, more tokens change nothing: --loss needs another law")
    rows = [_row(size, found, options) for size in _priced(job, options)]
    aim_of = "loss" if options.days else "gpu_hours"
    rows = sorted((row for row in rows if row["days"] < math.inf), key=lambda row: row[aim_of])
    if not rows:
        raise InputError(f"no size can reach a loss of {options.loss}, by this law")
    notes = _notes(rows, found)
    results = {"law": found.law._asdict(), "level": LEVEL, "sizes": rows, "notes": notes}
    if not put_json(results, options.json):
        print("\n".join([*_table(rows), *notes]))
    return 0


def _in_range(text: str) -> float:
    value = number_in(text)
    if not 1e-3 <= value <= 1e4:
        raise ArgumentTypeError(f"expected a number from 0.001 to 10,000, got {text[:40]!r}")
    return value


def _priced(job: list[str], options: Namespace) -> list[dict[str, Any]]:
    """Simulate each size in a process, as many at a time as there are cores."""
    config = load_from_argv(job, warn=False)
    if config.phase:
        raise InputError(
            "the time decides a run's length, so a job with [[phase]] has no budget: remove its phases"
        )
    profile = load_profile(options.hardware)
    flavors = family(config.model.name).FLAVORS.items()
    names = [*(name for name, size in flavors if size.num_params > 1e8), _EXPERTS]
    if options.sizes is not None:
        names = options.sizes.split(",")
    changes = {"training.steps": _STEPS, "parallelism.layout": "auto"}
    # The simulator records each microbatch of zero-bubble schedules, which takes minutes.
    if "pipeline_parallel_schedule" not in config.parallelism.model_fields_set:
        changes["parallelism.pipeline_parallel_schedule"] = "Interleaved1F1B"
    shared = [f"--{key}={value}" for key, value in changes.items()]
    jobs, params = [], []
    for name in names:
        kind, _, flavor = name.rpartition(":")
        model = [f"--model.name={kind or config.model.name}", f"--model.flavor={flavor}"]
        jobs.append([*job, *shared, *model])
        # A mistake is reported before the first simulation.
        sizes = load_from_argv(jobs[-1], warn=False).model.sizes
        params.append(float(sizes.num_active_params))

    def price(name: str, job: list[str], params: float) -> dict[str, Any] | None:
        try:
            return _simulated(job, profile, options) | {"params": params}
        except (ConfigError, InputError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
            return None

    # Ctrl-C ends this process, and simulations with it. Python would wait for them.
    ends = handled([signal.SIGINT], signal.SIG_DFL)
    with ends, ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [size for size in pool.map(price, names, jobs, params) if size]
    if not found:
        raise InputError("no size can be priced on these GPUs")
    return found


def _simulated(job: list[str], profile: Profile, options: Namespace) -> dict[str, Any]:
    """Return the facts of `titan sim --run` about a size, in the first layout by formula that fits by simulation, too."""
    config = load_from_argv(job, warn=False)
    why: Exception = InputError("")
    for share in _SHARES:
        less = profile.model_copy(update={"memory_gib": profile.memory_gib * share})
        try:
            chosen = choose(job, config, less, world_size=options.gpus, simulate=False)
        except ConfigError as error:
            why = error
            continue
        words = [*job, *chosen.overrides]
        figures = simulated([*words, "--run"], options.hardware, ranks=options.gpus)
        if figures["fits"] or figures["tight"]:
            name = f"{config.model.name} {config.model.flavor}"
            return figures | {"size": name, "options": words[len(job) :]}
        needed = f"{figures['memory']['needed_gib']:.1f} GiB by simulation"
        why = InputError(f"its layout {figures['layout']}, by formula, needs {needed}")
    raise why


def simulated(job: Sequence[str], hardware: str, *, ranks: int) -> dict[str, Any]:
    """Return the facts of `titan sim` about a job, from a separate process.

    Raises:
        InputError: It cannot be simulated.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder, "sim.json")
        command = [sys.executable, "-m", "titan.cli", "sim", *job, f"--json={file}"]
        command += [f"--world-size={ranks}", f"--hardware={hardware}"]
        done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
        if not file.exists():
            raise InputError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        return read_json(file, dict)


def _row(size: dict[str, Any], found: Fit, options: Namespace) -> dict[str, Any]:
    """Return the cost and the loss of a size after the given days, or at the given loss. Days are infinite if it cannot reach it."""
    run, params, law, days = size["run"], size["params"], found.law, options.days
    if not days:
        left = options.loss - law.E - law.A / params**law.a
        tokens = math.inf
        with suppress(OverflowError):
            tokens = (law.B / left) ** (1 / law.b) if left > 0 else math.inf
        days = tokens / (run["tokens"] / run["days"])
    share = days / run["days"]
    kept = ("size", "params", "layout", "options", "tokens_per_s_per_gpu")
    row = {part: size[part] for part in kept} | {"days": days}
    for part in ("tokens", "energy_mwh", "cost", "failures", "gpu_hours"):
        row[part] = run[part] * share
    row["steps"] = row["tokens"] / size["tokens_per_step"]
    row["loss"], *row["loss_interval"] = found.predict(params, row["tokens"])
    return row


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    head = f"size|layout|tokens/s/GPU|days|tokens|steps|tokens/param|loss ({LEVEL:.0%})|MWh|cost|failures"
    lines = [head.split("|")]
    for row in rows:
        low, high = row["loss_interval"]
        cells = [
            row["size"],
            row["layout"].replace("pp 1 x ", "").replace("dp_replicate 1 x ", ""),
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['days']:.3g}",
            f"{row['tokens']:.3g}",
            f"{row['steps']:,.0f}",
            f"{row['tokens'] / row['params']:.3g}",
            f"{row['loss']:.4f}" + f" ({low:.4f} to {high:.4f})" * (low < high),
            f"{row['energy_mwh']:.3g}",
            f"{row['cost']:,.0f}" if row["cost"] else "-",
            f"{row['failures']:.2g}",
        ]
        lines.append(cells)
    return columns(lines, left=(0, 1))


def _notes(rows: list[dict[str, Any]], found: Fit) -> list[str]:
    """Return warnings."""
    lines = [_LAW_OF_OTHERS] * (found is CHINCHILLA) + [_NOT_SCALED]
    farthest = max(found.times(row["params"], row["tokens"]) for row in rows)
    if farthest > 10:
        lines.append(
            f"the law is extrapolated: up to {times(farthest)} times the FLOPs of the largest run that it was fitted to"
        )
    return lines
