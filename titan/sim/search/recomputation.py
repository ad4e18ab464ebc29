"""Choice of the results that each block of a rank saves for its backward pass, from a trace in which it saves none.

The trace has, for each operation of each block, the seconds of its recomputation and the bytes of
its results. A block that runs eagerly repeats every operation whose result is not saved, so both
add up, and the best choice is that of a knapsack (knapsack.py):

    maximize    seconds of recomputation saved, over blocks and operations
    subject to  bytes kept while the blocks up to one wait for their backward pass <= bytes free at that time

A block may also save everything, which needs fewer bytes than the results of all its operations.
`keep` makes the trace of a choice: it moves allocations and leaves out operations that are not
recomputed. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, TypeAlias

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

from .knapsack import Kept, Option, fill

Choices: TypeAlias = "dict[int, Kept]"
"""Kept results, by number of the block."""
EXPENSIVE = [name for group in ("matmul", "attention", "network") for name in GROUPS[group]]
_POINTWISE = ["aten._fused_rms_norm", "aten.silu", "aten.mul"]
"""Other results that may be kept: no model writes into them."""
_MOST_SAMPLES = 14


@dataclass
class _Run:
    """One run of an operation in a block.

    Attributes:
        events: numbers of its events.
        until: number of the next event that does not belong to it.
    """

    events: list[int] = field(default_factory=list)
    until: int = 0


@dataclass
class Pair:
    """An operation's run in the forward pass, and its repetition.

    Attributes:
        first: the forward run.
        again: the repetition.
        results: blocks of memory with a result of the forward run, and with that of the repetition.
    """

    first: _Run
    again: _Run
    results: list[tuple[int, int]]


@dataclass
class Block:
    """Operations of a block that are recomputed.

    Attributes:
        runs: runs of each call, for each microbatch.
        sizes: bytes of the results of each call that may be kept, for one microbatch.
        seconds: recomputation of each call, in a step.
        whole: bytes and seconds of keeping everything.
        measured: bytes and seconds of the choices that a compiled block has.
    """

    runs: dict[str, list[Pair]]
    sizes: dict[str, int]
    seconds: dict[str, float]
    whole: tuple[int, float]
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
    runs = defaultdict[tuple[int, str, str], list[_Run]](list)
    run, last = _Run(), None
    for index, event in enumerate(trace.step):
        scope = scope_of(event)
        if scope is None:
            continue
        if scope is not last:
            run.until, run, last = index, _Run(), scope
            layer = block_of(scope)
            if scope.call and layer is not None:
                runs[layer, scope.call, scope.phase].append(run)
        run.events.append(index)
    freed = _frees(trace)
    pairs = defaultdict[int, dict[str, list[Pair]]](dict)
    for (layer, call, phase), repeated in runs.items():
        forward = runs.get((layer, call, "forward"), [])
        if phase == "recompute" and len(forward) == len(repeated):
            both = zip(forward, repeated, strict=True)
            pairs[layer][call] = [_pair(first, again, trace, freed) for first, again in both]
    sizes = {e.block: e.size_bytes for e in trace.step if isinstance(e, Allocate)}
    return {n: _block(calls, trace, cost, freed, sizes) for n, calls in pairs.items()}


def _frees(trace: Trace) -> dict[int, int]:
    """Return the number of the event that frees each block of memory."""
    return {event.block: n for n, event in enumerate(trace.step) if isinstance(event, Free)}


def _pair(first: _Run, again: _Run, trace: Trace, freed: Mapping[int, int]) -> Pair:
    """Return an operation with its results.

    They come with its last step. Earlier results, such as tensors that DTensor gathers for it,
    count if they outlive the repetition.
    """
    work = Launch | Transfer | AwaitWork
    steps = [n for n in range(first.events[0], first.until) if isinstance(trace.step[n], work)]
    before = steps[-2] if len(steps) > 1 else -1
    made, remade = (
        [(n, e.block) for n in reversed(run.events) if isinstance(e := trace.step[n], Allocate)]
        for run in (first, again)
    )
    # Paired from the end, since only one of them may have had to wait and copy.
    results = [
        (result, repeated)
        for (number, result), (_, repeated) in zip(made, remade, strict=False)
        if number > before or freed.get(repeated, again.until) >= again.until
    ]
    return Pair(first, again, results)


def _block(
    runs: dict[str, list[Pair]],
    trace: Trace,
    cost: Cost,
    freed: Mapping[int, int],
    allocated: Mapping[int, int],
) -> Block:
    """Return a block with its bytes and seconds, from the bytes that each block of memory has."""
    results = {call: [again for _, again in pairs[0].results] for call, pairs in runs.items()}
    sizes = {
        call: sum(allocated[number] for number in numbers)
        for call, numbers in results.items()
        if call.partition("@")[0] in EXPENSIVE + _POINTWISE
    }
    seconds = {
        call: sum(_seconds(trace.step[n], trace, cost) for p in pairs for n in p.again.events)
        for call, pairs in runs.items()
    }
    # A block that keeps everything holds the memory that the recomputation leaves when it ends.
    end = max(pairs[0].again.until for pairs in runs.values())
    held = sum(
        allocated[number]
        for numbers in results.values()
        for number in numbers
        if freed.get(number, end) >= end
    )
    return Block(runs, sizes, seconds, (held, sum(seconds.values())))


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
    freed = _frees(trace)
    dropped: set[int] = set()
    works: set[int] = set()
    # By block that the recomputation would allocate: the block kept in its place.
    ends: dict[int, int] = {}
    for layer, calls in kept.items():
        runs = blocks[layer].runs
        chosen = [runs[call] for call in runs if calls is None or call in calls]
        for microbatch in zip(*chosen, strict=True):
            end = max(pair.again.until for pair in microbatch)
            for pair in microbatch:
                dropped.update(pair.again.events)
                events = [trace.step[number] for number in pair.again.events]
                works |= {event.work for event in events if isinstance(event, Transfer)}
                made = {event.block for event in events if isinstance(event, Allocate)}
                for first, second in pair.results:
                    # Keeping everything means keeping the results that are needed after the
                    # recomputation.
                    if calls is not None or freed.get(second, end) >= end:
                        dropped.add(freed[first])
                        ends[second] = first
                dropped.update(freed[block] for block in made - ends.keys())
    saved = {*ends.values()}
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
        trace: trace of the rank, keeping nothing.
        blocks: its blocks.
        extra: bytes that may be in use beyond the trace's own peak.
    """
    if not blocks:
        return {}
    used = _most_used(trace, blocks)
    limit, order = max(used.values()) + extra, sorted(blocks)
    spare = {state: limit - size for state, size in used.items() if any(state)}
    # Passes in flight are counted when they are the most.
    fullest = max(spare, key=sum)
    # Without a pipeline the first blocks are in flight and the others are not.
    first = {layer: fullest[:n] + (0,) * len(fullest[n:]) for n, layer in enumerate(order, 1)}
    limits = {layer: spare[state] for layer, state in first.items() if state in spare}
    while True:
        kept = solve(blocks, dict(zip(order, fullest, strict=True)), limits)
        sizes = [blocks[layer].cost(kept[layer])[0] for layer in order]
        lacking = max(
            sum(n * size for n, size in zip(state, sizes, strict=True)) - most
            for state, most in spare.items()
        )
        if lacking <= 0 or not any(sizes):
            return kept
        limits = {layer: most - lacking for layer, most in limits.items()}


def _most_used(trace: Trace, blocks: Blocks) -> dict[tuple[int, ...], int]:
    """Return the most bytes in use in each state: the number of passes of each block, in order, that await their backward pass."""
    changes = defaultdict[int, list[tuple[int, int]]](list)
    for layer, block in blocks.items():
        for microbatch in zip(*block.runs.values(), strict=True):
            changes[min(pair.first.events[0] for pair in microbatch)].append((layer, 1))
            # From here on the recomputation makes the other results.
            changes[min(pair.again.events[0] for pair in microbatch)].append((layer, -1))
    alive: dict[int, int] = {}
    used, in_flight = 0, dict.fromkeys(sorted(blocks), 0)
    most: dict[tuple[int, ...], int] = {}
    before = [*trace.setup, *trace.first_step]
    for number, event in enumerate([*before, *trace.step], -len(before)):
        for layer, change in changes.get(number, ()):
            in_flight[layer] += change
        if isinstance(event, Allocate):
            used += alive.setdefault(event.block, event.size_bytes)
        elif isinstance(event, Free):
            used -= alive.pop(event.block, 0)
        state = tuple(in_flight.values())
        most[state] = max(most.get(state, 0), used)
    return most


def solve(blocks: Blocks, in_flight: Mapping[int, int], limits: Mapping[int, int]) -> Choices:
    """Return the choice that saves the most seconds.

    Args:
        blocks: blocks of a rank.
        in_flight: passes of each block that are in flight at the same time.
        limits: bytes that all blocks up to a block may keep in these passes, by the block's number.
            At least for the last block.
    """
    groups: dict[int, list[Option]] = {}
    alike = _alike(blocks, in_flight)
    for layers in alike:
        passes, front = in_flight[layers[0]], _front(blocks[layers[0]])
        options = [(size * passes, seconds, kept) for size, seconds, kept in front]
        groups |= dict.fromkeys(layers, options)
    order = sorted(blocks)
    chosen = fill([groups[layer] for layer in order], [*map(limits.get, order)])
    kept = dict(zip(order, chosen, strict=True))
    # The last of equal blocks keep the most: their backward passes come first. The bytes of all are
    # the same.
    for layers in alike:
        by_size = sorted((kept[layer] for layer in layers), key=blocks[layers[0]].cost)
        kept |= zip(layers, by_size, strict=True)
    return kept


def _alike(blocks: Blocks, in_flight: Mapping[int, int] | None = None) -> list[list[int]]:
    """Return the numbers of equal blocks, with equally many passes in flight."""
    alike = defaultdict[Any, list[int]](list)
    for layer, block in sorted(blocks.items()):
        alike[block.kind, in_flight and in_flight[layer]].append(layer)
    return [*alike.values()]


def _front(block: Block) -> list[Option]:
    """Return the options worth keeping, by rising bytes: each saves more than all options that need less."""
    if block.measured:
        return _best([(*cost, kept) for kept, cost in block.measured.items()])
    options: list[Option] = [(0, 0.0, frozenset())]
    for call, size in block.sizes.items():
        seconds = block.seconds[call]
        more = [(b + size, s + seconds, (k or frozenset()) | {call}) for b, s, k in options]
        options = _best([*options, *more])
    return _best([*options, (*block.whole, None)])


def _best(options: list[Option]) -> list[Option]:
    """Return the options that save more than all options with fewer bytes."""
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o[0], -o[1])):
        if not front or option[1] > front[-1][1]:
            front.append(option)
    return front


# ---- compiled blocks -----------------------------------------------------------------------------


def samples(blocks: Blocks) -> Choices:
    """Return a choice to be measured for each block: equal blocks take turns, from nothing to everything.

    The saved results of a compiled block change its fusions, so that bytes and seconds of
    operations do not add up. Equal blocks have equal costs, so one job whose blocks all keep
    different results measures many choices. The first and the last of equal blocks measure nothing,
    since their neighbours differ.
    """
    chosen: Choices = dict.fromkeys(blocks, frozenset())
    for inner in _inner_blocks(blocks):
        # The compiler fuses everything else, and runs it again at next to no cost.
        block = blocks[inner[0]]
        expensive = {c: n for c, n in block.sizes.items() if c.partition("@")[0] in EXPENSIVE}
        front = [
            kept for *_, kept in _front(replace(block, sizes=expensive)) if kept is not None
        ]
        steps = min(_MOST_SAMPLES, len(inner), len(front) + 1) - 2
        later = [front[n * (len(front) - 1) // steps] for n in range(1, steps + 1)]
        chosen |= zip(inner, cycle([None, front[0], *later]))
    return chosen


def measure(
    blocks: Blocks, traces: Iterable[Trace], chosen: Mapping[int, Kept], cost: Cost
) -> None:
    """Set the costs of the measured choices in each block.

    Args:
        blocks: blocks of all ranks.
        traces: traces of a compiled job with the choices of `samples`.
        chosen: these choices.
        cost: prices of kernels and transfers.
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
    for inner in _inner_blocks(blocks):
        base = next(layer for layer in inner if chosen[layer] == frozenset())
        measured = {
            chosen[n]: (max(0, num_bytes[n] - num_bytes[base]), seconds[base] - seconds[n])
            for n in inner
        }
        kind = blocks[base].kind
        for block in blocks.values():
            if block.kind == kind:
                block.measured = measured


def _inner_blocks(blocks: Blocks) -> list[list[int]]:
    """Return the numbers of equal blocks, without the first and the last one."""
    return [layers[1:-1] for layers in _alike(blocks) if len(layers) > 3]
