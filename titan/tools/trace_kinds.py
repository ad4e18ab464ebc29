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

from titan.observe.step_parts import COMMUNICATION, HOST

# Kinds of kernels and operators. The order of the checks below matters: a fused name may match several.
_ATTENTION = re.compile(r"attention|scaled_?dot_?product|sdpa|fmha|flash", re.I)
_COMMUNICATION = re.compile(r"nccl|^gloo:|c10d|symm_mem|multimem|(one|two)_shot", re.I)
_GENERATED = re.compile(
    r"triton_(poi|red|per)_"
)  # inductor names loops after the fused operators
_GEMM = re.compile(r"gemm|gemv|nvjet|matmul|cutlass|xmma|splitk|_mm_|_mm\b|triton_tem_", re.I)
_COPY = re.compile(r"mem(cpy|set)|copy|catarray|chunk_cat|fillfunctor|fill_kernel", re.I)
_CAST = re.compile(r"float\d+\w*_copy_kernel")  # a change of dtype is a copy too, to torch

# Kinds of the events within an event, and the beginning of its name.
HOOK, LOADER, COLLECTION = "titan hook ", "titan loader", "titan gc"
CHECKPOINT, COMPILATION, SYNC = "checkpoint", "compilation", "sync"
MATH, NORM, LOG = "math", "fused norm", "log"
_SURROUNDINGS = {
    COMMUNICATION: f"(?i).*({_COMMUNICATION.pattern})",
    "optimizer": r"Optimizer\.",
    "cast": r"aten::_to_copy$",
    MATH: r"aten::_scaled_dot_product_attention_math$",
    SYNC: re.compile(
        r"aten::(item|_local_scalar_dense|nonzero|is_nonzero|equal)$|(cuda|hip)\w+Synchronize$"
    ),
    COMPILATION: r".*\(dynamo_timed\)$",
    COLLECTION: rf"{COLLECTION}|.*\bcollect of gc",
    LOADER: rf"{LOADER}|enumerate\(DataLoader\)",
    NORM: r"aten::(_fused_rms|rms|native_layer|layer)_norm$",
    CHECKPOINT: f"{HOOK}(Checkpointing|Validation|Evaluation)",
    LOG: f"{HOOK}Metrics",
    HOOK: re.compile(HOOK),
}

CARRIED = {MATH, NORM}  # from a forward operator to its backward node

# Aten's operators, as whole names.
_PRODUCT = re.compile(
    r"\w*mm(_\w+)?|mv|addmv|dot|\w*linear_(pointwise|unary|binary)|mkldnn_linear"
)
_COPIES = re.compile(r"\w*copy_?(in|out)?_?|clone|(chunk_)?cat|stack|(fill|zero)_|repeat")
# Views, allocation, and composite operators: their self time is the host's bookkeeping.
_BOOKKEEPING = re.compile(
    r"as_strided|_?(unsafe_)?view(_as)?|_?reshape(_alias)?|transpose|t|numpy_T|movedim|permute|expand(_as)?|(un)?squeeze|"
    r"select|slice|narrow|chunk|split(_with_sizes)?|(un)?flatten|unbind|detach|alias|lift_fresh|to|contiguous|result_type|"
    r"resolve_(conj|neg)|linear|matmul|(new_)?(empty|zeros|ones|full)(_like|_strided)?|item|set_|resize_|record_stream"
)


@cache
def surroundings(name: str, *, is_operator: bool) -> str:
    """Return the kind that an event gives to all events within it.

    Args:
        name: name of the event.
        is_operator: whether it is an operator of torch.

    Returns:
        A key of _SURROUNDINGS, "attention", or "" for none.
    """
    for kind, pattern in _SURROUNDINGS.items():
        if re.match(pattern, name):
            return kind
    # A module may have such a name, too.
    return "attention" if is_operator and _ATTENTION.search(name) else ""


def kind_of_kernel(name: str, within: Set[str]) -> str:
    """Return a key of PARTS for a kernel.

    Args:
        name: name of the kernel.
        within: surroundings of its launch.
    """
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    # Before its name: an optimizer's kernels are elementwise and copies like any others.
    if "optimizer" in within:
        return "optimizer"
    if _GENERATED.match(name):
        return "elementwise"
    if "attention" in within or _ATTENTION.search(name):
        return "attention"
    if _COPY.search(name):
        is_cast = _CAST.search(name) or ("cast" in within and not name.startswith("Mem"))
        return "elementwise" if is_cast else "copies"
    return "matmul" if _GEMM.search(name) else "elementwise"


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
    if not (computes or "CompiledFxGraph" in name) or _BOOKKEEPING.fullmatch(operator):
        return HOST
    for kind in ("optimizer", "attention"):
        if kind in within:
            return kind
    if _PRODUCT.fullmatch(operator):
        return "matmul"
    return "copies" if _COPIES.fullmatch(operator) and "cast" not in within else "elementwise"
