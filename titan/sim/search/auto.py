"""Layout that titan chooses for a job with `parallelism.layout = "auto"`, before its ranks start.

The planner's formula ranks all layouts (candidates.py), and the simulator compares four to seven of
them. Models above 75 billion parameters, and ranks on CPUs, get the first by formula. A choice is
kept in two places: in the user's cache, by job, hardware, ranks and versions, and as layout.toml in
the run folder, so that a resumed run keeps its layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from titan.base.hardware import count_accelerators, recognise
from titan.base.run_writer import write_text_atomically
from titan.base.untrusted import InputError, read_json
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.layout import AXES
from titan.config.load import load_from_argv
from titan.config.options import is_quiet
from titan.config.schema import JobConfig
from titan.config.toml import read_toml
from titan.data import default_cache_folder
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace_cache import source_hash
from titan.sim.report.text import say

from .candidates import LayoutSearch, sequences_of
from .command import settings_overlay
from .exploration import Exploration
from .point import Point, Settings, words
from .reasons import reason

FILE = "layout.toml"
_MOST = 12  # layouts that are simulated until one fits
_MOST_PARAMS = 75e9  # of a model that is simulated: larger ones take minutes
_SMALL = 100e6  # parameters
_OPEN = (-1, "default")  # values in [parallelism] that leave a key to titan
_LAYOUT, _REASON = "parallelism.layout", "parallelism.layout_reason"
_CHECKPOINTING = ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
_BATCHES = ("training.local_batch_size", "training.global_batch_size")
# Sections that change no rank's step.
_OTHERS = {
    "job",
    "metrics",
    "checkpoint",
    "profiling",
    "tokenizer",
    "evaluation",
    "lr_scheduler",
}


@dataclass(frozen=True)
class ChosenLayout:
    """Layout of a job.

    Attributes:
        settings: overrides of the job, with the reason.
        runner_up: the layout that comes second, and how much slower it is. Empty: there is none.
        ranks: number of ranks and their hardware, as text.
    """

    settings: Settings
    runner_up: str
    ranks: str

    @property
    def overrides(self) -> list[str]:
        """The settings as words of a command line."""
        return words(self.settings)

    def write(self, config: JobConfig) -> None:
        """Write the choice into the job's run folder, as an overlay."""
        comments = [
            f'Layout of {self.ranks}, which titan chose for parallelism.layout = "auto".',
            self.settings[_REASON],
            f"Runner-up: {self.runner_up or 'none'}.",
            "A resumed run keeps this layout, unless --new-layout asks for another choice.",
        ]
        file = Path(config.job.dump_folder) / FILE
        write_text_atomically(file, settings_overlay(self.settings, *comments))


def resolve(
    job: Sequence[str],
    *,
    world_size: int,
    profile: Callable[[JobConfig], Profile],
    keep: bool = False,
    simulate: bool = True,
) -> tuple[list[str], ChosenLayout | None]:
    """Return a job with its layout, and the choice if it is new. A job with a fixed layout, or with mistakes, stays as it is.

    Args:
        job: files and overrides, as on the command line.
        world_size: number of ranks.
        profile: returns the hardware of the ranks. It is not called for a layout that is kept.
        keep: whether the layout in the run folder is kept, if the job can still have it.
        simulate: whether layouts may be simulated. Otherwise the formula decides, if the cache has
            no choice.

    Raises:
        ConfigError: no layout fits, or the hardware is not known.
    """
    try:
        config = load_from_argv(job, warn=False)
    except ConfigError:  # the command reports it
        return [*job], None
    if config.parallelism.layout != "auto":
        return [*job], None
    if config.groups.enable:
        raise _mistake(
            config, 'is not for replica groups; use "fixed" and the degrees of a group'
        )
    follows = [p.local_batch_size and not p.global_batch_size for p in config.phase]
    if config.training.global_batch_size == -1 and any(follows):
        raise _mistake(
            config, '"auto" needs training.global_batch_size: a phase sets local_batch_size'
        )
    if (file := Path(config.job.dump_folder) / FILE).is_dir():
        raise _mistake(config, f"{file}, where the choice is kept, is a folder: remove it")
    kept, news = _kept(job, config, world_size) if keep else (None, "")
    choice = kept or choose(
        job, config, profile(config), world_size=world_size, simulate=simulate
    )
    if not is_quiet():
        other = f". Runner-up: {choice.runner_up}" if choice.runner_up else ""
        print(
            f'titan: layout = "auto"{news}: {choice.settings[_REASON]}{other}', file=sys.stderr
        )
    return [*job, *choice.overrides], None if kept else choice


def resolve_here(
    job: Sequence[str], *, world_size: int, keep: bool
) -> tuple[list[str], ChosenLayout | None]:
    """Return a job with its layout on this machine, and the choice if it is new. `resolve` says more."""
    return resolve(
        job,
        world_size=world_size,
        profile=lambda config: profile_here(config, world_size),
        keep=keep,
    )


def choose(
    job: Sequence[str], config: JobConfig, profile: Profile, *, world_size: int, simulate: bool
) -> ChosenLayout:
    """Return the layout of a job: from the cache, by simulation or by formula."""
    held = _held(config)
    relevant = config.model_dump(mode="json", exclude=_OTHERS)
    key = [relevant, sorted(held), world_size, profile.model_dump(mode="json"), source_hash()]
    digest = hashlib.blake2b(
        json.dumps(key, sort_keys=True).encode(), digest_size=16
    ).hexdigest()
    file = default_cache_folder() / "layouts" / f"{digest}.json"
    with suppress(InputError):
        return read_json(file, ChosenLayout)
    search = LayoutSearch(job, config, profile, world_size=world_size, held=held)
    found: ChosenLayout | str = "`titan train` compares some by simulation"
    if profile.is_cpu:
        found = "ranks on CPUs are not simulated"
    elif search.model.num_params > _MOST_PARAMS:
        found = f"models above {_MOST_PARAMS / 1e9:g} billion parameters are not simulated"
    elif simulate:
        found = _by_simulation(search)
    choice = _by_formula(search, found) if isinstance(found, str) else found
    if simulate:
        with suppress(OSError):  # the cache only saves time
            write_text_atomically(file, json.dumps(asdict(choice)))
    return choice


def _held(config: JobConfig) -> set[str]:
    """Return the keys fixed by the user."""
    parallel, ac = config.parallelism, config.activation_checkpoint
    own = parallel.model_fields_set - {"layout", "layout_reason"}
    held = {f"parallelism.{key}" for key in own if getattr(parallel, key) not in _OPEN}
    return held | {*_CHECKPOINTING} if ac.model_fields_set else held


def _by_simulation(search: LayoutSearch) -> ChosenLayout | str:
    """Return the fastest of four to seven layouts, or the reason why the simulator has none."""
    search.what, explored = "layouts simulated", Exploration(search)
    tried = explored.tried
    alone = explored.seeds()
    explored.simulate([*alone, *search.first(1)])
    explored.simulate(explored.lighter(alone))
    explored.simulate(search.neighbours(explored.fitting[:1], 2))
    while not explored.fitting and len(tried) < _MOST and (points := search.first(2)):
        explored.simulate(points)
    say("")
    problems = [variant.problem for variant in tried.values() if variant.problem]
    if tried and len(problems) == len(tried):
        return f"the simulator cannot run it ({problems[0]})"
    if not explored.fitting:
        raise _nothing_fits(search)
    best, *others = explored.fitting
    text = (
        f"fastest of {len(tried)} layouts in simulation, of {len(search.points):,} that may fit by formula: "
        f"{tried[best].speed:,.0f} tokens/s/GPU, {tried[best].needed_gib:.1f} GiB"
    )
    slower = ""
    if others:
        second = tried[others[0]]
        text += f"; against the runner-up: {reason(tried[best].facts, second.facts)}"
        slower = f", {1 - second.speed / tried[best].speed:.0%} slower"
    return _choice(search, explored.fitting, text, slower)


def _by_formula(search: LayoutSearch, why: str) -> ChosenLayout:
    """Return the fastest layout by formula, and the reason why it was not simulated."""
    # The formula says little about small kernels: of small models it would prefer a pipeline.
    is_small = search.model.num_params < _SMALL
    alone = search.data_parallel(spreads_experts=False) if is_small else []
    if not (first := [*alone, *search.first(2)][:2]):
        raise _nothing_fits(search)
    best, second = first[0], first[-1]
    text = f"fastest by formula of {len(search.points):,} layouts that may fit"
    slower = f", {1 - search.seconds(best) / search.seconds(second):.0%} slower by formula"
    if alone:
        size, slower = f"{_SMALL / 1e6:g} million", ""
        text = (
            f"data parallelism; by formula, models below {size} parameters are not to be judged"
        )
    return _choice(search, first, f"{text}; {why}", slower)


def _choice(
    search: LayoutSearch, points: Sequence[Point], text: str, slower: str
) -> ChosenLayout:
    """Return the first of these points, with the next one as the runner-up."""
    best, *others = points
    ranks = f"{search.world_size} x {search.profile.name}"
    # Keys that the user sets are not among the settings.
    settings = {_LAYOUT: "fixed", _REASON: f"{_describe(best)}: {text}"}
    runner_up = f"{_describe(others[0])}{slower}" if others else ""
    return ChosenLayout(settings | search.settings(best), runner_up, ranks)


def _describe(point: Point) -> str:
    """Return a point as text, with the batch of a forward pass and recomputation."""
    schedule = f", {point.schedule} by {point.microbatch}" if point.pp > 1 else ""
    return f"{point}, ZeRO-{point.zero}, batch {point.batch}{schedule}, AC {point.recompute}"


def _kept(
    job: Sequence[str], config: JobConfig, world_size: int
) -> tuple[ChosenLayout | None, str]:
    """Return the choice in the run folder, if the job can still have it, and what becomes of it as text."""
    file = Path(config.job.dump_folder) / FILE
    if not file.is_file():
        return None, ""
    held = _held(config)
    try:
        settings = {
            f"{section}.{key}": str(value)
            for section, table in read_toml(file)[0].items()
            for key, value in (table.items() if isinstance(table, dict) else ())
            if f"{section}.{key}" not in held
        }
        own_keys = [key for key in settings if not key.startswith("parallelism.")]
        if other := {*own_keys} - {*_CHECKPOINTING, *_BATCHES}:
            raise _mistake(config, f"has {min(other)}, which is no key of a layout")
        choice = ChosenLayout({_REASON: ""} | settings, "", f"{world_size} ranks")
        kept = load_from_argv([*job, *choice.overrides], warn=False)
        degrees = [getattr(kept.parallelism, key.partition(".")[2]) for key in AXES.values()]
        # -1: the shards follow from the ranks.
        ranks = world_size if -1 in degrees else prod(degrees)
        own, sequences = kept.training.global_batch_size, sequences_of(config, world_size)
        if ranks == world_size and own == sequences:
            check_to_run(kept, world_size=world_size)
            return choice, f", kept from {file}"
        why = f"has a global batch of {own} sequences, and the job {sequences}"
        if ranks != world_size:
            why = f"is for {ranks} ranks, and there are {world_size}"
    except ConfigError as error:
        why = f"does not suit the job: {error.problems[0].message}"
    return None, f", chosen again, since {file} {why}"


# ---- hardware ------------------------------------------------------------------------------------


def profile_here(config: JobConfig, ranks: int) -> Profile:
    """Return the profile of this machine.

    Args:
        config: the job, which may name its accelerator.
        ranks: ranks on this machine.

    Raises:
        ConfigError: the simulator has no figures of the accelerator.
    """
    if not count_accelerators():
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / ranks
        return on_nodes(load_profile("cpu"), ranks).model_copy(
            update={"memory_gib": memory_gib}
        )
    name = config.hardware.name
    if name == "auto":
        # Another process, since asking takes some of the memory of a GPU.
        command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        name = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        name = row.name if (row := recognise(name)) else name or "unknown accelerator"
    return load_profile(name)


def on_nodes(profile: Profile, ranks_per_node: int) -> Profile:
    """Return the profile with as many devices on a node as there are ranks, unless its fast links join nodes."""
    is_rack = profile.gpus_per_node > 8
    most = ranks_per_node if profile.is_cpu else min(ranks_per_node, profile.gpus_per_node)
    return profile if is_rack else profile.model_copy(update={"gpus_per_node": most})


def _why_none(search: LayoutSearch) -> str:
    """Return why a search has no legal point, or "" if it is the memory."""
    refusals = [*search.refusals.values()]
    if next(search.combinations(), None) is None:
        return f"none has degrees that divide the ranks and the global batch, {search.global_batch} sequences"
    if not refusals or not all(refusals):
        return ""
    return (
        f"the job's rules refuse all {len(refusals)} that divide, the first with: {refusals[0]}"
    )


def _nothing_fits(search: LayoutSearch) -> ConfigError:
    held = f" with the job's own {', '.join(sorted(search.held))}" if search.held else ""
    where = f"{search.world_size} x {search.profile.name}"
    if why := _why_none(search):
        return _mistake(search.config, f'"auto" finds no layout for {where}{held}: {why}')
    where = f"{where} ({search.profile.memory_gib:.4g} GiB)"
    fix = "use more ranks, a smaller global batch or one that they divide, or set fewer keys; `titan plan` searches more"
    return _mistake(search.config, f'"auto" finds no layout that fits {where}{held}; {fix}')


def _mistake(config: JobConfig, message: str) -> ConfigError:
    return ConfigError([config.source_map.problem(_LAYOUT, message)])
