"""Comparison of recorded steps: the first tensor that differs beyond rounding, and what the difference looks like.

What is normal is measured: a third run, whose modules' outputs change by one unit in the last place, says how far each tensor moves.
Without such a run, the precision of the job stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.numerics.recorded import RecordedStep, RecordedTensor
from titan.numerics.tables import TABLES

Key = tuple[str, str]
# A difference is beyond rounding from this many times the measured spread on: a layout adds up in another order in each module, and the
# spread of a few projections is itself uncertain. Right layouts stay below 3. Adam divides a gradient by its own size, so a few values with
# gradients near zero make up the spread of an update: one measurement of it says little, and right layouts reach 10.
BEYOND = 12.0
_BEYOND_OF = {"update": 100.0, "weight": 50.0}
_FEW = 0.3
UNIT = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
# Rounding without a measurement, in units in the last place, and the growth that deep models have.
_UNMEASURED = 512.0
_CLOSE = 0.05  # of a recognised factor
_OF_PARAMETERS = {"weight", "gradient", "update"}
_BACKWARD = {"output gradient", "gradient", "update"}
_STAGES = TABLES["stages"]
_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """A tensor that differs beyond rounding.

    Attributes:
        step: the step.
        kind: see `RecordedTensor`; or "loss" or "gradient norm", without a name.
        name: module or parameter.
        ratio: size of the difference over that of the tensor.
        normal: the same for rounding.
        guess: what the difference looks like, in words.
        line: file and line of the module's forward pass.
        after: the last tensor before it that is equal, in words.
    """

    step: int
    kind: str
    name: str
    ratio: float
    normal: float
    guess: str
    line: str
    after: str

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        what = f"{_words(self.kind, self.name)}{where}"
        if self.kind == "batch" and not self.guess:
            return f"step {self.step}: the batches differ in their {self.name}: other samples or another shape"
        if math.isinf(self.ratio) and self.guess:
            return f"step {self.step}: {what}: {self.guess}"
        return (
            f"step {self.step}: {what} differs by {self.ratio:.1e}; rounding makes {self.normal:.1e}"
            + (f"\n  {self.guess}" if self.guess else "")
            + (f"\n  equal before it: {self.after}" if self.after else "")
        )


@dataclass
class Comparison:
    """Result of a comparison.

    Attributes:
        differences: tensors that differ, in the order in which they were computed.
        compared: number of tensors compared.
        left_out: number of tensors that one of the runs did not record.
        worst: the largest difference of tensors that are equal, as a share of what is allowed.
        limits: for each kind of tensor, the largest difference that rounding may make.
    """

    differences: list[Difference]
    compared: int
    left_out: int
    worst: float
    limits: dict[str, float]

    @property
    def first(self) -> str:
        """Return the first tensor that differs, in words."""
        if not self.differences:
            return "no module of the first steps: all recorded tensors are equal"
        found = self.differences[0]
        owner, _, own = found.name.rpartition(".")
        words = TABLES["places"].get(found.kind, "the {kind}")
        where = words.format(kind=found.kind, name=found.name, owner=owner, own=own)
        return f"{where}; {found.guess}" if found.guess else where


def compare(
    ours: Sequence[RecordedStep],
    theirs: Sequence[RecordedStep],
    spread: Sequence[RecordedStep] = (),
    *,
    exact: bool = False,
) -> Comparison:
    """Compare two runs.

    Args:
        ours: recorded steps of the reference.
        theirs: those of the other run.
        spread: those of the reference with `debug.record_perturbed`.
        exact: nothing rounds otherwise, so any difference is one.
    """
    found = Comparison([], 0, 0, 0.0, {})
    others, moved = ({step.step: step for step in run} for run in (theirs, spread))
    for one in ours:
        if (two := others.get(one.step)) is not None:
            _compare_step(found, one, two, moved.get(one.step), exact=exact)
    return found


def _compare_step(
    found: Comparison,
    one: RecordedStep,
    two: RecordedStep,
    moved: RecordedStep | None,
    *,
    exact: bool,
) -> None:
    """Compare a step of two runs, and add the result to those of the steps before. The arguments are those of `compare`."""
    a, b = _tensors(one), _tensors(two)
    normal = _normal(a, _tensors(moved) if moved else {}, one, two)
    found.left_out += len(a.keys() ^ b.keys())
    last, inherited = "", _inherited(a, b, normal)
    shared = _OF_PARAMETERS & {kind for kind, _ in a} & {kind for kind, _ in b}
    extra = [key for key in in_order(two) if key not in a]
    for key in (*extra, *in_order(one)):
        kind = key[0]
        if key not in a or key not in b:
            # A layout may compute an output in another place, but it has all parameters.
            if kind in shared:
                guess = f"the {'other run' if key in a else 'reference'} has none"
                limit = normal.get(key, 0.0)
                lacks = Difference(one.step, *key, math.inf, limit, guess, "", last)
                found.differences.append(lacks)
            continue
        found.compared += 1
        ratio = distance(a[key], b[key])
        factor = 1.0 if kind in ("batch", "weight") else inherited
        most = _BEYOND_OF.get(kind, BEYOND) * normal[key]
        # Few values are near zero. So the wider limit ends where a large part of a tensor would have to be another one.
        allowed = min(most, max(BEYOND * normal[key], _FEW)) * factor * (not exact)
        found.limits[kind] = max(allowed, found.limits.get(kind, 0.0))
        if ratio <= allowed and not b[key].copies:
            found.worst, last = max(found.worst, ratio and ratio / allowed), _words(*key)
            continue
        guess, line = guess_of(a[key], b[key], two.axes), b[key].line or a[key].line
        if kind == "choice":
            cut = "cut", key[1]
            away = distance(a[cut], b[cut])
            is_tie = away <= BEYOND * normal[cut] * inherited
            guess = TABLES["choices"]["tie" if is_tie else "flip"].format(away)
        differs = Difference(one.step, *key, ratio, normal[key], guess, line, last)
        found.differences.append(differs)


def _inherited(
    a: Mapping[Key, RecordedTensor],
    b: Mapping[Key, RecordedTensor],
    normal: Mapping[Key, float],
) -> float:
    """Return how many times as far as in the disturbed run the weights of a step are off. All that follows is off by as much."""
    weights = [key for key in a if key[0] == "weight" and key in b]
    shares = [distance(a[key], b[key]) / normal[key] for key in weights]
    return min(max(1.0, *shares), _BEYOND_OF["weight"]) if shares else 1.0


def in_order(step: RecordedStep) -> list[Key]:
    """Return the tensors of a step in the order in which they are computed.

    The backward pass visits modules from the last to the first. A parameter's gradient follows that of its module's output.
    """
    place: dict[str, int] = {}
    inner: dict[str, int] = {}  # the first module to end within each module
    outputs = (tensor.name for tensor in step.tensors if tensor.kind == "output")
    for number, name in enumerate(outputs):
        place[name] = number
        while name:
            inner.setdefault(name, number)
            name = name.rpartition(".")[0]

    def backward(tensor: RecordedTensor) -> tuple[int, int]:
        if tensor.kind == "output gradient":
            return -place.get(tensor.name, -1), 0
        owner = tensor.name.rpartition(".")[0]
        while owner and owner not in inner:
            owner = owner.rpartition(".")[0]
        return -place.get(owner, inner.get(owner, -1)), 1

    def order(tensor: RecordedTensor) -> tuple[int, ...]:
        stage = _STAGES[tensor.kind]
        return (stage, *backward(tensor)) if tensor.kind in _BACKWARD else (stage,)

    return [(t.kind, t.name) for t in sorted(_tensors(step).values(), key=order)]


def _tensors(step: RecordedStep) -> dict[Key, RecordedTensor]:
    """Return the tensors of a step, its loss and its gradient norm."""
    found = {(tensor.kind, tensor.name): tensor for tensor in step.tensors}
    for kind, value in (("loss", step.loss), ("gradient norm", step.grad_norm)):
        found[kind, ""] = RecordedTensor(kind, "", step.computes_in, None, [[value]])
    return found


def _words(kind: str, name: str) -> str:
    return f"{kind} of {name}" if name else kind


def _normal(
    a: Mapping[Key, RecordedTensor],
    moved: Mapping[Key, RecordedTensor],
    one: RecordedStep,
    two: RecordedStep,
) -> dict[Key, float]:
    """Return the relative difference that rounding makes, for each tensor."""
    coarse = max(UNIT.get(step.computes_in, 0.0) for step in (one, two))
    normal = {}
    for key, tensor in a.items():
        if key[0] == "batch" or (key[0] == "choice" and not moved):
            normal[key] = UNIT["float64"]
            continue
        unit = max(UNIT.get(tensor.dtype, 0.0), coarse, UNIT["float32"])
        if not moved:
            is_initial = key[0] == "weight" and one.step == 1
            normal[key] = unit if is_initial else _UNMEASURED * unit / BEYOND
            continue
        measured = distance(tensor, moved[key]) if key in moved else 0.0
        # One number may hardly move by chance. It is a sum over many values, whose roundings cancel.
        least = UNIT["float32"] if key[1] else max(unit / 8, UNIT["float32"])
        normal[key] = max(measured, least)
    # By chance, one tensor may move less than others of its kind.
    for kind in {key[0] for key in normal} if moved else ():
        alike = {key: value for key, value in normal.items() if key[0] == kind}
        share = 0.9 if kind in ("update", "weight") else 0.5
        least = sorted(alike.values())[int(share * (len(alike) - 1))]
        normal |= {key: max(value, least) for key, value in alike.items()}
    return normal


def _flat(tensor: RecordedTensor) -> list[float]:
    return [value for row in tensor.sums for value in row]


def parameters_only(steps: Sequence[RecordedStep]) -> str:
    """Return why a comparison names no output of a module, or "" if outputs were recorded."""
    if any(tensor.kind == "output" for step in steps for tensor in step.tensors):
        return ""
    return "parameters only: the model does not run on meta, so outputs of modules were not recorded"


def distance(a: RecordedTensor, b: RecordedTensor) -> float:
    """Return the estimated norm of a difference over the norm of the first tensor."""
    one, two = _flat(a), _flat(b)
    away, size = math.dist(one, two), math.hypot(*one)
    if a.norm and b.norm is not None:
        # Signs may hide a change of a few values, and norms do not.
        scale = math.sqrt(len(a.sums))
        away = max(away, abs(a.norm - b.norm) * scale)
        size = max(size, a.norm * scale)
    if math.isnan(away):
        return 0.0 if math.isnan(size) else math.inf
    return away / size if size else (math.inf if away else 0.0)


def guess_of(a: RecordedTensor, b: RecordedTensor, axes: Mapping[str, int]) -> str:
    """Describe a difference.

    Args:
        a: the tensor of the reference.
        b: that of the other run.
        axes: sizes of the other run's axes.
    """
    if b.copies:
        rank, other = b.copies[0]
        return f"the copies of ranks {rank} and {other} differ: a sum or a broadcast over them is missing"
    if b.kind == "batch":
        return ""
    one, two = _flat(a), _flat(b)
    size = math.hypot(*one)
    if not all(map(math.isfinite, two)):
        return "it is not finite"
    if not any(two):
        return "it is zero"
    factor = sum(x * y for x, y in zip(one, two, strict=True)) / (size * size) if size else 0.0
    rest = math.dist(two, [factor * x for x in one])
    if rest < _CLOSE * abs(factor) * size and abs(factor - 1) > _CLOSE:
        for axis, n in axes.items():
            if abs(factor / n - 1) < _CLOSE:
                return f"it is {n} times as large, as if {axis}'s {n} ranks had added it up once too often"
            if abs(factor * n - 1) < _CLOSE:
                return f"it is 1/{n} of it, as if it had been divided by {axis}'s {n} ranks, or never added up"
        return f"it is {factor:.3g} times the reference, in all places alike"
    is_small = distance(a, b) < UNIT["bfloat16"]
    if not is_small and a.norm and b.norm is not None and abs(a.norm - b.norm) < 1e-3 * a.norm:
        return "it has the same size and other values: a part is in another place, or an order is another one"
    # Fewer samples than chunks leave chunks empty.
    columns = zip(zip(*a.sums, strict=True), zip(*b.sums, strict=True), strict=True)
    away = [math.dist(*pair) for pair in columns if any(map(any, pair))]
    # These hold nearly all of the difference.
    bad = [str(n) for n, far in enumerate(away, 1) if far > 1e-3 * math.hypot(*away)]
    if 0 < len(bad) < len(away):
        return (
            f"only the parts {', '.join(bad)} of {len(away)} along its first dimension differ"
        )
    if is_small:
        return "a small difference: another precision or constant, or only a few values differ"
    if abs(factor - 1) < _CLOSE:
        return "part of its values are other ones"
    return f"it is {factor:.2g} times the reference, plus other values"


def values(table: Any, name: str = "") -> dict[str, list[Any]]:
    """Return the values of nested tables by their names, those of a list under one name."""
    if not isinstance(table, dict | list):
        return {name: [table]}
    found: dict[str, list[Any]] = {}
    is_list = isinstance(table, list)
    for key, inner in enumerate(table) if is_list else table.items():
        for full, own in values(
            inner, name if is_list else f"{name}.{key}".lstrip(".")
        ).items():
            found.setdefault(full, []).extend(own)
    return found


def apart(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return the largest relative distance of two lists of values. It is infinite where anything but floating-point numbers differs."""
    pairs = zip(a, b, strict=False)
    return max(map(_apart, pairs), default=0.0) if len(a) == len(b) else math.inf


def _apart(pair: tuple[Any, Any]) -> float:
    a, b = pair
    if a == b or (a != a and b != b):  # NaN equals nothing
        return 0.0
    is_number = isinstance(a, float) and isinstance(b, float)
    return abs(a - b) / (abs(b) or 1.0) if is_number else math.inf


def shown(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a list, indented, and how many follow."""
    more = len(lines) - _SHOWN
    return [f"  {line}" for line in lines[:_SHOWN]] + [f"  and {more} more"] * (more > 0)
