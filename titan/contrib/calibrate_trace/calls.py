"""Kernels of a profiler's trace with the operators that launched them: names, shapes and data types.

A kernel names its launch by a correlation number. The operators that ran on the launch's thread at that time are the calls that led to
it. Shapes are in the trace of `torch.profiler.profile(record_shapes=True)`; what NCCL's kernels sent is in any trace of torch 2.3 and
later. `titan sim --calibrate-from` reads traces so.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.observe.trace_files import ODD, TraceFileError, events_of
from titan.untrusted import Unpacked

_HEAD_BYTES = 2**20
_DEVICES = re.compile(r'"deviceProperties"\s*:\s*')


@dataclass(eq=False, slots=True)
class OperatorCall:
    """One call of an operator of torch.

    Attributes:
        name: Its name, such as "aten::mm".
        shapes: Shapes of its arguments; empty if the trace has none.
        dtypes: Their types, as C++ names them ("c10::BFloat16").
        strides: Strides of its arguments; empty if the trace has none.
        values: Texts of its arguments that are no tensors, in their places.
        caller: OperatorCall that called it.
    """

    name: str
    shapes: list[Any]
    dtypes: list[str]
    strides: list[Any]
    values: list[str]
    caller: OperatorCall | None = None

    @property
    def calls(self) -> Iterator[OperatorCall]:
        """Yield this operator and its callers, the innermost first."""
        operator: OperatorCall | None = self
        while operator:
            yield operator
            operator = operator.caller


@dataclass(slots=True)
class TracedKernel:
    """Kernel, and the operator that launched it, if any. arguments: the kernel's own, such as NCCL's."""

    name: str
    seconds: float
    arguments: dict[str, Any]
    operator: OperatorCall | None = None


@dataclass
class TracedKernels:
    """Kernels of a trace.

    Attributes:
        kernels: Its kernels.
        launches: Times of launches by thread, in seconds.
        device: Properties of the first device.
        has_shapes: Whether operators have shapes.
    """

    kernels: list[TracedKernel] = field(default_factory=list)
    launches: dict[Any, list[float]] = field(default_factory=lambda: defaultdict(list))
    device: dict[str, Any] = field(default_factory=dict)
    has_shapes: bool = False


def read_calls(path: Path) -> TracedKernels:
    """Read the kernels of a trace file (.json or .json.gz).

    Raises:
        TraceFileError: The file is not a whole trace.
    """
    found = TracedKernels()
    marks: defaultdict[Any, list[Any]] = defaultdict(list)  # by thread: operators and launches
    kernels: dict[Any, list[TracedKernel]] = defaultdict(list)
    try:
        with Unpacked(path) as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
        if match := _DEVICES.search(head):
            found.device = next(iter(json.JSONDecoder().raw_decode(head, match.end())[0]), {})
        with Unpacked(path) as file:
            for event in events_of(file):
                kind, values = event.get("cat"), event.get("args") or {}
                if event.get("ph") != "X" or "ts" not in event:
                    continue
                thread, start = (event["pid"], event["tid"]), float(event["ts"])
                end = start + float(event.get("dur", 0))
                if kind == "kernel":
                    call = TracedKernel(event["name"], (end - start) * 1e-6, values)
                    kernels[values.get("correlation")].append(call)
                elif kind == "cpu_op":
                    shapes = values.get("Input Dims", [])
                    names = ("Input type", "Input Strides", "Concrete Inputs")
                    more = (values.get(name, []) for name in names)
                    marks[thread].append((start, -end, OperatorCall(event["name"], shapes, *more)))
                    found.has_shapes |= any(shapes)
                elif kind in ("cuda_runtime", "cuda_driver") and "aunch" in event["name"]:
                    marks[thread].append((start, -end, values.get("correlation")))
    except (EOFError, OSError, zlib.error, ValueError, KeyError, TypeError, *ODD) as error:
        reason = "".join(c if c.isprintable() else "?" for c in str(error)[:200])
        raise TraceFileError(f"{path}: not a whole trace of torch's profiler ({reason})") from None
    for thread, times in marks.items():
        _link(sorted(times, key=lambda mark: mark[:2]), kernels, found.launches[thread])
    found.kernels = [call for calls in kernels.values() for call in calls]
    return found


def _link(marks: list[Any], kernels: dict[Any, list[TracedKernel]], launches: list[float]) -> None:
    """Give each operator its caller, and each kernel the operator that was innermost at its launch."""
    running: list[tuple[float, OperatorCall]] = []
    for start, end, what in marks:
        while running and running[-1][0] <= start:
            running.pop()
        inner = running[-1][1] if running else None
        if isinstance(what, OperatorCall):
            what.caller = inner
            running.append((-end, what))
        else:
            launches.append(start * 1e-6)
            for call in kernels.get(what, ()):
                call.operator = inner
