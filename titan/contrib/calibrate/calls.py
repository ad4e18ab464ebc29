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
from gzip import BadGzipFile
from math import isfinite
from pathlib import Path
from typing import Any

from titan.base.untrusted import Unpacked
from titan.tools.trace_files import ODD, TraceFileError, events_of

_HEAD_BYTES = 2**20
STRANGE = (ValueError, KeyError, TypeError, *ODD)
"""Errors for values that a profiler does not write."""
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
        seconds: Time on the host.
        caller: Operator that called it.
        num_launches: Kernels that it launched itself.
    """

    name: str
    shapes: list[Any]
    dtypes: list[str]
    strides: list[Any]
    values: list[str]
    seconds: float
    caller: OperatorCall | None = None
    num_launches: int = 0

    @property
    def calls(self) -> Iterator[OperatorCall]:
        """Yield this operator and its callers, the innermost first."""
        operator: OperatorCall | None = self
        while operator:
            yield operator
            operator = operator.caller


@dataclass(slots=True)
class TracedKernel:
    """Kernel of a GPU.

    Attributes:
        name: Its name.
        seconds: Its duration.
        arguments: Its arguments in the trace, such as NCCL's.
        operator: Operator that launched it, if any.
        launch_s: Time of its launch on the host.
    """

    name: str
    seconds: float
    arguments: dict[str, Any]
    operator: OperatorCall | None = None
    launch_s: float = 0.0


@dataclass
class TracedKernels:
    """Kernels of a trace.

    Attributes:
        kernels: Its kernels.
        device: Properties of the first device.
        has_shapes: Whether operators have shapes.
    """

    kernels: list[TracedKernel] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    has_shapes: bool = False


def read_calls(path: Path) -> TracedKernels:
    """Read the kernels of a trace file (.json or .json.gz).

    Raises:
        TraceFileError: The file is not a whole trace.
        OSError: It cannot be read.
    """
    found = TracedKernels()
    marks = defaultdict[Any, list[Any]](list)  # by thread: operators and launches
    kernels: dict[Any, list[TracedKernel]] = defaultdict(list)
    try:
        with Unpacked(path) as file:
            head = file.read(_HEAD_BYTES).decode("utf-8", "replace")
        if match := _DEVICES.search(head):
            devices = json.JSONDecoder().raw_decode(head, match.end())[0]
            found.device = dict(next(iter(devices), {}))
        with Unpacked(path) as file:
            for event in events_of(file):
                kind, values = event.get("cat"), event.get("args") or {}
                if event.get("ph") != "X" or "ts" not in event:
                    continue
                thread, start = (event["pid"], event["tid"]), float(event["ts"])
                end = start + float(event.get("dur", 0))
                if not isfinite(end):
                    raise ValueError(f"a time of {event.get('dur')}")
                if kind == "kernel":
                    call = TracedKernel(event["name"], (end - start) * 1e-6, values)
                    kernels[values.get("correlation")].append(call)
                elif kind == "cpu_op":
                    shapes = values.get("Input Dims", [])
                    names = ("Input type", "Input Strides", "Concrete Inputs")
                    types, strides, texts = (values.get(name, []) for name in names)
                    seconds = (end - start) * 1e-6
                    marks[thread].append(
                        (
                            start,
                            -end,
                            OperatorCall(event["name"], shapes, types, strides, texts, seconds),
                        )
                    )
                    found.has_shapes |= any(shapes)
                elif kind in ("cuda_runtime", "cuda_driver") and "aunch" in event["name"]:
                    marks[thread].append((start, -end, values.get("correlation")))
    except (EOFError, BadGzipFile, zlib.error, *STRANGE) as error:
        raise not_a_trace(path, error) from None
    for times in marks.values():
        _link(sorted(times, key=lambda mark: mark[:2]), kernels)
    found.kernels = [call for calls in kernels.values() for call in calls]
    return found


def not_a_trace(path: Path, error: Exception) -> TraceFileError:
    """Return the error of a file that is no trace, or not all of it."""
    reason = "".join(c if c.isprintable() else "?" for c in str(error)[:200])
    return TraceFileError(f"{path}: not a whole trace of torch's profiler ({reason})")


def _link(marks: list[Any], kernels: dict[Any, list[TracedKernel]]) -> None:
    """Set the caller of each operator of a thread, and the innermost operator at the launch of each kernel."""
    running: list[tuple[float, OperatorCall]] = []
    for start, end, what in marks:
        while running and running[-1][0] <= start:
            running.pop()
        inner = running[-1][1] if running else None
        if isinstance(what, OperatorCall):
            what.caller = inner
            running.append((-end, what))
        else:
            for call in kernels.get(what, ()):
                call.operator, call.launch_s = inner, (-end - start) * 1e-6
            if inner:
                inner.num_launches += 1
