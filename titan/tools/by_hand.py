"""Norms and attention that a program writes by hand, found in a trace by the sequence of their operators.

Only the outermost operators of a thread count, without views and outside the backward pass. An example:

    operators   aten::to  aten::pow  aten::mean  aten::add  aten::rsqrt  aten::mul  aten::to  aten::mul  aten::linear
    words                 pow        mean        add        rsqrt        mul                  mul        linear
    norm        |------------------------------------------------------------------------------------|
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .trace_kinds import HAND_NORM, MATH, NAMES, NORM, is_kind


def written_by_hand(events: Iterable[Any], *, is_gpu: bool) -> dict[Any, str]:
    """Return the outermost operators of norms and attention, and what they are: a surrounding (trace_kinds.py).

    Args:
        events: `TraceEvent`s by their beginning, outer events first.
        is_gpu: whether they launch kernels. On a CPU, torch's own RMS norm runs the same operators, so that one is as good as fused.
    """
    kinds = HAND_NORM if is_gpu else NORM, HAND_NORM, MATH
    outermost = defaultdict(list)
    for event in events:
        if event.name.startswith(("aten::", "autograd::engine")):
            of_thread = outermost[event.thread]
            if not of_thread or of_thread[-1].end <= event.begin:
                of_thread.append(event)
    found = {}
    for of_thread in outermost.values():
        text, places = "", []
        for place, event in enumerate(of_thread):
            operator = event.name.removeprefix("aten::").rstrip("_")
            if operator in ("linear", "matmul") or not is_kind(operator, "bookkeeping"):
                text += operator.split(":")[0] + " "
                places.append(place)
        places.append(len(of_thread))
        for kind, form in zip(kinds, NAMES["by_hand"].values(), strict=True):
            for match in re.finditer(form, text):
                first, after = (places[text.count(" ", 0, at)] for at in match.span())
                found |= dict.fromkeys(of_thread[first:after], kind)
    return found
