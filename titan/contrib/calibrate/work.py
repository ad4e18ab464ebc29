"""Work of the kernels of a profiler's trace, where operators' shapes or NCCL's arguments tell it: matmuls, attention, pointwise, collectives.

`titan sim --calibrate-from` compares such work with its price. Names are torch's: operators of ATen, types of C++, and NCCL's arguments in
the words of its process group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from .calls import OperatorCall, TracedKernel, TracedKernels

_BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2}
_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}
_MATMUL = re.compile(r"aten::(_scaled_mm|b?mm|(addmm|baddbmm))")
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(flash|cudnn|efficient)_attention(_backward)?"
)
_CAUSAL = {
    "flash": 4,
    "cudnn": 6,
    "efficient": 6,
    "flash_backward": 11,
    "cudnn_backward": 14,
    "efficient_backward": 11,
}
"""Place of `is_causal` among an operator's arguments."""
_POINTWISE = re.compile(
    r"aten::(add|sub|mul|div|neg|exp|pow|rsqrt|copy|fill|zero|silu|gelu|relu|sigmoid|tanh)_?"
)
_KNOWN = (_MATMUL, _ATTENTION, _POINTWISE)
_COLLECTIVE = re.compile("(allgather)|(reducescatter)|(allreduce)|(alltoall)")
_MAX_RANKS = 2**20
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class TracedWork(NamedTuple):
    """Work of an operator or of a collective.

    Attributes:
        kind: "matmul", "attention", "attention_backward", "pointwise", or a kind of collective.
        name: The operator, such as "aten::mm".
        dtype: Type of its operands, as torch prints it.
        shapes: Shapes of a matmul's operands, or of q, k and v.
        read_bytes: Bytes that it reads, or that a collective gathers or reduces.
        write_bytes: Bytes that it writes.
        causal: Whether attention has a causal mask.
        ranks: Ranks of a collective's group.
    """

    kind: Any
    name: str
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    read_bytes: int = 0
    write_bytes: int = 0
    causal: bool = False
    ranks: tuple[int, ...] = ()


class Timing(NamedTuple):
    """Seconds of each time that a work ran, and the number of kernels in all."""

    seconds: list[float]
    kernels: int


def eager_launches(calls: TracedKernels) -> list[tuple[float, float]]:
    """Return the host's seconds of each pointwise operator with one kernel, and those of its launch alone."""
    return [
        (kernel.operator.seconds, kernel.launch_s)
        for kernel in calls.kernels
        if kernel.operator
        and kernel.operator.num_launches == 1
        and _POINTWISE.fullmatch(kernel.operator.name)
    ]


def work_of(calls: TracedKernels) -> dict[TracedWork, Timing]:
    """Return the known work of a trace. The kernels of one operator belong together."""
    of_operator = defaultdict[OperatorCall, list[TracedKernel]](list)
    seconds = defaultdict[TracedWork, list[float]](list)
    kernels = defaultdict[TracedWork, int](int)
    for call in calls.kernels:
        if work := _collective(call.arguments):
            seconds[work].append(call.seconds)
            kernels[work] += 1
        elif operator := next(_known(call), None):
            of_operator[operator].append(call)
    for operator, own in of_operator.items():
        work = _described(operator, " ".join(call.name for call in own))
        if work is None:
            continue
        seconds[work].append(sum(call.seconds for call in own))
        kernels[work] += len(own)
    return {work: Timing(times, kernels[work]) for work, times in seconds.items()}


def _known(call: TracedKernel) -> Iterator[OperatorCall]:
    """Yield the operators of a kernel whose shapes tell its work, the innermost first."""
    for operator in call.operator.calls if call.operator else ():
        if any(operator.shapes) and any(known.fullmatch(operator.name) for known in _KNOWN):
            yield operator


def _described(operator: OperatorCall, kernels: str) -> TracedWork | None:
    """Return the work of an operator, which ran these kernels. None for a product of nothing, which only fills its result."""
    name, shapes = operator.name, operator.shapes

    def dtype(place: int) -> str:
        found = _DTYPES.get(_type(operator, place), _type(operator, place))
        # Kernels of TF32 say so. Their operators' type is float.
        is_tf32 = found == "float32" and re.search("tf32|s1688", kernels)
        return "tfloat32" if is_tf32 else found

    if match := _MATMUL.fullmatch(name):
        place = 1 if match[2] else 0
        a, b = (tuple(shape) for shape in shapes[place : place + 2])
        if len(a) < 2 or a[-1] != b[-2]:
            raise ValueError(f"{name} of {a} and {b}")
        if not prod(a) * prod(b):
            return None
        written = prod(a) // a[-1] * b[-1] * _BYTES.get(_type(operator, place), 2)
        read = _bytes(operator, place) + _bytes(operator, place + 1)
        return TracedWork("matmul", name, dtype(place), (a, b), read, written)
    if match := _ATTENTION.fullmatch(name):
        backward = match[2] or ""
        place = 1 if backward else 0  # the gradient comes first
        q, k, v = (tuple(shape) for shape in shapes[place : place + 3])
        said = [*operator.values[_CAUSAL[match[1] + backward] :], ""][0]
        # Older traces have no values. Language models' masks are causal.
        causal = said == "True" if said else q[2] == k[2]
        return TracedWork(f"attention{backward}", name, dtype(place), (q, k, v), causal=causal)
    places = range(len(operator.dtypes))
    read, written = (
        [_bytes(operator, n) for n in places],
        max(_bytes(operator, n, whole=True) for n in places),
    )
    if name.endswith("_"):  # in place; these only write to the first
        read, written = read[1 if re.search("copy|fill|zero", name) else 0 :], read[0]
    return TracedWork("pointwise", name, read_bytes=sum(read), write_bytes=written)


def _type(operator: OperatorCall, place: int) -> str:
    return operator.dtypes[place].removeprefix("c10::").lower()


def _bytes(operator: OperatorCall, place: int, *, whole: bool = False) -> int:
    """Return the bytes of an argument; of an expanded tensor, whose strides are 0, those in memory or `whole`."""
    shape, strides = operator.shapes[place], operator.strides[place : place + 1]
    steps = strides[0] if strides and not whole else ()
    size = prod(n for n, step in zip_longest(shape, steps, fillvalue=1) if step)
    return size * _BYTES.get(_type(operator, place), 1) if shape else 0


def _collective(said: dict[str, Any]) -> TracedWork | None:
    """Return the work of NCCL's kernel from its arguments; None for other kernels."""
    name = str(said.get("Collective name", "")).replace("_", "").lower()
    match = _COLLECTIVE.search(name)
    width = _BYTES.get(str(said.get("dtype")).lower(), 1)
    if not (match and match.lastindex):
        return None
    kind, size = _KINDS[match.lastindex - 1], int(said["Group size"])
    if size > _MAX_RANKS:
        raise ValueError(f"a group of {size} ranks")
    elements = int(said["Out msg nelems" if kind == "all_gather" else "In msg nelems"])
    ranks = tuple(map(int, re.findall(r"\d+", str(said.get("Process Group Ranks", "")))))
    # Long groups are cut short in a trace.
    ranks = ranks if len(ranks) == size else tuple(range(size))
    return TracedWork(kind, kind, read_bytes=elements * width, ranks=ranks)
