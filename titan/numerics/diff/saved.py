"""Comparison of two checkpoints value by value, with what rounding may change in each tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan.checkpoint.identity import differing
from titan.checkpoint.manager import load, read_metadata, stored_shapes
from titan.checkpoint.storage import Location

from .compare import BEYOND, UNIT, apart, values

_READ_AT_ONCE = 2**28  # bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, compared with the same one computed again.

    Attributes:
        name: its name in the checkpoint.
        other: values with other bits.
        wrong: values that differ beyond rounding.
        limit: differences up to here are within rounding.
        share: distance of the value that is furthest off, as a share of the largest value of the tensor.
        text: that value in words.
    """

    name: str
    other: int = 0
    wrong: int = 0
    limit: float = 0.0
    share: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass
class SavedStep:
    """Comparison of a step that two runs saved.

    Attributes:
        tensors: number of tensors that were compared.
        equal_bits: whether everything has the same bits.
        other: what else differs, in words.
        wrong: tensors that differ beyond rounding, the furthest first.
        limits: for each kind of tensor, the largest change that may be rounding.
    """

    tensors: int = 0
    equal_bits: bool = True
    other: list[str] = field(default_factory=list)
    wrong: list[SavedTensor] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)


def compare_steps(
    saved: Location, computed: Location, again: Location | None, *, rounds: bool
) -> SavedStep:
    """Compare a step that a run saved with the same step of a second run: titan.json and all tensors.

    Args:
        saved: the step.
        computed: that of its recomputation.
        again: that of a second recomputation, whose distance from the first is what rounding does. None: bits must be equal.
        rounds: the recomputation rounds otherwise, so the last bit may differ where the second one happens to be equal.
    """
    found = SavedStep()
    ours, theirs = _shapes(saved), _shapes(computed)
    alike = [name for name in ours if theirs.get(name) == ours[name]]
    if not read_metadata(saved).get("model_only"):  # the last save may hold weights alone
        found.other = [
            f"{name} is in one checkpoint only, or has another shape"
            for name in sorted({*ours, *theirs}.difference(alike))
        ]
    paths = [path for path in (saved, computed, again) if path is not None]
    one, two, *three = map(_facts, paths)
    for name, (a, b) in differing(one, two).items():
        # Another titan may have other facts.
        if None in (a, b) and not name.startswith("data."):
            continue
        found.equal_bits = False
        spread = [apart(b or [], facts.get(name, [])) for facts in three]
        if apart(a or [], b or []) > BEYOND * max(*spread, UNIT["float32"] * rounds, 0.0):
            found.other.append(
                f"{name} in titan.json is {_text(a)}, and {_text(b)} when computed again"
            )
    found.equal_bits &= not found.other
    found.tensors = len(alike)
    for names in _portions(alike, ours):
        states = [_read(path, names, ours) for path in paths]
        for name in names:
            tensor = _compare(name, *(state.pop(name) for state in states), rounds=rounds)
            found.equal_bits &= not tensor.other
            kind = kind_of(name)
            found.limits[kind] = max(found.limits.get(kind, 0.0), tensor.limit)
            found.wrong += [tensor] * bool(tensor.wrong)
    found.wrong.sort(key=lambda tensor: -tensor.share)
    return found


def _facts(step: Location) -> dict[str, list[Any]]:
    """Return the content of titan.json without the job, its row of metrics and the place of a tokenizer."""
    facts = {k: v for k, v in read_metadata(step).items() if k not in ("config", "metrics")}
    return {name: found for name, found in values(facts).items() if not name.endswith(".file")}


def _text(found: list[Any] | None) -> str:
    return "nothing" if found is None else ", ".join(map(str, found))


def kind_of(name: str) -> str:
    """Return "weights", or the last part of the name for what the optimizer keeps, and for the loads of experts."""
    group, last = name.partition(".")[0], name.rpartition(".")[2]
    return "weights" if group in ("model", "average") and last != "last_loads" else last


def _shapes(step: Location) -> dict[str, Any]:
    """Return the shapes and dtypes of a checkpoint's tensors, but for states of generators, each of one rank."""
    shapes = stored_shapes(step)
    return {name: shape for name, shape in shapes.items() if not name.startswith("rng.")}


def _portions(names: Sequence[str], shapes: Mapping[str, Any]) -> Iterable[list[str]]:
    """Return names of tensors to read together: a read of many costs less than many reads."""
    portions: defaultdict[int, list[str]] = defaultdict(list)
    size = 0
    for name in names:
        portions[size // _READ_AT_ONCE].append(name)
        size += shapes[name][0].numel() * shapes[name][1].itemsize
    return portions.values()


def _read(path: Location, names: Sequence[str], shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    state = {name: torch.empty(shapes[name][0], dtype=shapes[name][1]) for name in names}
    load(path, state)
    return state


def _compare(
    name: str, a: Tensor, b: Tensor, c: Tensor | None = None, *, rounds: bool
) -> SavedTensor:
    kind = _INTEGERS[a.element_size()]
    apart = a.view(kind) != b.view(kind)
    other, limit = int(apart.sum()), 0.0
    if not other:
        return SavedTensor(name)
    away = _distance(a, b)
    if c is not None:
        # A value near 0 in Adam's denominator moves by far more than its neighbours, and another one in each layout.
        limit = BEYOND * float(_distance(b, c).nan_to_num(posinf=0.0).max())
    if (limit or (rounds and c is not None)) and b.is_floating_point():
        limit += float(b.abs().nan_to_num(posinf=0.0).max()) * torch.finfo(b.dtype).eps
    beyond = (away > limit) & apart
    if not (wrong := int(beyond.sum())):
        return SavedTensor(name, other, limit=limit)
    furthest = torch.where(beyond, away, -1.0).argmax()
    at = tuple(int(i) for i in torch.unravel_index(furthest, a.shape))
    flipped = int(a.view(kind)[at]) ^ int(b.view(kind)[at])
    bits = (flipped & (2 ** (8 * a.element_size()) - 1)).bit_count()
    share = float(away[at]) / (float(b.double().abs().max()) or 1.0)
    where = f"{name}[{', '.join(map(str, at))}]" if at else name
    text = f"{where} is {float(a[at]):.9g}, and {float(b[at]):.9g} when computed again"
    text += " (one bit)" if bits == 1 else ""
    text += f"; {wrong:,} of its {a.numel():,} values differ" if wrong > 1 else ""
    return SavedTensor(name, other, wrong, limit, share, text)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return distances in float64. Between a number and none it is infinite."""
    return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
