"""Calibration from a trace (`titan sim --calibrate-from TRACE`): a profile on which a traced job's kernels take the time that they took.

Any job of PyTorch will do, profiled for a step or two with `torch.profiler.profile(record_shapes=True)`. Each operator whose shapes say
what it computes is priced on the base profile. The figure of its class is then changed until the class takes its traced time:

    matmuls        matmul_share, by dtype             aten::mm, addmm, bmm, baddbmm, _scaled_mm
    attention      attention_*_tflops of a kernel     aten::_scaled_dot_product_*, forward and backward
    pointwise      eager_tb_per_s                     eager operators that move 32 MiB or more, which no cache holds
    collectives    ring, all_reduce, all_to_all, nic  the fastest of each size: the others wait for other ranks, too
    host           host_tiny_us, launch_us            pointwise operators of one kernel: the medians of their time on the host, and of the launch in it

So a profile keeps its shape, which comes from benchmarks of single kernels, and takes the level of this machine under load. Other
operators (convolutions, embeddings, compiled kernels), and those of less than 50 us, or 1 ms in all, change nothing.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

from titan.config.options import check_target, mistake
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import Group, Kernel, Scope, Transfer
from titan.sim.report.text import columns
from titan.tools.trace_files import TraceFileError

from .calls import STRANGE, TracedKernels, not_a_trace, read_calls
from .profile_file import Figures, base_of, to_toml
from .work import Timing, TracedWork, eager_launches, work_of

_LEAST_S, _LEAST_MOVED, _LEAST_SENT, _LEAST_IN_ALL_S = 50e-6, 2**25, 10**6, 1e-3
"""Time of an operator, bytes of a pointwise one, bytes of a collective, and time of a class from which they tell a rate."""
_ROUNDS, _LEFT = 20, 0.05
"""Steps in which a figure is fitted, and the difference that may be left."""
_KEYS = {"matmul_share": "peak_tflops"}
"""Figures whose keys are those of another."""

Figure = tuple[str, ...]
"""Name of a figure, and its key if it is a dict: ("matmul_share", "bfloat16")."""


def calibrate_from(trace: Path, *, base_name: str | None, target: Path | None) -> int:
    """Write a profile with the rates of a trace, and print what changed.

    Args:
        trace: Trace of torch's profiler, .json or .json.gz.
        base_name: Profile to begin with. None: that of the traced device.
        target: File of the new profile. None: NAME-hardware.toml in this folder.

    Returns:
        The command's exit code.

    Raises:
        ConfigError: The trace cannot be read, it has no kernels, or there is no such profile.
    """
    target = target or Path(f"{trace.name.partition('.')[0]}-hardware.toml")
    check_target("--calibrate", target)
    try:
        calls = read_calls(trace)
        works = work_of(calls)
    except OSError as error:
        raise mistake("--calibrate-from", f"{trace}: {error.strerror or error}") from None
    except TraceFileError as error:
        raise mistake("--calibrate-from", str(error)) from None
    except STRANGE as error:
        raise mistake("--calibrate-from", str(not_a_trace(trace, error))) from None
    device = str(calls.device.get("name", ""))
    if not calls.kernels:
        raise mistake("--calibrate-from", f"{trace} has no kernels of a GPU")
    if not device and not base_name:
        raise mistake(
            "--calibrate-from",
            f"{trace} names no device: state the most similar profile with --hardware",
        )
    base = load_profile(base_name or base_of(device))
    figures, rows, remarks = corrections(calls, works, base)
    print(
        "\n".join(
            columns([("figure", base.name, "here", "kernels", "in all"), *rows], left=(0,))
        )
    )
    print(*remarks, sep="\n", end="\n" * bool(remarks))
    if not calls.has_shapes:
        what = "matmuls, attention and pointwise kernels are not corrected"
        print(
            f"{what}: the trace has no shapes, as torch.profiler.profile(record_shapes=True) has"
        )
    print("all other figures are the base profile's")
    target.write_text(
        to_toml(
            target.stem,
            base.name,
            figures,
            note=f"titan sim --calibrate-from {trace.name} ({device or base.name}), {datetime.now(timezone.utc):%Y-%m-%d}",
        ),
        encoding="utf-8",
    )
    print(f"\nwrote {target}; titan sim JOB.toml --world-size N --hardware {target}")
    return 0


def corrections(
    calls: TracedKernels, traced: dict[TracedWork, Timing], base: Profile
) -> tuple[Figures, list[tuple[str, ...]], list[str]]:
    """Return the figures that a trace corrects, a row for each (its name, before, after, kernels, their time), and remarks."""
    by_figure = defaultdict[Figure, list[tuple[TracedWork, Timing]]](list)
    for work, timed in traced.items():
        figure = _figure_of(work, timed, base)
        # Attention of a kernel without rates has no price. A dtype without a share has bfloat16's.
        if figure and (
            figure[1:] == () or figure[1] in getattr(base, _KEYS.get(figure[0], figure[0]))
        ):
            by_figure[figure].append((work, timed))
    # 0 means that the memory is the limit.
    limit = base.eager_tb_per_s or base.memory_tb_per_s
    shares = {
        key[0]: base.matmul_share["bfloat16"]
        for name, *key in by_figure
        if name == "matmul_share"
    }
    update = {"eager_tb_per_s": limit, "matmul_share": shares | base.matmul_share}
    known, figures, rows, remarks = base.model_copy(update=update), Figures(), [], []
    in_all: dict[Figure, float] = {}
    for figure, works in sorted(by_figure.items()):
        name, seconds = figure[0], sum(_seconds(*one) * len(one[1].seconds) for one in works)
        if seconds < _LEAST_IN_ALL_S:
            continue
        in_all[figure] = seconds
        if name.startswith("attention"):
            known = known.model_copy(update={"attention_kernel": figure[1]})
        before = known
        for _ in range(_ROUNDS):
            known = _scaled(known, figure, _priced_s(works, known) / seconds)
        figures[name] = getattr(known, name)
        values = (_text(profile, figure) for profile in (before, known))
        count = sum(timed.kernels for _, timed in works)
        rows.append((" ".join(figure), *values, f"{count:,}", f"{seconds * 1e3:,.1f} ms"))
        if abs((priced := _priced_s(works, known)) / seconds - 1) > _LEFT:
            times = f"took {seconds * 1e3:,.1f} ms, and take {priced * 1e3:,.1f} ms on the new profile"
            remarks.append(f"{' '.join(figure)} is at its limit: its kernels {times}")
    if ran := [figure for figure in in_all if figure[0] == "attention_forward_tflops"]:
        figures["attention_kernel"] = max(ran, key=lambda figure: in_all[figure])[1]
    if launches := eager_launches(calls):
        # An operator on the host: what it takes without its launch, and the launch.
        figures["host_tiny_us"] = round(median(s - launch for s, launch in launches) * 1e6, 2)
        figures["launch_us"] = round(median(launch for _, launch in launches) * 1e6, 2)
        for name in ("host_tiny_us", "launch_us"):
            row = f"{getattr(base, name):.4g}", f"{figures[name]:.4g}", f"{len(launches):,}", ""
            rows.append((name, *row))
        remarks.append(
            "host_tiny_us and launch_us contain the profiler's own time: without it, the host is faster"
        )
    return figures, rows, remarks


def _figure_of(work: TracedWork, timed: Timing, base: Profile) -> Figure | None:
    """Return the figure that a work's price rests on; None if the work is too small to tell."""
    if work.ranks:
        if len(work.ranks) == 1 or work.read_bytes < _LEAST_SENT:
            return None
        if len({rank // base.gpus_per_node for rank in work.ranks}) > 1:
            return ("nic_share",)
        own = work.kind == "all_to_all" or (work.kind == "all_reduce" and base.measured)
        return (f"{work.kind}_gb_per_s" if own else "ring_gb_per_s",)
    if mean(timed.seconds) < _LEAST_S:
        return None
    if work.kind == "matmul":
        return ("matmul_share", "float8" if work.dtype.startswith("float8") else work.dtype)
    if work.kind == "pointwise":
        moved = work.read_bytes + work.write_bytes
        # A trace without strides counts expanded tensors in full: more than the memory could move.
        is_possible = moved / mean(timed.seconds) < base.memory_tb_per_s * 1e12
        return ("eager_tb_per_s",) if is_possible and moved >= _LEAST_MOVED else None
    ran = work.name.removeprefix("aten::_scaled_dot_product_").partition("_")[0]
    way = "backward" if work.kind == "attention_backward" else "forward"
    return (f"attention_{way}_tflops", "flash2" if ran == "flash" else ran)


def _seconds(work: TracedWork, timed: Timing) -> float:
    """Return the time of one run: the mean, but of collectives the fastest, which has waited least."""
    return min(timed.seconds) if work.ranks else mean(timed.seconds)


def _priced_s(works: list[tuple[TracedWork, Timing]], profile: Profile) -> float:
    """Return the seconds that works take on a profile, in all."""
    cost = Cost(profile)
    return sum(_price(work, cost) * len(timed.seconds) for work, timed in works)


def _price(work: TracedWork, cost: Cost) -> float:
    """Return the seconds of a work on a profile."""
    if work.ranks:
        what = Transfer(work.kind, "", work.read_bytes, "", 0, True, 0, Scope("forward"))
        return cost.transfer(what, Group("", (), work.ranks), rank=work.ranks[0]).seconds
    flops = 2 * prod(work.shapes[0]) * work.shapes[1][-1] if work.kind == "matmul" else 0
    how = (work.shapes, work.dtype, flops, work.read_bytes, work.write_bytes)
    return cost.kernel_s(Kernel(work.name, work.kind, *how, causal=work.causal))


def _scaled(profile: Profile, figure: Figure, factor: float) -> Profile:
    """Return the profile with a figure, or all points of its curve, times a factor. No share exceeds 1, and no kernel the memory."""
    name, *key = figure
    shares = 1.0 if name.endswith("_share") else float("inf")
    most = profile.memory_tb_per_s if name == "eager_tb_per_s" else shares

    def scaled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple((size, min(most, one * factor)) for size, one in value)
        return min(most, value * factor)

    value = getattr(profile, name)
    value = value | {key[0]: scaled(value[key[0]])} if key else scaled(value)
    return profile.model_copy(update={name: value})


def _text(profile: Profile, figure: Figure) -> str:
    """Return a figure as text: of a curve, the value at its end."""
    value = getattr(profile, figure[0])
    value = value[figure[1]] if len(figure) > 1 else value
    return f"{value[-1][1] if isinstance(value, tuple) else value:.4g}"
