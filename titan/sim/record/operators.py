"""Classification of the operators that torch dispatches (kind of kernel, view, nothing), and the bytes and FLOPs of a call.

Bytes are those of tensors in memory: an expanded tensor counts once, and overwritten memory is not
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from titan.sim.record.trace import (
    RECURRENCE_CHUNK,
    Host,
    Kernel,
    KernelKind,
    attention_flops,
    list_launches,
)

_aten = torch.ops.aten

# Names are those of the packet, without namespace and overload, as `func._opname` gives them.
_MATMULS = {"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm"}
_WITH_ADDEND = {"addmm", "baddbmm"}
# Operators that read the rows chosen by an index.
_GATHERS = {
    "embedding",
    "embedding_dense_backward",
    "gather",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "index",
    "index_select",
    "index_put",
    "index_put_",
    "_index_put_impl_",
}
_COPIES = {
    "copy_",
    "clone",
    "_to_copy",
    "cat",
    "stack",
    "split_with_sizes_copy",
    "chunk_cat",
    "all_gather_copy_in",
    "_foreach_copy_",
    "_chunk_cat",
    "chunk_cat_mixed_dtype",
    "repeat",
}
# Overwritten memory is not read first, so it counts once.
_OVERWRITE = {
    "copy_",
    "fill_",
    "zero_",
    "_foreach_copy_",
    "_foreach_zero_",
    "uniform_",
    "normal_",
    "all_gather_copy_in",
}
# Operators that change metadata or take memory, and run no kernel.
_FREE = {
    "detach",
    "detach_",
    "alias",
    "lift_fresh",
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "as_strided",
    "set_",
    "resize_",
    "record_stream",
    "record_grad_output_stream",
    "is_pinned",
    "_pin_memory",
    "result_type",
    "is_same_size",
    "_has_compatible_shallow_copy_type",
    "_version",
    "lift",
}
_FREE_NAMESPACES = {"prim", "profiler", "sym"}
# Kernels of one operation, where it is not one: FlashAttention's backward prepares, computes and converts; a sorted gather
# of an embedding's gradient; CUTLASS's grouped matmul is set up on the device; a radix sort of 64 bits passes 8 times.
_LAUNCHES = {
    "_scaled_dot_product_flash_attention_backward": 3,
    "_varlen_attn_backward": 3,
    "embedding_dense_backward": 4,
    "_foreach_norm": 2,
    "_fused_rms_norm_backward": 2,
    "_grouped_mm": 2,
    "sort": 10,
    "linear_attention": 6,
    "linear_attention_backward": 18,
}


@dataclass
class Operator:
    """Operator of torch.

    Attributes:
        func: the overload.
        name: its name with the namespace.
        kind: kind of its kernel; None if it runs no kernel.
        makes: whether its result may be new memory.
        written: names of the arguments that it writes to.
        updates: whether it only updates lists of tensors, so that it has no result.
    """

    func: Any
    name: str
    kind: KernelKind | None
    makes: bool
    written: tuple[str, ...]
    updates: bool


def classify(func: Any) -> Operator:
    """Return the description of an operator.

    The tracer keeps it, since reading a schema is slow.
    """
    schema = func._schema
    name = func._opname
    arguments = schema.arguments
    written = tuple(
        a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
    )
    is_free = func.is_view or name in _FREE or func.namespace in _FREE_NAMESPACES
    kind = None if is_free else _kind(name)
    return Operator(
        func,
        schema.name,
        kind,
        makes=not func.is_view,
        written=written,
        updates=kind == "optimizer" and not schema.returns,
    )


def _kind(name: str) -> KernelKind:
    """Return the kind of the kernel of an operator."""
    if name in _MATMULS:
        return "matmul"
    if any(part in name for part in ("scaled_dot_product", "flash_attention", "varlen_attn")):
        return "attention_backward" if name.endswith("backward") else "attention"
    if name.startswith("linear_attention"):
        return "recurrence"
    if name in _GATHERS:
        return "gather"
    if name in _COPIES:
        return "copy"
    if name.startswith(("_foreach_", "_fused_adam")):
        return "optimizer"
    # All others: a thread for each element, or a reduction, priced by bytes.
    return "pointwise"


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among the values and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def kernel_of(
    op: Operator, args: Any, kwargs: Any, result: Any, *, host: Host = "eager"
) -> Kernel:
    """Return the kernel that a call launched.

    Args:
        op: the operator.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        result: what the call returned.
        host: launcher of the kernel.
    """
    inputs, outputs = list(tensors_in(args)), list(tensors_in([result]))
    named = list(tensors_in(kwargs.values())) if kwargs else []
    name = op.func._opname
    kind = op.kind
    assert kind is not None
    written = _written(op, args, kwargs)
    ids = {id(t) for t in written}
    # An in-place operation returns the tensor that it wrote, which must not count twice.
    write_bytes = sum(map(size_bytes, written))
    write_bytes += sum(size_bytes(t) for t in outputs if id(t) not in ids)
    overwritten = ids if name in _OVERWRITE or "out" in kwargs else ()
    read_bytes = sum(size_bytes(t) for t in (*inputs, *named) if id(t) not in overwritten)
    if kind == "copy":
        # Both cross the host's bus if the two sides differ.
        devices = {t.fake_device.type for t in (*inputs, *outputs)}
        kind = "host_copy" if len(devices) > 1 else "copy"
    # A factory such as `full` has no inputs: its result tells the dtype. An addend may be in fp32, where factors are not.
    first = inputs[name in _WITH_ADDEND] if inputs else outputs[0]
    shapes = _lists(name, args) if kind == "optimizer" else _shapes(name, kind, inputs, outputs)
    causal = False
    if kind in ("attention", "attention_backward"):
        if name.startswith("_varlen_attn"):
            length = argument_of(op.func, "max_q", args, kwargs)
            before, _ = argument_of(op.func, "window_size", args, kwargs) or (-1, -1)
            # A sliding window counts as attention over `window` keys.
            keys = min(length, before + 1) or length
            # Packed documents are priced as if each filled its sequence: how long they are is in the data alone.
            shapes = tuple(
                (tokens // length, h, keys if i else length, *k)
                for i, (tokens, h, *k) in enumerate(shapes)
            )
        flops = attention_flops(kind, shapes)
        causal = bool(argument_of(op.func, "is_causal", args, kwargs))
    elif name == "_grouped_mm":
        # The groups share the tokens or, for weights' gradients, the sums over tokens.
        flops = 2 * inputs[0].numel() * inputs[1].shape[-1]
    else:
        flops = _flops(op, args, kwargs, result)
    return Kernel(
        name=op.name,
        kind=kind,
        shapes=shapes,
        dtype=str(first.dtype)[6:],
        flops=flops,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        host=host,
        num_launches=_launches(name, args),
        causal=causal,
    )


def size_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor covers."""
    size = tensor.dtype.itemsize
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        # A stride of 0 is an expanded dimension, whose elements are one in memory.
        if stride:
            size *= length
        elif length == 0:
            return 0
    return size


def _written(op: Operator, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    # Fused Adam's schema says that gradients are written to: they are where it also unscales them.
    names = (name for name in op.written if name != "grads")
    return list(tensors_in(argument_of(op.func, name, args, kwargs) for name in names))


def argument_of(func: Any, which: int | str, args: Any, kwargs: Any) -> Any:
    """Return an argument of a call by its index or name, or its default.

    None if the operator has no such argument.
    """
    for index, argument in enumerate(func._schema.arguments):
        if which in (index, argument.name):
            return (
                args[index]
                if index < len(args)
                else kwargs.get(argument.name, argument.default_value)
            )
    return None


def _shapes(
    name: str, kind: KernelKind, inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the operands that the cost of a kernel depends on."""
    if name == "_grouped_mm":
        # As a batch of equal matmuls: tokens (R, I) times (e, I, O), or sums over tokens, (O, R) times (R, I).
        (m, k), (*groups, _, n) = inputs[0].shape, inputs[1].shape
        if groups:
            m = -(-m // groups[0])
        else:
            groups = outputs[0].shape[:1]
            k = -(-k // groups[0])
        return (groups[0], m, k), (groups[0], k, n)
    if kind == "matmul":
        # The addend comes before the two factors.
        start = 1 if name in _WITH_ADDEND else 0
        operands = inputs[start : start + 2]
    elif kind in ("attention", "attention_backward"):
        # Backward takes the incoming gradient first, then q, k, v.
        operands = inputs[1:4] if kind == "attention_backward" else inputs[:3]
    elif kind == "recurrence":
        # The backward pass takes the gradients of the output and the last state first. Strengths are (B, S, H), the first state (B, H, K, V).
        q, _, v, gates, *rest = inputs[2:] if name.endswith("backward") else inputs
        operands = [q, v, gates, *rest[: rest[0].ndim == 3]]
    else:
        operands = inputs[:2] or outputs[:1]
    return tuple(tuple(t.shape) for t in operands)


def _flops(op: Operator, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a call by torch's formulas; 0 if there is none.

    A formula knows each output by its place, also that of an input that needs no gradient (None).
    """
    formula: Callable[..., int] | None = flop_registry.get(op.func._overloadpacket)
    if formula is None:
        return 0
    # FLOP formulas take the call's arguments, and know no `out` and no dtype of the result.
    args = [value for value in args if not isinstance(value, torch.dtype)]
    known = {k: v for k, v in kwargs.items() if k != "out"}
    return int(formula(*args, **known, out_val=result))


def _launches(name: str, args: Any) -> int:
    """Return the number of kernels that a call launches."""
    # A foreach operation packs tensors into launches; all others launch a fixed number of kernels.
    over_lists = name.startswith(("_foreach_", "_fused_adam"))
    return list_launches(_lists(name, args)) if over_lists else _LAUNCHES.get(name, 1)


# MultiTensorApply.cuh: how many tensors a launch takes, by the number of lists, in chunks of 65,536 elements.
_TENSORS_AT_ONCE = (110, 64, 48, 36, 30)
_CHUNK = 65_536


def _lists(name: str, args: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the arguments of `titan.sim.record.trace.list_launches` for an operation over lists of tensors."""
    lists = lists_in(args)
    first = lists[0] if lists else []
    # Each tensor is cut separately, so many small tensors make as many chunks.
    chunks = sum(math.ceil(t.numel() / _CHUNK) for t in first)
    at_once = _TENSORS_AT_ONCE[min(max(len(lists), 1), len(_TENSORS_AT_ONCE)) - 1]
    return (_LAUNCHES.get(name, 1), at_once), (len(first), chunks)


def lists_in(args: Any) -> list[Any]:
    """Return the lists of tensors among arguments."""
    return [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]


def workspace_bytes(op: Operator, args: Any) -> list[int]:
    """Return the sizes of the buffers that a kernel takes while it runs.

    FlashAttention's backward pass (flash_api.cpp) adds up the gradient of queries in fp32, and
    makes gradients of keys and values for each query head.
    """
    if op.name == "torch_attn::_varlen_attn_backward":  # (tokens, heads, size)
        q, k = (x.transpose(0, 1)[None] for x in args[1:3])
    elif op.name == "aten::_scaled_dot_product_flash_attention_backward":
        q, k = args[1:3]
    elif op.kind == "recurrence":
        return _recurrence_workspace(op, args)
    else:
        return []
    (batch, heads, length, size), (_, groups, keys, _) = q.shape, k.shape
    # Sequences are padded to 128 queries and heads to 32 channels: softmax_d and dq_accum, in fp32.
    queries = batch * heads * (length + -length % 128)
    sizes = [4 * queries, 4 * queries * (size + -size % 32)]
    if groups != heads:
        sizes += 2 * [batch * keys * heads * size * args[1].dtype.itemsize]
    return sizes


def _recurrence_workspace(op: Operator, args: Any) -> list[int]:
    """Return the sizes of the buffers of linear attention: the states, corrected keys and values, and the same again for gradients."""
    backward = op.func._opname.endswith("backward")
    q, _, v = args[2:5] if backward else args[:3]
    (batch, length, heads, v_size), k_size = v.shape, q.shape[-1]
    states = batch * -(-length // RECURRENCE_CHUNK) * heads * k_size * v_size
    rows = batch * length * heads * (k_size + 2 * v_size)
    return (1 + backward) * [v.dtype.itemsize * states, v.dtype.itemsize * rows]


def _logsumexp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """Compute logsumexp by the operations of ATen's ReduceOps.cpp, so that their memory is recorded."""
    largest = _aten.amax.default(x, dims, True)
    flat = largest if keepdim else _aten.squeeze.dims(largest, dims)
    # A row of -inf must give -inf, and not the nan of -inf - -inf.
    _aten.masked_fill_.Scalar(flat, _aten.eq.Scalar(_aten.abs.default(flat), math.inf), 0)
    total = _aten.sum.dim_IntList(
        _aten.exp_.default(_aten.sub.Tensor(x, largest)), dims, keepdim
    )
    return _aten.add_.Tensor(_aten.log_.default(total), flat)


# Operators that run others inside, whose memory counts: logsumexp holds a whole copy of its input for a moment.
EXPANDED: dict[Any, Callable[..., Any]] = {_aten.logsumexp.default: _logsumexp}
