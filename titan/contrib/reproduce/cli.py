"""Command `titan reproduce [ID]`, which compares a published run with today's titan on the same machine.

train_configs/published/runs.toml has the published figures, and ID.toml beside it the job with the settings of that time.
Without ID the command lists the runs. With ID it simulates the job, `--submit` writes its Slurm script, `--measured RUN`
adds the figures of a run of it, and `--record FILE` keeps all three in a file. `--record FILE` alone adds such a file to the ledger
(ledger.py). scripts/published_compat.py imitates the software of that time; the simulation here does not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checks.rules import load_to_run
from titan.config.errors import COMMAND_LINE, ConfigError, Problem, did_you_mean
from titan.config.load import load_config
from titan.config.options import command_parser
from titan.config.schema import JobConfig
from titan.config.shipped import about
from titan.config.shipped import folder as shipped_folder
from titan.config.toml import format_value, read_toml
from titan.observe.rows import runs_near
from titan.sim.price.profiles import Profile, load_profile
from titan.untrusted import MAX_TEXT, InputError, printable, read_json

if TYPE_CHECKING:
    from titan.sim.simulate import Simulation

SUMMARY = (
    "Simulate a published run, write its Slurm job, and compare a run of it. docs/simulator.md"
)
SPEED, MEMORY = "tokens_per_s_per_gpu", "memory_gib"
_NAMES = {SPEED: ("tokens/s/GPU", ",.0f"), MEMORY: ("reserved, GiB", ".1f")}
# Speed does not depend on the text, and no tokenizer is needed. Published figures are of about 100 steps.
_SUBMITTED = (
    *("--training.dataset=synthetic", "--tokenizer.name=bytes", "--training.steps=100"),
    *("--lr_scheduler.warmup_steps=10", "--checkpoint.enable=false", "--metrics.log_freq=10"),
)
# Sections that must agree for a run to be a run of the row. The rest of the job changes neither time nor memory.
_SAME = ("model", "training", "parallelism", "activation_checkpoint", "compile", "loss", "quantize")
_FREE = ("training.steps", "training.dataset", "training.dataset_path", "model.hf_assets_path")


@dataclass(frozen=True)
class Row:
    """Published run: its row of runs.toml, and its job."""

    run: dict[str, Any]
    job: Path

    @property
    def name(self) -> str:
        """Return the row's ID."""
        return self.run["id"]

    @property
    def about(self) -> str:
        """Return the publisher and the job."""
        text = about(self.job)
        return (text.partition("of runs.toml, ")[2] or text.partition(": ")[2]).rstrip(".")

    @property
    def profile(self) -> Profile:
        """Return the hardware of the published run."""
        beside = self.job.with_name(self.run["profile"])
        return load_profile(beside if beside.suffix == ".toml" else self.run["profile"])


@dataclass(frozen=True)
class RunEnvironment:
    """Recorded part of a run's environment.json."""

    world_size: int
    titan: str = ""
    torch: str = ""
    device_names: list[str] | None = None


def published() -> dict[str, Row]:
    """Return the published runs by ID, in the order of runs.toml."""
    folder = shipped_folder() / "published"
    runs = read_toml(folder / "runs.toml")[0]["run"]
    return {run["id"]: Row(run, folder / f"{run['id']}.toml") for run in runs}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: Arguments. None: those of the process.

    Raises:
        ConfigError: A mistake of the user, which titan.cli reports.
    """
    usage = "[ID] [--hardware H] [--submit | --measured RUN [--record FILE] | --record FILE [--ledger DIR]]"
    parser = command_parser("reproduce", usage, summary=SUMMARY)
    add = parser.add_argument
    add("id", nargs="?", metavar="ID", help="a published run; without it, list them all")
    add("--hardware", metavar="H", help="simulate this machine, not that of the publication")
    add("--submit", action="store_true", help="write its job for Slurm, and say how to submit it")
    add("--measured", type=Path, metavar="RUN", help="the folder of a run of it, to compare")
    record = "with --measured, write what was measured; alone, add a file of measurements (TOML or JSON) to the ledger"
    add("--record", type=Path, metavar="FILE", help=record)
    add(
        "--ledger",
        type=Path,
        metavar="DIR",
        help="folder of ledger.toml and ledger.md; default: here",
    )
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    rows = published()
    if options.id is None:
        if options.submit or options.measured or options.record:
            parser.error("which run? an ID is needed")
        print("\n".join(_listing(rows)))
        return 0
    if options.id not in rows:
        hint = did_you_mean(options.id, rows, cutoff=0.5) or "; `titan reproduce` lists them"
        raise _mistake("ID", f"there is no published run '{options.id}'{hint}")
    row = rows[options.id]
    if options.submit and (options.measured or options.hardware):
        raise _mistake("--submit", "goes with an ID alone")
    if options.submit:
        return _submit(row)
    if options.ledger and (options.measured or not options.record):
        raise _mistake("--ledger", "goes with --record FILE, without --measured")
    if options.record and not options.measured:
        return _add(row, options.record, options.ledger or Path(), options.hardware)
    if options.record:
        from titan.sim.report.text import check_target

        check_target("--record", options.record)
    environment = _environment_of(row, options.measured) if options.measured else None
    profile = load_profile(options.hardware) if options.hardware else row.profile
    return _compare(row, profile, options.measured, environment, options.record)


def _listing(rows: dict[str, Row]) -> list[str]:
    """Return the lines of the table of published runs."""
    from titan.sim.report.text import columns

    cells = [("ID", "tokens/s/GPU", "GiB", "published")]
    cells += [(name, *map(_published, (row, row), _NAMES), row.about) for name, row in rows.items()]
    return columns(cells, left=(0, 3))


def _published(row: Row, key: str) -> str:
    """Return a published figure as text."""
    if key in row.run:
        return f"{row.run[key]:{_NAMES[key][1]}}"
    return "out of memory" if row.run.get("out_of_memory") and key == SPEED else "-"


def _submit(row: Row) -> int:
    """Write the row's job for Slurm, with as many GPUs as the published run had."""
    from titan.tools.cluster import slurm

    gpus = row.run["gpus"]
    a_node = min(gpus, row.profile.gpus_per_node)
    nodes = ["--nodes", str(-(-gpus // a_node)), "--gpus-per-node", str(a_node)]
    code = slurm.main([str(row.job), *_SUBMITTED, *nodes])
    if code == 0:
        folder = load_config(row.job).job.dump_folder
        print(
            f"when it has run: titan reproduce {row.name} --measured {folder} --record {row.name}.toml",
            file=sys.stderr,
        )
    return code


def _environment_of(row: Row, run: Path) -> RunEnvironment:
    """Return the environment of a run of this row.

    Raises:
        ConfigError: There is no such run, or it is not a run of this row.
    """
    files = ("metrics.jsonl", "config.toml", "environment.json")
    if missing := [name for name in files if not (run / name).is_file()]:
        near = runs_near(run, files[:1])
        message = f"{run} has no {missing[0]}, as the folder of a run has{near}"
        raise _mistake("--measured", message)
    environment = read_json(run / "environment.json", RunEnvironment, limit=2**20, within=run)
    differs = [f"ranks: {environment.world_size} here, {row.run['gpus']} in {row.name}"]
    differs = [] if environment.world_size == row.run["gpus"] else differs
    ours, theirs = _leaves(load_config(run / "config.toml")), _leaves(load_config(row.job))
    # In a run's config, the trainer has replaced "auto" by its choice.
    differs += [
        f"{key}: {ours.get(key)} here, {theirs.get(key)} in {row.name}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key) and theirs.get(key) != "auto"
    ]
    if differs:
        raise _mistake("--measured", f"{run} is no run of {row.name}: {'; '.join(differs)}")
    return environment


def _leaves(config: JobConfig) -> dict[str, Any]:
    """Return the settings that decide about time and memory, by key."""
    leaves: dict[str, Any] = {}
    rest = [(name, getattr(config, name).model_dump()) for name in _SAME]
    while rest:
        key, value = rest.pop()
        if isinstance(value, dict):
            rest += [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif key not in _FREE:
            leaves[key] = value
    return leaves


def _compare(
    row: Row,
    profile: Profile,
    run: Path | None,
    environment: RunEnvironment | None,
    record: Path | None,
) -> int:
    """Simulate the row, print it beside the published and measured figures, and write the record."""
    if (simulation := _simulation(row, profile)) is None:
        return 1
    simulated = _simulated(simulation)
    measured = _measured(simulation, run) if run else {}
    print("\n".join(_page(row, simulation, simulated, measured)))
    if record and environment:
        text = _record(row, profile, measured, environment)
        record.write_text(text, encoding="utf-8")
        print(
            f"\nwrote {record}: name yourself and the machine in it; titan reproduce {row.name} --record {record} adds it to a ledger"
        )
    return 0


def _simulation(row: Row, profile: Profile) -> Simulation | None:
    """Simulate the row; print the reason and return None if that fails."""
    gpus = row.run["gpus"]
    config, _ = load_to_run([str(row.job)], world_size=gpus, device=profile.device_kind)

    # These import torch, so mistakes are reported before.
    from titan.sim.record.trace_jobs import TraceError
    from titan.sim.replay.queues import ReplayError
    from titan.sim.report.text import say
    from titan.sim.simulate import HardwareError, simulate

    try:
        simulation = simulate(config, world_size=gpus, profile=profile, say=say)
    except (HardwareError, TraceError, ReplayError) as error:
        print(f"titan reproduce: {error}", file=sys.stderr)
        return None
    say("")
    return simulation


def _simulated(simulation: Simulation) -> dict[str, float]:
    """Return the simulated figures."""
    speed, peak = simulation.tokens_per_s_per_gpu, simulation.fullest.peak_reserved_bytes
    return {SPEED: speed, MEMORY: peak / 2**30}


def _add(row: Row, file: Path, folder: Path, hardware: str | None) -> int:
    """Add a file's measurement of the row to the ledger, with the prediction for its machine."""
    from titan.sim.report.text import check_target

    from .ledger import add, ledger_rows, read_measurement

    if not folder.is_dir():
        raise _mistake("--ledger", f"there is no folder {folder}")
    measured = read_measurement(file, name=row.name, gpus=row.run["gpus"])
    # Before a simulation of minutes.
    ledger_rows(folder)
    for name in ("ledger.toml", "ledger.md"):
        check_target("--ledger", folder / name)
    simulation = _simulation(row, load_profile(hardware or measured.hardware))
    if simulation is None:
        return 1
    from titan.sim.simulate import step_facts

    interval = step_facts(simulation)["interval"]
    predicted = _simulated(simulation) | {end: interval[end] for end in ("low", "high")}
    page, replaced = add(folder, measured, predicted)
    print(
        f"{'replaced' if replaced else 'added'} {row.name} on {measured.hardware} by {measured.who} in {page}"
    )
    return 0


def _measured(simulation: Simulation, run: Path) -> dict[str, float]:
    """Return the speed of a run's later steps, and the memory of its rank 0.

    Raises:
        InputError: The run has logged no step.
    """
    from titan.sim.report.measured import compare

    figures = {row["name"]: row["measured"] for row in compare(simulation, run)}
    if not figures["step"]:
        raise InputError(f"{run / 'metrics.jsonl'}: has no time of a step")
    tokens = simulation.tokens_per_step / simulation.layout.world_size
    measured = {SPEED: tokens / figures["step"]}
    # A run on CPUs has no memory of a device.
    if reserved := figures.get("memory, reserved"):
        measured[MEMORY] = reserved
    return measured


def _page(
    row: Row, simulation: Simulation, simulated: dict[str, float], measured: dict[str, float]
) -> list[str]:
    """Return the lines that the command prints."""
    from titan.sim.report.text import columns

    cells = [["", "published", "simulated", "over it"]]
    if measured:
        cells[0] += ["measured", "over published", "over simulated"]
    for key, (name, form) in _NAMES.items():
        line = [name, _published(row, key), f"{simulated[key]:{form}}"]
        line.append(_over(simulated[key], row.run.get(key)))
        if measured:
            here = measured.get(key)
            line += ["-" if here is None else f"{here:{form}}"]
            line += [_over(here, row.run.get(key)), _over(here, simulated[key])]
        cells.append(line)
    answer = "fits" if simulation.fits else "tight" if simulation.runs else "does not fit"
    return [
        f"{row.name}, {row.about}",
        f"job {row.job}, on {row.run['gpus']} x {simulation.profile.name}: {answer}",
        *([f"unlike the published run: {row.run['unlike']}"] if row.run.get("unlike") else []),
        "",
        *columns(cells, left=(0,)),
        "",
        "published: with the software of its time. simulated: the same settings with this titan and the installed torch.",
    ]


def _over(figure: float | None, base: float | None) -> str:
    """Return by how much a figure exceeds another figure, in percent."""
    return f"{figure / base - 1:+.1%}" if figure and base else "-"


def _record(
    row: Row, profile: Profile, measured: dict[str, float], environment: RunEnvironment
) -> str:
    """Return the file that a user sends in, as TOML."""
    devices = sorted({printable(name, MAX_TEXT) for name in environment.device_names or ()})
    values: dict[str, Any] = {
        "id": row.name,
        **{key: round(value, 2) for key, value in measured.items()},
        "hardware": profile.name,
        "who": "",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": printable(environment.torch, MAX_TEXT),
        "titan": printable(environment.titan, MAX_TEXT),
        "gpus": environment.world_size,
        "devices": devices,
        "machine": "",
    }
    lines = [f"{key} = {format_value(value)}" for key, value in values.items()]
    about = "# Written by `titan reproduce`. who: your name. machine: links, power limit."
    return "\n".join([about, *lines, ""])


def _mistake(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(COMMAND_LINE, 0, key, message)])
