"""The account of lost time (`titan profile RUN --account`): what a step's time was lost to, and the change that brings it back.

Each instant of the traced steps belongs to one time range (trace.py), and each range to one cause, so nothing counts twice. If several
causes apply, the first in CHANGES is taken: a compilation in a hook is a compilation. An example, of one thread, in ms:

    hook      [0 .. 30]                                        compile [5 .. 25], the rest of the hook: 10
    norm      [30 .. 50]: var_mean 4, subtract 4, rsqrt 4, multiply 8  one kernel would take 8: 12 lost
    products  [50 .. 90]: 30 in fp32, 10 in bf16 at 3 times the rate   20 lost of the 30
    waits     [90 .. 100] within .item()                       10

    compilation 20 + hook 10 + norm 12 + fp32 20 + wait 10 = 72 lost; the reference is 28 = 100 - 72

The reference is what the trace shows itself: the longest operator of a norm, once, the rate of bf16, the rank that waits least. With --hardware it
is the simulated step, and transfers and idle time are lost as far as they exceed the simulated ones. On a CPU, where the host is the
device, its own time is lost only if more micro-batches than one repeat it, or for 10 ms and more without an operator. The profiler's own
time is taken out for each event. What is left of the difference to a simulated step is one line: not attributed.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean, median
from timeit import repeat
from typing import Any

from titan.base.rows import Row
from titan.config.toml import table_beside
from titan.observe.step_parts import COMMUNICATION, HOST, MODULE

from .trace import BACKWARD, Record, TimeRange, TracedSteps
from .trace_kinds import (
    CHECKPOINT,
    COLLECTION,
    HAND_NORM,
    HOOK,
    LOADER,
    LOG,
    MATH,
    SYNC,
)

UNPINNED, RANK, BATCH, FP32, PYTHON = "unpinned", "rank", "batch", "fp32", "python"
CHANGES = table_beside(__file__, "account.toml")
_SHORT = 100_000  # ns
_GAP = (
    10_000_000  # ns without an operator: more than Python needs, and than a busy machine takes
)
_EVENT_MS = 0.005  # that an event takes the profiler, at most
Times: Any = Counter  # of milliseconds by name; its stub knows whole numbers only
_SMALL = 10_000  # ns: work that is so short takes about as long for a larger batch
_LEAST = 0.03  # share of a step
_SHORT_HOOK_MS = 0.1  # what Python needs to call a hook
# Rates of a GPU for products of fp32 relative to bf16, from A100 to B200: of its tensor cores, and of the others.
_TF32, _FP32 = 0.5, 0.065


def account(
    timelines: dict[str, TracedSteps],
    rows: Sequence[Row],
    *,
    tokens: float,
    simulated: Any,
    job: Record,
) -> Record:
    """Return the account of a rank.

    Args:
        timelines: traces of the steps by rank, this rank's first.
        rows: rows of metrics after the first, if there are some.
        tokens: tokens of a step, if there are no rows; 0: unknown.
        simulated: facts of `titan sim`, or None.
        job: tables of the job, as far as they are known.

    Returns:
        Milliseconds of the step, of its reference, of each cause by place, the largest first, and of the rest. They add up.
    """
    (name, timeline), *_ = timelines.items()
    job = defaultdict(dict, job)
    # Steps of metrics.jsonl leave out pauses.
    ns = sum(e.end - e.begin for e in timeline.exclusive if CHECKPOINT not in e.event.within)
    per_event, later = 0.0, rows[len(rows) // 2 :]

    def mean(column: str) -> float:
        # Without the last row: a run saves at its end, whatever its interval.
        return 1e3 * fmean(row.get(column, 0.0) for row in later[:-1] or later)

    if later:
        slower = ns / timeline.num_steps / 1e6 - 1e3 * median(row["step_s"] for row in later)
        tokens = median(row["step_s"] * row["tokens_per_s"] for row in later)
        per_event = min(max(slower * timeline.num_steps / len(timeline.events), 0), _EVENT_MS)
    lost = _lost(timeline, per_event, job)
    reference = lost.pop("").total()
    if later:  # rows tell of the steps without a trace, too
        every = rows[-1]["step"] / len(rows)
        lost[CHECKPOINT] = Times(
            {name: mean(f"{name}_s") / every for name in ("checkpoint", "validation")}
        )
        lost[LOADER] = Times(metrics=mean("data_wait_s"))
        _reduce(lost[LOG], lost[LOG].total() * max(1 - timeline.num_steps / every, 0))
    # The trainer collects every gc_freq steps, and this may be one of them.
    due = timeline.num_steps / job["training"].get("gc_freq", 1)
    found = [e for e in timeline.events if e.name == COLLECTION and not e.module]
    if len(found) <= math.ceil(due):
        lost[COLLECTION][COLLECTION] *= due / max(len(found), 1)
    # Of the traced steps: on a machine with other work, those without a trace differ.
    step = reference + sum(places.total() for places in lost.values())
    exposed_ms = {rank: each.exposed_ms for rank, each in timelines.items()}
    slowest = min(exposed_ms, key=lambda rank: sum(exposed_ms[rank]))
    late_ms = median(map(operator.sub, exposed_ms[name], exposed_ms[slowest]))
    # A rank is slow if others wait in most steps for longer than it waits itself in any, or by its own times: less may be chance.
    named = [f"rank-{row.get('slowest_rank')}" for row in later].count(slowest)
    if late_ms > max(exposed_ms[slowest]) or named > 0.75 * len(later):
        lost[RANK][slowest] = late_ms
    _reduce(lost[COMMUNICATION], lost[RANK].total())
    if simulated:
        reference = 1e3 * simulated["step_time_s"]
        _reduce(lost[COMMUNICATION], 1e3 * simulated["comm"]["exposed_s"])
        _reduce(lost[HOST], 1e3 * simulated["time"]["host_s"])
    causes = sorted(lost.items(), key=lambda item: -item[1].total())
    return {
        "note": timeline.note,
        "step_ms": step,
        "reference_ms": reference,
        "tokens": tokens,
        "lost_ms": {cause: dict(places.most_common()) for cause, places in causes},
        "unattributed_ms": step - reference - sum(places.total() for _, places in causes),
    }


def page(facts: Record) -> Iterator[str]:
    """Return the lines of an account for people."""
    step_ms, lost_ms = facts["step_ms"], facts["lost_ms"]
    sums = {cause: sum(places.values()) for cause, places in lost_ms.items()}
    lines = [
        (ms, f"{CHANGES[cause]} ({', '.join([*lost_ms[cause]][:2])})")
        for cause, ms in sums.items()
        if ms >= _LEAST * step_ms
    ] or [(0, f"nothing above {_LEAST:.0%}")]
    smaller = sum(ms for ms in sums.values() if ms < _LEAST * step_ms)
    lines += [(smaller, "smaller causes"), (facts["unattributed_ms"], "not attributed")]
    yield f"step {step_ms:,.1f} ms; {facts['reference_ms']:,.1f} ms without the lost time{'; ' * bool(facts['note'])}{facts['note']}"
    yield f"{'ms':>10}{'share':>8}{'tokens/s':>12} without it"
    for ms, text in [(0, "measured"), *lines]:
        rate = f"{facts['tokens'] / (step_ms - ms) * 1e3:,.0f}" if facts["tokens"] else "?"
        # Adding 0 makes -0.0 a 0.0.
        yield f"{round(ms, 1) + 0:>10,.1f}{round(ms / step_ms, 3) + 0:>8.1%}{rate:>12}  {text}"


def _reduce(places: Any, ms: float) -> None:
    """Scale the times of places, so that their sum is smaller, but not below 0."""
    share = max(1 - ms / (places.total() or 1), 0)
    for place in places:
        places[place] *= share


def _lost(timeline: TracedSteps, per_event: float, job: Record) -> dict[str, Any]:
    """Return the milliseconds of a step that were lost, by cause and place. The cause "" has what is left, the reference."""
    starts = Counter(
        event.name
        for event in timeline.events
        if event.name.startswith(MODULE)
        and not {BACKWARD, CHECKPOINT} & event.within
        # A wrapper has the name of its module.
        and event.name != (event.parent and event.parent.name)
    )
    # A pipeline's schedule needs its micro-batches.
    is_pipeline = job["parallelism"].get("pipeline_parallel_degree", 1) > 1
    batches = 1 if is_pipeline else max(starts.values(), default=1) / timeline.num_steps
    times = defaultdict(partial(defaultdict, list))
    in_fp32 = {e.event.module for e in timeline.exclusive if _is_fp32(e)}
    waited = ""
    for each in timeline.exclusive:
        ms = (each.end - each.begin) / 1e6 - per_event * (each.begin == each.event.begin)
        cause = _cause(each, has_batches=batches > 1, in_fp32=in_fp32)
        # After a wait the device is empty until the host has launched again. A CPU's own short calls belong to it, too.
        if cause in (SYNC, UNPINNED):
            waited = cause
        elif each.part != HOST or not (timeline.is_gpu or each.end - each.begin < _SHORT):
            waited = ""
        if cause in (HOST, BATCH, HOOK):
            cause = (
                PYTHON if cause != HOOK and each.end - each.begin > _GAP else waited or cause
            )
        times[cause, _where(each)][each.name].append(max(ms, 0) / timeline.num_steps)
    as_bf16 = _share_of_bf16(timeline, job["training"].get("mixed_precision_param"))
    lost = defaultdict(Times)
    for (cause, where), calls in times.items():
        sums = {name: sum(ms) for name, ms in calls.items()}
        total = sum(sums.values())
        kept = {
            "": total,
            BATCH: total / batches,
            HOST: 0 if timeline.is_gpu else total,
            HOOK: total * (total < _SHORT_HOOK_MS),
            # One kernel reads and writes as the longest does, once in each call.
            HAND_NORM: max(map(fmean, calls.values())) * min(map(len, calls.values())),
            MATH: max(sums.values()),
            # Casts go, too, unless bf16 gains nothing.
            FP32: as_bf16
            * sum(ms for name, ms in sums.items() if as_bf16 == 1 or "copy" not in name),
        }.get(cause, 0)
        lost[cause][where] += total - kept
        lost[""][where] += kept
    return lost


def _cause(each: TimeRange, *, has_batches: bool, in_fp32: Any) -> str:
    """Return the key of CHANGES for a time range, or "" for work."""
    within = {*each.event.within, each.part}
    applies = {
        UNPINNED: "Pageable" in each.name,
        HAND_NORM: HAND_NORM in within and each.part in ("elementwise", "copies"),
        FP32: _is_fp32(each) or ("cast" in within and each.event.module in in_fp32),
        BATCH: has_batches and (each.part == HOST or each.end - each.begin < _SMALL),
    }
    return next((cause for cause in CHANGES if applies.get(cause, cause in within)), "")


def _is_fp32(each: TimeRange) -> bool:
    """Return whether a time range is of a product of fp32 matrices."""
    return each.part == "matmul" and each.event.details.get("Input type", [""])[0] == "float"


def _where(each: TimeRange) -> str:
    """Return the place of a time range: the group of a transfer, a module or hook, or the call."""
    place = re.sub(r"([.#])\d+", r"\1*", each.event.module or each.name or "between events")
    place += " backward" * (BACKWARD in each.event.within)
    return str(each.event.details.get("Process Group Description", place))


def _share_of_bf16(timeline: TracedSteps, asked: Any) -> float:
    """Return the share of the time of products in fp32 that bf16 takes for as many operations, by the trace's own rates.

    If a bf16 job has none in bf16, a GPU's datasheet says it, or the longest of them is measured on this machine.
    """
    ns = Counter()  # by dtype and shapes
    calls = defaultdict(set)
    for each in timeline.exclusive:
        dims = [dims for dims in each.event.details.get("Input Dims", ()) if len(dims) > 1]
        if each.part == "matmul" and len(dims) > 1:
            key = each.event.details["Input type"][0], *map(tuple, dims[-2:])
            ns[key] += each.end - each.begin
            calls[key].add(each.event)

    def rate(dtype: str) -> float:
        keys = [key for key in ns if key[0] == dtype]
        work = sum(len(calls[key]) * math.prod(key[1]) * key[2][-1] for key in keys)
        return work / max(sum(ns[key] for key in keys), 1)

    fp32, bf16 = rate("float"), rate("c10::BFloat16")
    if asked == "bfloat16" and fp32 and not bf16:
        if timeline.is_gpu:
            return _TF32 if any("tf32" in each.name for each in timeline.exclusive) else _FP32
        shapes = max(ns, key=lambda key: ns[key] * (key[0] == "float"))[1:]
        return min(_seconds(shapes, "bfloat16") / _seconds(shapes, "float32"), 1)
    return fp32 / max(fp32, bf16, 1e-9)


def _seconds(shape: Any, dtype: str) -> float:
    """Return the least time of five products of two shapes on this machine."""
    import torch

    factors = [torch.ones(each, dtype=getattr(torch, dtype)) for each in shape]
    return min(repeat(partial(torch.matmul, *factors), number=1))
