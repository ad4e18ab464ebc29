"""Run `titan autosac JOB.toml --world-size N --hardware H --memory G`: choose what each block keeps for its backward pass,
so that the job fits in G GiB and takes the least time (selective activation checkpointing, arXiv:2205.05198).

The job is traced once, with blocks that go through their operations one by one and keep nothing. That trace has, for each
operation of each block, the seconds that its recomputation takes and the bytes that its results hold. A block that runs
eagerly repeats every operation whose result is not kept, so both add up, and the best choice is that of a knapsack:

    maximize    seconds of recomputation saved, over blocks and operations
    subject to  bytes kept while the most blocks wait for their backward pass <= bytes free at that time

A block may also keep everything, which needs fewer bytes than the results of all its operations. Dynamic programming over
the blocks solves it, exactly up to the rounding of each block's bytes to 1/16384 of the memory. The trace of the choice follows from that of the
job by moving allocations and leaving out what is not recomputed (`keep`), and is replayed like any other: if memory is
left or lacking, the bytes are corrected and the knapsack solved again. Compiled blocks, and what goes to the host, are
traced anew.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from titan.config.load import load_from_argv
from titan.config.rules import check_to_run, resolve_layout
from titan.parallel.kept_operations import GROUPS

from .cost import Cost
from .profiles import Profile, load_profile, profile_names
from .report import columns, duration, mistake, put_json, require_folders, require_positive, say
from .segments import block_of
from .simulate import GIB, Simulation, facts, price, simulate
from .trace import Allocate, AwaitWork, Event, Free, Launch, Trace, Transfer

Kept: TypeAlias = "frozenset[str] | None"
"""What a block keeps: calls such as "aten.mm@2", or None for everything."""
_UNITS = 16384
_EXPENSIVE = [name for group in ("matmul", "attention", "network") for name in GROUPS[group]]
_POINTWISE = ("aten._fused_rms_norm", "aten.silu", "aten.mul")
"""Kept besides products, attention and what came over the network: no model writes into their results."""
_ROUNDS = 5


@dataclass
class _Run:
    """Hold one run of an operation in a block: the numbers of its events, of the next event that is none of them, and the
    blocks of memory that hold its results."""

    events: list[int] = field(default_factory=list)
    until: int = 0
    results: list[int] = field(default_factory=list)


@dataclass
class Block:
    """Hold a block's calls that are recomputed. runs: forward and repeated, of each microbatch.

    sizes: bytes that the results of a call that may be kept hold, of one microbatch. seconds: of each call's recomputation, in a
    step. whole: the bytes and seconds of keeping everything.
    """

    runs: dict[str, list[tuple[_Run, _Run]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    whole: tuple[int, float] = (0, 0.0)

    def cost(self, kept: Kept) -> tuple[int, float]:
        """Return the bytes held and the seconds saved."""
        if kept is None:
            return self.whole
        return sum(self.sizes[c] for c in kept), sum(self.seconds[c] for c in kept)


def find_blocks(trace: Trace, cost: Cost) -> dict[int, Block]:
    """Return the blocks of a rank that recompute operation by operation, by number."""
    step = trace.step
    runs: defaultdict[tuple[int, str, bool], list[_Run]] = defaultdict(list)
    run, last = _Run(), None
    freed: dict[int, int] = {}
    for index, event in enumerate(step):
        if isinstance(event, Free):
            freed[event.block] = index
        scope = getattr(event, "scope", None)
        if scope is None:
            continue
        if scope is not last:
            run.until, run, last = index, _Run(), scope
            layer = block_of(scope)
            if scope.call and layer is not None and scope.phase in ("forward", "recompute"):
                runs[layer, scope.call, scope.phase == "recompute"].append(run)
        run.events.append(index)
    blocks: dict[int, Block] = {}
    for (layer, call, repeats), repeated in runs.items():
        forward = runs.get((layer, call, False), [])
        if repeats and len(forward) == len(repeated):
            blocks.setdefault(layer, Block()).runs[call] = list(zip(forward, repeated, strict=True))
            for first, again in blocks[layer].runs[call]:
                _pair(first, again, step, freed)
    for block in blocks.values():
        _measure(block, trace, cost, freed)
    return blocks


def _pair(first: _Run, again: _Run, step: Sequence[Event], freed: Mapping[int, int]) -> None:
    """Find the results of an operation and of its repetition.

    They come with its last step. What is made before, such as what DTensor gathers for it, counts if it outlives the
    repetition.
    """
    steps = [
        n
        for n in range(first.events[0], first.until)
        if isinstance(step[n], Launch | Transfer | AwaitWork)
    ]
    before = steps[-2] if len(steps) > 1 else -1
    made, remade = (
        [(n, e.block) for n in run.events if isinstance(e := step[n], Allocate)]
        for run in (first, again)
    )
    # Paired from the end, since only one of them may have had to wait and copy.
    for (number, result), (_, repeated) in zip(reversed(made), reversed(remade), strict=False):
        if number > before or freed.get(repeated, again.until) >= again.until:
            first.results.append(result)
            again.results.append(repeated)


def _measure(block: Block, trace: Trace, cost: Cost, freed: Mapping[int, int]) -> None:
    step = trace.step
    sizes: dict[int, int] = {}
    for call, runs in block.runs.items():
        sizes |= {
            e.block: e.size_bytes for n in runs[0][1].events if isinstance(e := step[n], Allocate)
        }
        if call.partition("@")[0] in (*_EXPENSIVE, *_POINTWISE):
            block.sizes[call] = sum(sizes[number] for number in runs[0][1].results)
        repeated = (step[index] for _, again in runs for index in again.events)
        block.seconds[call] = sum(_seconds(event, trace, cost) for event in repeated)
    # Whoever keeps everything holds what the recomputation leaves when it ends.
    first = [runs[0][1] for runs in block.runs.values()]
    end = max(run.until for run in first)
    left = (n for run in first for n in run.results if freed.get(n, end) >= end)
    block.whole = sum(sizes[n] for n in left), sum(block.seconds.values())


def _seconds(event: Event, trace: Trace, cost: Cost) -> float:
    if isinstance(event, Launch):
        return cost.kernel_s(event.kernel)
    if isinstance(event, Transfer):
        return cost.transfer(event, trace.groups[event.group], rank=trace.rank).seconds
    return 0.0


# ---- the trace of a choice -----------------------------------------------------------------------


def keep(trace: Trace, blocks: Mapping[int, Block], kept: Mapping[int, Kept]) -> Trace:
    """Return the trace of a rank whose blocks keep these results, from one in which they keep nothing."""
    freed = {e.block: n for n, e in enumerate(trace.step) if isinstance(e, Free)}
    dropped: set[int] = set()
    works: set[int] = set()
    ends: dict[
        int, int
    ] = {}  # a block that the recomputation would allocate, and the one kept in its place
    for layer, calls in kept.items():
        block = blocks[layer]
        for microbatch in range(max((len(runs) for runs in block.runs.values()), default=0)):
            pairs = [r[microbatch] for c, r in block.runs.items() if calls is None or c in calls]
            end = max((again.until for _, again in pairs), default=0)
            for forward, again in pairs:
                dropped.update(again.events)
                events = [trace.step[number] for number in again.events]
                works |= {event.work for event in events if isinstance(event, Transfer)}
                made = {event.block for event in events if isinstance(event, Allocate)}
                for first, second in zip(forward.results, again.results, strict=True):
                    # Keeping everything means keeping what is needed after the recomputation.
                    if calls is not None or freed.get(second, end) >= end:
                        dropped.add(freed[first])
                        ends[second] = first
                dropped.update(freed[block] for block in made - ends.keys())
    saved = set(ends.values())
    step: list[Event] = []
    for number, event in enumerate(trace.step):
        if number in dropped or (isinstance(event, AwaitWork) and event.work in works):
            continue
        if isinstance(event, Free) and event.block in ends:
            event = Free(ends[event.block])
        elif isinstance(event, Allocate) and event.block in saved:
            event = replace(event, category="activations")
        step.append(event)
    return replace(trace, step=step)


# ---- the choice ----------------------------------------------------------------------------------


def choose(trace: Trace, blocks: Mapping[int, Block], extra: int) -> dict[int, Kept]:
    """Return what each block of a rank keeps.

    Args:
        trace: of the rank, keeping nothing.
        blocks: its blocks.
        extra: bytes that may be in use beyond the trace's own peak.
    """
    moments, peak = _moments(trace, blocks)
    limit = peak + extra
    # Passes in flight are counted when they are the most.
    fullest = max((m[0] for m in moments), key=lambda flying: sum(flying.values()), default={})
    order = sorted(blocks)
    limits: dict[int, int] = {}
    for flying, used in moments:
        for n, layer in enumerate(order):
            # Without a pipeline the first blocks are in flight and the others are not.
            if flying == {one: fullest[one] * (one in order[: n + 1]) for one in blocks}:
                limits[layer] = limit - used
    over = 0
    while True:
        kept = solve(blocks, fullest, {layer: most - over for layer, most in limits.items()})
        sizes = {layer: blocks[layer].cost(calls)[0] for layer, calls in kept.items()}
        lacking = max(
            (
                sum(n * sizes[layer] for layer, n in flying.items()) - (limit - used)
                for flying, used in moments
            ),
            default=0,
        )
        if lacking <= 0 or not any(sizes.values()):
            return kept
        over += lacking


def _moments(
    trace: Trace, blocks: Mapping[int, Block]
) -> tuple[list[tuple[dict[int, int], int]], int]:
    """Return how many passes of each block await their backward pass, with the most bytes in use while it is so; and the
    most bytes at any time."""
    changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for layer, block in blocks.items():
        for runs in zip(*block.runs.values(), strict=True):
            changes[min(run.events[0] for run, _ in runs)].append((layer, 1))
            # From here on the recomputation makes what is not kept.
            changes[min(run.events[0] for _, run in runs)].append((layer, -1))
    alive: dict[int, int] = {}
    used, flying = 0, dict.fromkeys(blocks, 0)
    most: dict[tuple[int, ...], int] = {}
    for number, event in enumerate([*trace.setup, *trace.first_step, *trace.step]):
        for layer, change in changes.get(number - len(trace.setup) - len(trace.first_step), ()):
            flying[layer] += change
        if isinstance(event, Allocate):
            used += alive.setdefault(event.block, event.size_bytes)
        elif isinstance(event, Free):
            used -= alive.pop(event.block, 0)
        key = tuple(flying.values())
        most[key] = max(most.get(key, 0), used)
    moments = [
        (dict(zip(blocks, key, strict=True)), used) for key, used in most.items() if any(key)
    ]
    return moments, max(most.values())


def solve(
    blocks: Mapping[int, Block], flying: Mapping[int, int], limits: Mapping[int, int]
) -> dict[int, Kept]:
    """Return the choice that saves the most seconds.

    Args:
        blocks: the blocks of a rank.
        flying: passes of each block that are in flight together.
        limits: bytes that the blocks up to one may keep together in these passes, by its number. At least for the last one.
    """
    if not blocks:
        return {}
    most = max(0, *limits.values())
    total, unit = _UNITS, max(1, -(-most // _UNITS))
    best, bound = np.zeros(total + 1), total
    chosen: list[tuple[int, int, list[_Option], np.ndarray]] = []
    fronts: dict[Any, list[_Option]] = {}
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for layer in sorted(blocks):
        block, count = blocks[layer], flying[layer]
        key = (*block.sizes.items(), *block.seconds.items(), block.whole, count)
        alike[key].append(layer)
        front = fronts.setdefault(key, _front(block) if key not in fronts else [])
        now, at = np.full(total + 1, -1.0), np.zeros(total + 1, dtype=int)
        for number, (size, seconds, _) in enumerate(front):
            units = -(-size * count // unit)
            if units > total:
                break
            value = best[: total + 1 - units] + seconds
            better = value > now[units:]
            now[units:][better] = value[better]
            at[units:][better] = number
        bound = max(0, limits[layer] // unit) if layer in limits else total
        # best[n]: saved by the blocks so far within n units. More than the limit is of no use.
        now[bound:] = now[min(bound, total)]
        best = now
        chosen.append((layer, bound, front, at))
    kept: dict[int, Kept] = {}
    left = total
    for layer, bound, front, at in reversed(chosen):
        left = min(left, bound)
        size, _, kept[layer] = front[at[left]]
        left -= -(-size * flying[layer] // unit)
    for layers in alike.values():
        _sort(layers, kept)
    return dict(sorted(kept.items()))


_Option: TypeAlias = "tuple[int, float, Kept]"
"""Bytes that a block may keep, the seconds that this saves, and what it keeps."""


def _front(block: Block) -> list[_Option]:
    """Return what is worth keeping, by rising bytes: each saves more than all that need less."""
    options: list[_Option] = [(0, 0.0, frozenset())]
    for call, size in block.sizes.items():
        more = [
            (b + size, s + block.seconds[call], k | {call}) for b, s, k in options if k is not None
        ]
        options = _best([*options, *more])
    return _best([*options, (*block.whole, None)])


def _best(options: list[_Option]) -> list[_Option]:
    front: list[_Option] = []
    for option in sorted(options, key=lambda o: (o[0], -o[1])):
        if not front or option[1] > front[-1][1]:
            front.append(option)
    return front


def _sort(layers: Sequence[int], kept: dict[int, Kept]) -> None:
    """Let the last of equal blocks keep the most, in place: their backward passes come first. The bytes of all are the same."""
    whole = sum(kept[layer] is None for layer in layers)
    counts = Counter(call for layer in layers for call in kept[layer] or ())
    for place, layer in enumerate(reversed(layers)):
        calls = frozenset(call for call, n in counts.items() if place - whole < n)
        kept[layer] = None if place < whole else calls


# ---- the whole job -------------------------------------------------------------------------------


@dataclass
class Choice:
    """Hold what all blocks keep. lines: as activation_checkpoint.op_keep_by_block takes it. simulation: with it."""

    lines: list[str]
    simulation: Simulation

    @property
    def overrides(self) -> list[str]:
        """Return the settings as arguments."""
        lines = ", ".join(f'"{line}"' for line in self.lines)
        return [*_SELECTIVE, f"--activation_checkpoint.op_keep_by_block=[{lines}]"]


_SELECTIVE = [
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
    "--activation_checkpoint.op_keep=[]",
    "--activation_checkpoint.op_keep_modules=[]",
]


def autosac(
    job: Sequence[str],
    *,
    world_size: int,
    profile: Profile,
    host: bool = False,
    processes: int | None = None,
) -> Choice:
    """Choose what each block of a job keeps on some hardware, to use all of its memory and the least time.

    Args:
        job: files and overrides, as on the command line. What it says of activation_checkpoint is replaced.
        world_size: ranks in all.
        profile: the devices; `memory_gib` is what may be used.
        host: let results go to the host's memory.
        processes: how many trace at once. All cores by default.

    Raises ConfigError, HardwareError, TraceError and ReplayError. The simulation says whether the choice fits.
    """
    is_compiled = "model" in (compile := load_from_argv(job).compile).components and compile.enable

    # Without a limit the allocator never has to give memory back, which would be slow.
    roomy = profile.model_copy(update={"memory_gib": 2.0**20})

    def run(lines: Sequence[str], *more: str) -> Simulation:
        text = ", ".join(f'"{line}"' for line in lines)
        config = load_from_argv(
            [*job, *_SELECTIVE, f"--activation_checkpoint.op_keep_by_block=[{text}]", *more]
        )
        check_to_run(config, world_size=world_size)
        return simulate(config, world_size=world_size, profile=roomy, processes=processes)

    base = run(["0:"], *(["--compile.enable=false"] if is_compiled else []))
    cost = Cost(profile)
    blocks = {rank: find_blocks(trace, cost) for rank, trace in base.traces.items()}
    if is_compiled:
        # The compiler fuses everything else, and runs it again at next to no cost.
        for block in (b for of_rank in blocks.values() for b in of_rank.values()):
            block.sizes = {
                c: n for c, n in block.sizes.items() if c.partition("@")[0] in _EXPENSIVE
            }
            block.whole = block.whole[0], sum(block.seconds[call] for call in block.sizes)
    to_host = _host_bytes(base, profile) if host and not is_compiled else 0
    first = run(["0:"]) if is_compiled else base
    limit = int(profile.memory_gib * GIB)

    def left(simulation: Simulation) -> dict[int, int]:
        """Return the bytes that each rank has left, or lacks (below 0)."""
        return {
            rank: limit - report.outside_bytes - report.peak_reserved_bytes
            for rank, report in simulation.memory.items()
        }

    extra = left(first)
    best, best_fits = Choice(["0:"], first), min(extra.values()) >= 0
    for _ in range(_ROUNDS):
        kept: dict[int, Kept] = {}
        traces: dict[int, Trace] = {}
        for rank, trace in base.traces.items():
            of_rank = choose(trace, blocks[rank], extra[rank] + to_host)
            traces[rank] = keep(trace, blocks[rank], of_rank)
            kept |= of_rank
        lines = to_lines(kept, _to_host(kept, blocks, to_host))
        exact = not is_compiled and not any(">host" in line for line in lines)
        now = price(base.config, base.layout, traces, roomy) if exact else run(lines)
        spare = left(now)
        fits = min(spare.values()) >= 0
        if fits and (not best_fits or now.timeline.step_s < best.simulation.timeline.step_s):
            best, best_fits = Choice(lines, now), True
        # Stop when it fits and little is left, or everything is kept.
        little = limit // 500
        if (fits and max(spare.values()) < little) or all(c is None for c in kept.values()):
            break
        # What lacks is given up with some more, so that it does not lack by a little again.
        for rank, number in spare.items():
            extra[rank] += number if number >= 0 else number - little // 2
    # Now on the device as it is.
    last = best.simulation
    best.simulation = price(last.config, last.layout, last.traces, profile)
    return best


def _host_bytes(base: Simulation, profile: Profile) -> int:
    """Return the bytes that a rank can copy to the host while it computes its forward passes."""
    return int(base.timeline.mean_by("by_phase_s")["forward"] * profile.host_gb_per_s * 1e9 * 0.9)


def _to_host(
    kept: Mapping[int, Kept], blocks: Mapping[int, Mapping[int, Block]], num_bytes: int
) -> set[tuple[int, str]]:
    """Choose which of the kept results go to the host: those of the first blocks, which are needed last."""
    chosen: set[tuple[int, str]] = set()
    for of_rank in blocks.values():
        left = num_bytes
        for layer, block in sorted(of_rank.items()):
            for call in sorted(kept.get(layer) or ()):
                size = block.sizes[call] * len(block.runs[call])
                if size <= left:
                    left -= size
                    chosen.add((layer, call))
    return chosen


def to_lines(kept: Mapping[int, Kept], host: Collection[tuple[int, str]] = ()) -> list[str]:
    """Return a choice as lines of op_keep_by_block, one for neighbouring blocks that keep the same."""
    lines: list[tuple[int, int, str]] = []
    for layer, calls in sorted(kept.items()):
        places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for call in calls or ():
            name, _, place = call.partition("@")
            places[name, ">host" if (layer, call) in host else ""].append(int(place))
        entries = [
            f"{n}@{','.join(map(str, sorted(p)))}{to}" for (n, to), p in sorted(places.items())
        ]
        text = "all" if calls is None else " ".join(entries)
        if lines and lines[-1][1:] == (layer - 1, text):
            lines[-1] = (lines[-1][0], layer, text)
        else:
            lines.append((layer, layer, text))
    return [f"{first}-{last}: {text}".rstrip() for first, last, text in lines]


# ---- what the user sees --------------------------------------------------------------------------


def _others(is_compiled: bool) -> dict[str, list[str]]:
    """Return what else a job may do, as arguments."""
    key = "--activation_checkpoint"
    plain = [f"{key}.op_keep_by_block=[]"]
    modes = {
        "full": [*plain, f"{key}.mode=full", f"{key}.op_keep_modules=[]"],
        "op": [*plain, f"{key}.mode=selective", f"{key}.selective_ac_option=op"],
        "every 2nd block": [
            *plain,
            f"{key}.mode=selective",
            f"{key}.selective_ac_option=2",
            f"{key}.op_keep_modules=[]",
        ],
        "none": [*plain, f"{key}.mode=none", f"{key}.op_keep_modules=[]"],
    }
    if is_compiled:
        for share in (0.25, 0.5, 0.75):
            modes[f"memory_budget {share:g}"] = [
                *plain,
                f"{key}.mode=memory_budget",
                f"{key}.memory_budget={share}",
                f"{key}.op_keep_modules=[]",
            ]
    return modes


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 1 if the job does not fit whatever is recomputed."""
    parser = argparse.ArgumentParser(
        prog="titan autosac",
        usage="titan autosac JOB.toml [OVERLAY.toml ...] [--section.key=value ...] --world-size N --hardware H "
        "[--memory GIB] [--host] [--output FILE] [--json FILE]",
        description="Choose what each block keeps for its backward pass and what it computes again, so that the job fits and "
        "takes the least time, by simulation. Prints, or writes, a TOML overlay.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks in all")
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="H",
        help=f"{', '.join(profile_names())}, or a profile's TOML file",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="of a device, to be used; default: all that it has",
    )
    parser.add_argument(
        "--host", action="store_true", help="results may go to the host's memory, too"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the overlay; default: print it"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="the choice and what it is compared with, as data; - for stdout",
    )
    parser.add_argument("--processes", type=int, metavar="P", help="at once; default: all cores")
    options, job = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    require_positive(options, "world_size", "processes")
    require_folders(options, "json", "output")
    profile = load_profile(options.hardware)
    if options.memory is not None:
        if not 0 < options.memory <= profile.memory_gib:
            raise mistake(
                "--memory",
                f"expected more than 0 and at most {profile.memory_gib:g} GiB, which {profile.name} has",
            )
        profile = profile.model_copy(update={"memory_gib": options.memory})
    known = [
        "--world-size",
        "--hardware",
        "--memory",
        "--host",
        "--output",
        "--json",
        "--processes",
    ]
    config = load_from_argv(job, options=known)
    resolve_layout(config, options.world_size)
    is_compiled = config.compile.enable and "model" in config.compile.components
    say("choosing")
    choice = autosac(
        job,
        world_size=options.world_size,
        profile=profile,
        host=options.host,
        processes=options.processes,
    )
    results = {"autosac": choice.simulation}
    for name, arguments in _others(is_compiled).items():
        say(f"comparing with {name}")
        other = load_from_argv([*job, *arguments])
        results[name] = simulate(
            other, world_size=options.world_size, profile=profile, processes=options.processes
        )
    say("")
    text = overlay(choice, command=f"titan train {' '.join(job)} autosac.toml")
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    data = {
        "op_keep_by_block": choice.lines,
        "results": {name: facts(one) for name, one in results.items()},
    }
    if not put_json(data, options.json):
        print(table(results))
        print(
            f"wrote {options.output}" if options.output else f"\n{text}",
            end="\n" if options.output else "",
        )
    return 0 if choice.simulation.fits else 1


def table(results: Mapping[str, Simulation]) -> str:
    """Return the time, speed and memory of each way to recompute, the fastest that fits first."""
    rows = [["recomputation", "step", "tokens/s/GPU", "over full", "GiB", ""]]
    full = results["full"].timeline.step_s
    for name, one in sorted(results.items(), key=lambda p: (not p[1].fits, p[1].timeline.step_s)):
        gib = (one.fullest.peak_reserved_bytes + one.fullest.outside_bytes) / GIB
        fits = "" if one.fits else "does not fit"
        step = one.timeline.step_s
        rows.append(
            [
                name,
                duration(step),
                f"{one.tokens_per_s_per_gpu:,.0f}",
                f"{full / step - 1:+.1%}",
                f"{gib:.1f}",
                fits,
            ]
        )
    return "\n".join(columns(rows, left=(0, 5)))


def overlay(choice: Choice, *, command: str) -> str:
    """Return the choice as a TOML overlay."""
    lines = [
        f"# {command}",
        "[activation_checkpoint]",
        'mode = "selective"',
        'selective_ac_option = "op"',
        "op_keep = []",
        "op_keep_modules = []",
        "op_keep_by_block = [",
    ]
    return "\n".join([*lines, *(f'    "{line}",' for line in choice.lines), "]"]) + "\n"
