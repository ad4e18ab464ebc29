"""Checks of a job's settings against each other, before torch is imported.

They report every violation at once.

    section_rules.py  one function for each section; its rules of choices, experts, phases and
                      stages are in files of these names
    layout_rules.py   rules that depend on the number of ranks
    machine.py        checks the machine that will run the job
    environment.py    torchrun's variables

titan/config/model.py, task.py, loss.py and quantize.py have the rules of their own sections.
A rule yields `(key, message)` for each violation: the key whose line is shown, and the fault with
its fix. A key without a dot belongs to the rule's section. `check_to_run` runs the rules for a
config, `load_to_run` for a command line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from titan.base.hardware import count_accelerators
from titan.checks.environment import check_environment
from titan.checks.layout_rules import check_layout, resolve_layout
from titan.checks.phase_rules import check_borders
from titan.checks.section_rules import RULES
from titan.config.errors import ConfigError, Problem, Violations, problems_of, readable
from titan.config.layout import Layout
from titan.config.load import load_from_argv, print_warnings
from titan.config.phases import of_each_phase
from titan.config.plug_ins import load_plug_in, plug_ins
from titan.config.schema import JobConfig
from titan.optim.schedule import phases

MACHINE = "machine"  # section of a package's rule that is about no section: machine.py asks it


def load_to_run(
    argv: Sequence[str],
    *,
    world_size: int | None,
    options: Sequence[str] = (),
    here: bool = False,
    device: str | None = None,
    warn: bool = True,
) -> tuple[JobConfig, Layout]:
    """Load and check the job of a command line.

    Args:
        argv: `JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`.
        world_size: number of ranks; None: from torchrun's environment.
        options: the command's other options, for the hint at a misspelt option.
        here: whether to check this machine and its environment, too.
        device: kind of device of the job, "cuda" or "cpu", whose precision takes the place of
            "auto". None: the trainer finds out.
        warn: whether to print warnings. A command that starts another process with the same job
            leaves them to that process.

    Returns:
        The job and its layout.

    Raises:
        ConfigError: with everything that prevents the run.
    """
    problems = check_environment(os.environ) if here else []
    if world_size is None and not problems:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
    # Check the readable part, too, so that one mistake does not hide the next.
    mistakes: list[Problem] = []
    config = readable(mistakes, load_from_argv, argv, options=options, warn=False)
    warnings = config.source_map.warnings if config is not None and not mistakes else []
    problems += mistakes
    if config is not None:
        problems += _problems(config, world_size, here=here, device=device)
        if here and not problems and config.parallelism.layout == "auto":
            problems.append(config.source_map.problem("parallelism.layout", _command(argv)))
    if warn or problems:
        print_warnings(warnings)
    # If one of them is None, there is a problem.
    if problems or config is None or world_size is None:
        raise ConfigError(problems)
    if warn:
        print_warnings(advise(config, device=device))
    if warn and here:
        from titan.checks.machine import advise_config, advise_text, first_weights

        described = (
            config.model.hf_path if config.model.hf_path != first_weights(config) else ""
        )
        print_warnings(advise_text(config) + advise_config(config, described))
    if device is not None:
        config = config.on_device(device)
    return config, resolve_layout(config, world_size)


def _command(argv: Sequence[str]) -> str:
    """Return the message for ranks whose layout is still to be chosen, with the command that chooses it."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    command = f"titan train {shlex.join(argv)} --nproc {ranks}"
    if ranks > per_node:
        command = f"titan slurm {shlex.join(argv)} --nodes {ranks // per_node} --hardware H"
    return f'"auto" is chosen before the ranks start, which torchrun cannot do; run `{command}`'


def device_of(config: JobConfig) -> str:
    """Return the kind of device of a job: of the accelerator that it names, or of this machine."""
    return "cuda" if config.hardware.name != "auto" or count_accelerators() else "cpu"


def check_to_run(config: JobConfig, *, world_size: int) -> Layout:
    """Return the layout of a run that can start.

    Args:
        config: the job.
        world_size: number of ranks.

    Raises:
        ConfigError: with everything in the job that prevents the run.
    """
    if problems := _problems(config, world_size, here=False):
        raise ConfigError(problems)
    return resolve_layout(config, world_size)


def _problems(
    config: JobConfig, world_size: int | None, *, here: bool, device: str | None = None
) -> list[Problem]:
    problems = check(config)
    if world_size is not None:
        problems += check_layout(config, world_size=world_size) or [
            *problems_of(check_borders, config, world_size),
        ]
    if here:
        from titan.checks.machine import (
            check_machine,
        )  # reads tokenizers and the folders of data

        problems += check_machine(config, device=device)
    return problems


def check(config: JobConfig) -> list[Problem]:
    """Return everything about the config that is wrong for any number of ranks, in any of its phases."""
    added = [
        (section, load_plug_in(entry))
        for entry in plug_ins("titan.rules")
        if (section := entry.name.partition(".")[0]) != MACHINE
    ]
    return of_each_phase(
        config,
        lambda job: (
            problem
            for section, rule in [*RULES, *added]
            for problem in problems_of(rule, job, section=section)
        ),
    )


def advise(config: JobConfig, *, device: str | None = None) -> list[str]:
    """Return warnings about settings that shorten the schedule, trace nothing, or are slow on a device.

    Many trial runs have such settings.

    Args:
        config: the job.
        device: "cuda" or "cpu"; None: the job's kind of device.
    """
    on_cpu = (device or device_of(config)) == "cpu"
    return [*map(str, problems_of(_advice, config, on_cpu))]


def _advice(config: JobConfig, on_cpu: bool) -> Violations:
    schedule, steps = config.lr_scheduler, config.training.steps
    name = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    total = schedule.total_steps or steps
    warmup, decay = phases(schedule, total_steps=steps)
    wanted = round(total * (schedule.decay_ratio or 0))
    yield from _never_reached(config)
    if warmup < schedule.warmup_steps:
        yield (
            "lr_scheduler.warmup_steps",
            f"{schedule.warmup_steps} steps do not fit into {name} = {total}; cut to {warmup}",
        )
    if decay < wanted:
        message = f"{wanted} steps of decay do not fit into {name} = {total} after {warmup} of warm-up"
        yield "lr_scheduler.decay_ratio", f"{message}; cut to {decay}"
    if not on_cpu and config.training.mixed_precision_param == "float32":
        message = (
            "float32 leaves an accelerator's tensor cores idle: an H100 takes ten times as long as "
            'with "bfloat16", which "auto" means there'
        )
        yield "training.mixed_precision_param", message
    if config.metrics.wandb_project != "titan" and not config.metrics.enable_wandb:
        yield "metrics.wandb_project", "not used, since metrics.enable_wandb is false"
    if config.optimizer.lr > 1:
        yield "optimizer.lr", f"{config.optimizer.lr:g} is large: most runs have 1e-5 to 0.1"
    if not config.source_map.locations and config.source_map.line:
        yield "", "sets no key: titan trains its debug model on Python's own library"


def _never_reached(config: JobConfig) -> Violations:
    """Yield settings for steps that the run does not reach. The last step always logs, validates, evaluates and saves."""
    profiling, faults, steps = config.profiling, config.fault_tolerance, config.training.steps
    traces = profiling.enable_profiling or profiling.enable_memory_snapshot
    wanted = {
        "profiling.profile_freq": (profiling.profile_freq * traces, "no trace"),
        "fault_tolerance.replay_every": (faults.replay_every, "no replay"),
        "fault_tolerance.check_replicas_every_n_steps": (
            faults.check_replicas_every_n_steps,
            "no comparison",
        ),
    }
    for key, (first, what) in wanted.items():
        if first > steps:
            yield key, f"{first}, but the run ends at training.steps = {steps}: {what}"
