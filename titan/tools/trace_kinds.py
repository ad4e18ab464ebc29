"""Kinds of kernels and operators of a trace.

They are matmul, attention, elementwise, copy, optimizer, communication and host. Only names decide,
since a trace holds only names: of torch's operators, and of the kernels of cuBLAS, CUTLASS, cuDNN,
FlashAttention, Triton and NCCL. A kernel that no rule matches is elementwise, the kind with the
most names.
"""

from __future__ import annotations

import re
from collections.abc import Set
from functools import cache

from titan.config.toml import table_beside
from titan.observe.step_parts import COMMUNICATION, HOST

NAMES = table_beside(__file__, "trace_kinds.toml")

# Surroundings of events, and the beginnings of ranges.
HOOK, LOADER, COLLECTION = "titan hook ", "titan loader", "titan gc"
CHECKPOINT, SYNC = "checkpoint", "sync"
MATH, NORM, HAND_NORM, LOG = "math", "fused norm", "norm", "log"
CARRIED = {MATH, NORM, HAND_NORM}  # from a forward operator to its backward node


@cache
def surroundings(name: str, *, is_operator: bool) -> str:
    """Return the kind that an event gives to all events within it.

    Args:
        name: name of the event.
        is_operator: whether it is an operator of torch.

    Returns:
        A key of the table's surroundings, "attention", or "" for none.
    """
    for kind, pattern in NAMES["surroundings"].items():
        if re.match(pattern, name):
            return kind
    # A module may have such a name, too.
    found = is_operator and re.search(NAMES["kernels"]["attention"], name)
    return "attention" if found else ""


@cache
def is_kind(operator: str, kind: str) -> bool:
    """Return whether an operator of aten, named without its namespace, is in a row of the table's operators."""
    return bool(re.fullmatch(NAMES["operators"][kind], operator))


def kind_of_kernel(name: str, within: Set[str]) -> str:
    """Return a key of PARTS for a kernel.

    Args:
        name: name of the kernel.
        within: surroundings of its launch.
    """
    found = next((k for k, names in NAMES["kernels"].items() if re.search(names, name)), "")
    # Before its name: an optimizer's kernels are elementwise and copies like any others.
    if "optimizer" in within and found != COMMUNICATION:
        return "optimizer"
    if "attention" in within and found not in ("elementwise", COMMUNICATION):
        return "attention"
    if found == "copies" and "cast" in within and not name.startswith("Mem"):
        return "elementwise"
    return found or "elementwise"


def kind_of_operator(name: str, within: Set[str], *, is_operator: bool) -> str:
    """Return a key of PARTS for an operator's self time.

    Args:
        name: name of the operator.
        within: its surroundings, its own included.
        is_operator: whether it is an operator of torch, not a plain range.
    """
    if COMMUNICATION in within:
        return COMMUNICATION
    namespace, _, operator = name.rpartition("::")
    # autograd's nodes and plain ranges only call others.
    computes = is_operator and namespace and "autograd" not in namespace
    # The self time of inductor's graphs is the time of their loops.
    if not (computes or "CompiledFxGraph" in name) or is_kind(operator, "bookkeeping"):
        return HOST
    for kind in ("optimizer", "attention"):
        if kind in within:
            return kind
    if is_kind(operator, "matmul"):
        return "matmul"
    return "copies" if is_kind(operator, "copies") and "cast" not in within else "elementwise"
