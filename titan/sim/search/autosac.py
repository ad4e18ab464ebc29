"""Search of `titan plan --only sac`: selective activation checkpointing (arXiv:2205.05198) for a given memory.

    titan plan JOB.toml --only sac --world-size N --hardware H --memory G

It chooses the results that each block saves for its backward pass, so that the job fits in G GiB
and takes the least time.

The job is traced once, with blocks that run operation by operation and save nothing.
recomputation.py chooses from that trace, and makes the trace of the choice, which is replayed like
any other: if memory is left or lacking, the bytes are corrected and the choice is repeated. Compiled
blocks are traced each time: their choices are measured in one job, since the costs of fused
operations do not add up.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan.checks.rules import check_to_run
from titan.config.load import load_from_argv
from titan.config.schema import JobConfig
from titan.sim.price.cost import Cost
from titan.sim.record.trace import Trace
from titan.sim.report.text import say
from titan.sim.simulate import FAILURES, GIB, Simulation, facts, price, simulate

from .command import show
from .knapsack import Kept
from .point import Settings, words
from .recomputation import (
    Choices,
    choose,
    find_blocks,
    keep,
    measure,
    samples,
)
from .variants import Search, Variant

_ROUNDS = 5


@dataclass
class Choice:
    """Results that all blocks save.

    Attributes:
        lines: the choice as activation_checkpoint.op_keep_by_block takes it.
        simulation: simulation of the job with this choice.
    """

    lines: list[str]
    simulation: Simulation


_KEY = "activation_checkpoint."
_OP = {"mode": "selective", "selective_ac_option": "op"}
_OTHERS: dict[str, Settings] = {
    "full": {"mode": "full"},
    "op": _OP,
    "every 2nd block": {"mode": "selective", "selective_ac_option": "2"},
    "none": {"mode": "none"},
}
"""Modes of recomputation that a choice is compared with."""


def settings(lines: Sequence[str]) -> Settings:
    """Return a choice as settings of a job."""
    text = ", ".join(f'"{line}"' for line in lines)
    kept = _OP | {"op_keep": "[]", "op_keep_by_block": f"[{text}]"}
    return {_KEY + key: value for key, value in kept.items()}


def autosac(search: Search) -> Choice:
    """Choose the results that each block of a job saves on some hardware, for the least time in all of its memory.

    The simulation in the result says whether the choice fits.

    Args:
        search: job, ranks and devices. The job's settings of activation_checkpoint are replaced;
            the profile's `memory_gib` is the memory that may be used.

    Raises:
        ConfigError: the rules refuse the job.
        HardwareError: the hardware cannot run the job.
        TraceError: the job cannot be traced.
        ReplayError: the traced ranks wait for each other forever.
    """
    job, world_size, profile = search.job, search.world_size, search.profile
    is_compiled = compiles_model(load_from_argv(job))
    # Without a limit the allocator never has to give memory back, which would be slow.
    roomy = profile.model_copy(update={"memory_gib": 2.0**20})

    def run(lines: Sequence[str], *more: str) -> Simulation:
        config = load_from_argv([*job, *words(settings(lines)), *more])
        check_to_run(config, world_size=world_size)
        return simulate(
            config, world_size=world_size, profile=roomy, processes=search.processes
        )

    base = run(["0:"], *["--compile.enable=false"] * is_compiled)
    cost = Cost(profile)
    blocks = {rank: find_blocks(trace, cost) for rank, trace in base.traces.items()}
    first = base
    if is_compiled:
        first = run(["0:"])
        every = dict(ChainMap(*blocks.values()))
        chosen = samples(every)
        measure(every, run(to_lines(chosen)).traces.values(), chosen, cost)
    limit = int(profile.usable_gib * GIB)

    def left(simulation: Simulation) -> dict[int, int]:
        """Return the bytes that each rank has left, or lacks (below 0)."""
        return {rank: limit - report.needed_bytes for rank, report in simulation.memory.items()}

    extra = left(first)
    best, best_fits = Choice(["0:"], first), min(extra.values()) >= 0
    for _ in range(_ROUNDS):
        kept: Choices = {}
        traces: dict[int, Trace] = {}
        for rank, trace in base.traces.items():
            of_rank = choose(trace, blocks[rank], extra[rank])
            traces[rank] = keep(trace, blocks[rank], of_rank)
            kept |= of_rank
        lines = to_lines(kept)
        now = run(lines) if is_compiled else price(base.config, base.layout, traces, roomy)
        spare = left(now)
        fits = min(spare.values()) >= 0
        if fits and (not best_fits or now.timeline.step_s < best.simulation.timeline.step_s):
            best, best_fits = Choice(lines, now), True
        # Stop when it fits and little is left, or everything is kept.
        little = limit // 500
        if (fits and max(spare.values()) < little) or set(kept.values()) == {None}:
            break
        # Give up the missing bytes and some more, so that the next choice does not miss by a
        # little.
        for rank, number in spare.items():
            extra[rank] += number if number >= 0 else number - little // 2
    # Now on the device as it is.
    last = best.simulation
    best.simulation = price(last.config, last.layout, last.traces, profile)
    return best


def compiles_model(config: JobConfig) -> bool:
    """Return whether the job's blocks are compiled."""
    return config.compile.enable and "model" in config.compile.components


def to_lines(kept: Mapping[int, Kept]) -> list[str]:
    """Return a choice as lines of op_keep_by_block, one line for neighbouring blocks that save the same."""
    lines: list[tuple[int, int, str]] = []
    for layer, calls in sorted(kept.items()):
        places = defaultdict[str, list[int]](list)
        for call in calls or ():
            name, _, place = call.partition("@")
            places[name].append(int(place))
        entries = [f"{n}@{','.join(map(str, sorted(p)))}" for n, p in sorted(places.items())]
        text = "all" if calls is None else " ".join(entries)
        if lines and lines[-1][1:] == (layer - 1, text):
            lines[-1] = (lines[-1][0], layer, text)
        else:
            lines.append((layer, layer, text))
    return [f"{first}-{last}: {text}".rstrip() for first, last, text in lines]


# ---- the command ---------------------------------------------------------------------------------


def run(options: Namespace, search: Search, config: JobConfig) -> int:
    """Run `titan plan --only sac`. Return 1 if the job does not fit with any recomputation."""
    others = dict(_OTHERS)
    if compiles_model(config):
        for share in ("0.25", "0.5", "0.75"):
            budget = {"mode": "memory_budget", "memory_budget": share}
            others[f"memory_budget {share}"] = budget
    search.what = "others simulated"
    try:
        say("choosing")
        choice = autosac(search)
        plain = {_KEY + "op_keep_by_block": "[]"}
        compared = search(
            plain | {_KEY + k: v for k, v in one.items()} for one in others.values()
        )
    except FAILURES as error:
        say("")
        print(error, file=sys.stderr)
        return 2
    say("")
    chosen = settings(choice.lines)
    compared.append(Variant(chosen, search.profile.name, facts(choice.simulation)))
    named = zip([*others, "sac"], compared, strict=True)
    # Gains are over the slowest.
    order = sorted((one for one in named if one[1].facts), key=lambda one: one[1].speed)
    fitting = [one for one in order if one[1].fits]
    if not fitting:
        print("the job does not fit, even if its blocks keep nothing", file=sys.stderr)
    # A choice by operation takes time of the host, which may be all that the job waits for.
    elif (best := fitting[-1])[0] != "sac":
        print(
            f'"{best[0]}" is faster than a choice by operation, and written in its place',
            file=sys.stderr,
        )
        chosen = best[1].settings
    show(options, search, config, {"op_keep_by_block": choice.lines}, dict(order), chosen)
    return 0 if fitting else 1
