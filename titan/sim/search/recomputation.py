"""Choice of the results that each block of a rank saves for its backward pass, from a trace in which it saves none.

The trace has, for each operation of each block, the seconds of its recomputation and the bytes of
its results. A block that runs eagerly repeats every operation whose result is not saved, so both
add up, and the best choice is that of a knapsack:

    maximize    seconds of recomputation saved, over blocks and operations
    subject to  bytes kept while the blocks up to one wait for their backward pass <= bytes free at that time

A block may also save everything, which needs fewer bytes than the results of all its operations.
Dynamic programming over the blocks solves it, exactly up to the rounding of each block's bytes to
1/16384 of the memory. `keep` makes the trace of a choice: it moves allocations and leaves out
operations that are not recomputed. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from titan.parallel.sac_save_list import GROUPS
from titan.sim.price.cost import Cost
from titan.sim.record.segments import block_of
from titan.sim.record.trace import (
    Allocate,
    AwaitWork,
    Event,
    Free,
    Launch,
    Trace,
    Transfer,
    scope_of,
)

Kept: TypeAlias = "frozenset[str] | None"
"""Results that a block keeps: calls such as "aten.mm@2", or None for everything."""
Choices: TypeAlias = "dict[int, Kept]"
"""Kept results, by number of the block."""
_UNITS = 16384
EXPENSIVE = [name for group in ("matmul", "attention", "network") for name in GROUPS[group]]
_POINTWISE = ("aten._fused_rms_norm", "aten.silu", "aten.mul")
"""Other results that may be kept: no model writes into them."""


@dataclass
class _CallRun:
    """One run of an operation in a block.

    Attributes:
        events: Numbers of its events.
        until: Number of the next event that does not belong to it.
        results: Blocks of memory that hold its results.
    """

    events: list[int] = field(default_factory=list)
    until: int = 0
    results: list[int] = field(default_factory=list)


@dataclass
class Block:
    """Operations of a block that are recomputed.

    Attributes:
        runs: Forward run and repetition of each call, for each microbatch.
        sizes: Bytes of the results of each call that may be kept, for one microbatch.
        seconds: Recomputation of each call, in a step.
        whole: Bytes and seconds of keeping everything.
        measured: Bytes and seconds of the choices that a compiled block has.
    """

    runs: dict[str, list[tuple[_CallRun, _CallRun]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    whole: tuple[int, float] = (0, 0.0)
    measured: dict[Kept, tuple[int, float]] = field(default_factory=dict)

    @property
    def kind(self) -> Any:
        """Properties that equal blocks have in common."""
        return (*self.sizes.items(), *self.seconds.items(), self.whole)

    def cost(self, kept: Kept) -> tuple[int, float]:
        """Return the bytes held and the seconds saved."""
        if self.measured:
            return self.measured[kept]
        if kept is None:
            return self.whole
        return sum(self.sizes[c] for c in kept), sum(self.seconds[c] for c in kept)


Blocks = Mapping[int, Block]
"""Blocks of a rank, or of all ranks, by number."""


def find_blocks(trace: Trace, cost: Cost) -> dict[int, Block]:
    """Return the blocks of a rank that recompute operation by operation, by number."""
    step = trace.step
    runs = defaultdict[tuple[int, str, bool], list[_CallRun]](list)
    run, last = _CallRun(), None
    freed: dict[int, int] = {}
    for index, event in enumerate(step):
        if isinstance(event, Free):
            freed[event.block] = index
        scope = scope_of(event)
        if scope is None:
            continue
        if scope is not last:
            run.until, run, last = index, _CallRun(), scope
            layer = block_of(scope)
            if scope.call and layer is not None and scope.phase in ("forward", "recompute"):
                runs[layer, scope.call, scope.phase == "recompute"].append(run)
        run.events.append(index)
    blocks: dict[int, Block] = {}
    for (layer, call, repeats), repeated in runs.items():
        forward = runs.get((layer, call, False), [])
        if repeats and len(forward) == len(repeated):
            blocks.setdefault(layer, Block()).runs[call] = list(
                zip(forward, repeated, strict=True)
            )
            for first, again in blocks[layer].runs[call]:
                _pair(first, again, step, freed)
    for block in blocks.values():
        _measure(block, trace, cost, freed)
    return blocks


def _pair(
    first: _CallRun, again: _CallRun, step: Sequence[Event], freed: Mapping[int, int]
) -> None:
    """Find the results of an operation and of its repetition.

    They come with its last step. Earlier results, such as tensors that DTensor gathers for it,
    count if they outlive the repetition.
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
    """Set the bytes and seconds of a block."""
    step = trace.step
    sizes: dict[int, int] = {}
    for call, runs in block.runs.items():
        sizes |= {
            e.block: e.size_bytes
            for n in runs[0][1].events
            if isinstance(e := step[n], Allocate)
        }
        if call.partition("@")[0] in (*EXPENSIVE, *_POINTWISE):
            block.sizes[call] = sum(sizes[number] for number in runs[0][1].results)
        repeated = (step[index] for _, again in runs for index in again.events)
        block.seconds[call] = sum(_seconds(event, trace, cost) for event in repeated)
    # A block that keeps everything holds the memory that the recomputation leaves when it ends.
    first = [runs[0][1] for runs in block.runs.values()]
    end = max(run.until for run in first)
    left = (n for run in first for n in run.results if freed.get(n, end) >= end)
    block.whole = sum(sizes[n] for n in left), sum(block.seconds.values())


def _seconds(event: Event, trace: Trace, cost: Cost) -> float:
    """Return the seconds of an event."""
    if isinstance(event, Launch):
        return cost.kernel_s(event.kernel)
    if isinstance(event, Transfer):
        return cost.transfer(event, trace.groups[event.group], rank=trace.rank).seconds
    return 0.0


# ---- the trace of a choice -----------------------------------------------------------------------


def keep(trace: Trace, blocks: Blocks, kept: Mapping[int, Kept]) -> Trace:
    """Return the trace of a rank whose blocks keep these results, from a trace in which they keep nothing."""
    freed = {e.block: n for n, e in enumerate(trace.step) if isinstance(e, Free)}
    dropped: set[int] = set()
    works: set[int] = set()
    # By block that the recomputation would allocate: the block kept in its place.
    ends: dict[int, int] = {}
    for layer, calls in kept.items():
        block = blocks[layer]
        for microbatch in range(max((len(runs) for runs in block.runs.values()), default=0)):
            pairs = [
                r[microbatch] for c, r in block.runs.items() if calls is None or c in calls
            ]
            end = max((again.until for _, again in pairs), default=0)
            for forward, again in pairs:
                dropped.update(again.events)
                events = [trace.step[number] for number in again.events]
                works |= {event.work for event in events if isinstance(event, Transfer)}
                made = {event.block for event in events if isinstance(event, Allocate)}
                for first, second in zip(forward.results, again.results, strict=True):
                    # Keeping everything means keeping the results that are needed after the recomputation.
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


def choose(trace: Trace, blocks: Blocks, extra: int) -> Choices:
    """Return the results that each block of a rank keeps.

    Args:
        trace: Trace of the rank, keeping nothing.
        blocks: Its blocks.
        extra: Bytes that may be in use beyond the trace's own peak.
    """
    moments, peak = _moments(trace, blocks)
    limit = peak + extra
    # Passes in flight are counted when they are the most.
    fullest = max(
        (m[0] for m in moments), key=lambda in_flight: sum(in_flight.values()), default={}
    )
    order = sorted(blocks)
    limits: dict[int, int] = {}
    for in_flight, used in moments:
        for n, layer in enumerate(order):
            # Without a pipeline the first blocks are in flight and the others are not.
            if in_flight == {one: fullest[one] * (one in order[: n + 1]) for one in blocks}:
                limits[layer] = limit - used
    over = 0
    while True:
        kept = solve(blocks, fullest, {layer: most - over for layer, most in limits.items()})
        sizes = {layer: blocks[layer].cost(calls)[0] for layer, calls in kept.items()}
        lacking = max(
            (
                sum(n * sizes[layer] for layer, n in in_flight.items()) - (limit - used)
                for in_flight, used in moments
            ),
            default=0,
        )
        if lacking <= 0 or not any(sizes.values()):
            return kept
        over += lacking


def _moments(trace: Trace, blocks: Blocks) -> tuple[list[tuple[dict[int, int], int]], int]:
    """Return the states of a step, and the most bytes at any time.

    A state is the number of passes of each block that await their backward pass, with the most
    bytes in use during the state.
    """
    changes = defaultdict[int, list[tuple[int, int]]](list)
    for layer, block in blocks.items():
        for runs in zip(*block.runs.values(), strict=True):
            changes[min(run.events[0] for run, _ in runs)].append((layer, 1))
            # From here on the recomputation makes the other results.
            changes[min(run.events[0] for _, run in runs)].append((layer, -1))
    alive: dict[int, int] = {}
    used, in_flight = 0, dict.fromkeys(blocks, 0)
    most: dict[tuple[int, ...], int] = {}
    for number, event in enumerate([*trace.setup, *trace.first_step, *trace.step]):
        for layer, change in changes.get(number - len(trace.setup) - len(trace.first_step), ()):
            in_flight[layer] += change
        if isinstance(event, Allocate):
            used += alive.setdefault(event.block, event.size_bytes)
        elif isinstance(event, Free):
            used -= alive.pop(event.block, 0)
        key = tuple(in_flight.values())
        most[key] = max(most.get(key, 0), used)
    moments = [
        (dict(zip(blocks, key, strict=True)), used) for key, used in most.items() if any(key)
    ]
    return moments, max(most.values())


def solve(blocks: Blocks, in_flight: Mapping[int, int], limits: Mapping[int, int]) -> Choices:
    """Return the choice that saves the most seconds.

    Args:
        blocks: Blocks of a rank.
        in_flight: Passes of each block that are in flight at the same time.
        limits: Bytes that all blocks up to a block may keep in these passes, by the block's number.
            At least for the last block.
    """
    if not blocks:
        return {}
    most = max(0, max(limits.values(), default=0))
    total, unit = _UNITS, max(1, -(-most // _UNITS))
    best, bound = np.zeros(total + 1), total
    chosen: list[tuple[int, int, list[_Option], np.ndarray]] = []
    fronts: dict[Any, list[_Option]] = {}
    alike = defaultdict[Any, list[int]](list)
    for layer in sorted(blocks):
        block, count = blocks[layer], in_flight[layer]
        key = (block.kind, count)
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
    kept: Choices = {}
    left = total
    for layer, bound, front, at in reversed(chosen):
        left = min(left, bound)
        size, _, kept[layer] = front[at[left]]
        left -= -(-size * in_flight[layer] // unit)
    # The last of equal blocks keep the most: their backward passes come first. The bytes of all are the same.
    for layers in alike.values():
        by_size = sorted((kept[layer] for layer in layers), key=blocks[layers[0]].cost)
        kept |= zip(layers, by_size, strict=True)
    return dict(sorted(kept.items()))


_Option: TypeAlias = "tuple[int, float, Kept]"
"""Bytes that a block may keep, the seconds that this saves, and the kept results."""


def _front(block: Block) -> list[_Option]:
    """Return the options worth keeping, by rising bytes: each saves more than all options that need less."""
    if block.measured:
        return _best([(*cost, kept) for kept, cost in block.measured.items()])
    options: list[_Option] = [(0, 0.0, frozenset())]
    for call, size in block.sizes.items():
        more = [
            (b + size, s + block.seconds[call], k | {call})
            for b, s, k in options
            if k is not None
        ]
        options = _best([*options, *more])
    return _best([*options, (*block.whole, None)])


def _best(options: list[_Option]) -> list[_Option]:
    """Return the options that save more than all options with fewer bytes."""
    front: list[_Option] = []
    for option in sorted(options, key=lambda o: (o[0], -o[1])):
        if not front or option[1] > front[-1][1]:
            front.append(option)
    return front


# ---- compiled blocks -----------------------------------------------------------------------------


def samples(blocks: Blocks, most: int = 14) -> Choices:
    """Return a choice to be measured for each block: equal blocks take turns, from nothing to everything.

    The saved results of a compiled block change its fusions, so that bytes and seconds of
    operations do not add up. Equal blocks have equal costs, so one job whose blocks all keep
    different results measures many choices. The first and the last of equal blocks measure nothing,
    since their neighbours differ.
    """
    chosen: Choices = dict.fromkeys(blocks, frozenset())
    for inner in _kinds(blocks):
        # The compiler fuses everything else, and runs it again at next to no cost.
        block = blocks[inner[0]]
        expensive = {c: n for c, n in block.sizes.items() if c.partition("@")[0] in EXPENSIVE}
        front = [
            kept for *_, kept in _front(replace(block, sizes=expensive)) if kept is not None
        ]
        steps = min(most, len(inner), len(front) + 1) - 2
        later = [front[n * (len(front) - 1) // steps] for n in range(1, steps + 1)]
        ladder = [None, front[0], *later]
        chosen |= {layer: ladder[n % len(ladder)] for n, layer in enumerate(inner)}
    return chosen


def measure(
    blocks: Blocks, traces: Iterable[Trace], chosen: Mapping[int, Kept], cost: Cost
) -> None:
    """Set the costs of the measured choices in each block.

    Args:
        blocks: Blocks of all ranks.
        traces: Traces of a compiled job with the choices of `samples`.
        chosen: These choices.
        cost: Prices of kernels and transfers.
    """
    num_bytes, seconds = Counter[int](), defaultdict[int, float](float)
    for trace in traces:
        made: dict[int, tuple[int, int]] = {}
        phase = "forward"
        for event in trace.step:
            if isinstance(event, Free) and phase != "forward" and event.block in made:
                layer, size = made[event.block]
                num_bytes[layer] += size // max(map(len, blocks[layer].runs.values()))
            scope = scope_of(event)
            if scope is None:
                continue
            phase = scope.phase
            if (layer := block_of(scope)) is None:
                continue
            seconds[layer] += _seconds(event, trace, cost)
            if isinstance(event, Allocate) and phase == "forward":
                made[event.block] = layer, event.size_bytes
    for inner in _kinds(blocks):
        base = next(layer for layer in inner if chosen[layer] == frozenset())
        measured = {
            chosen[n]: (max(0, num_bytes[n] - num_bytes[base]), seconds[base] - seconds[n])
            for n in inner
        }
        kind = blocks[base].kind
        for block in blocks.values():
            if block.kind == kind:
                block.measured = measured


def _kinds(blocks: Blocks) -> list[list[int]]:
    """Return the numbers of equal blocks, without the first and the last one."""
    alike = defaultdict[Any, list[int]](list)
    for layer, block in sorted(blocks.items()):
        alike[block.kind].append(layer)
    return [layers[1:-1] for layers in alike.values() if len(layers) > 3]
