"""Kernels of the package flash-linear-attention (https://github.com/fla-org/flash-linear-attention) for linear attention on GPUs.

They are operators of torch, so that a block with linear attention compiles whole. The backward pass calls the forward pass once more
and keeps nothing but the inputs. The state is in fp32, products are in 16 bits.

B batch, S positions, H value heads, G query/key heads, K size of a key, V size of a value, N documents of a batch
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from titan.parallel.torch_compat import GPU_TYPES, compute_capability

_MOST_CHANNELS = 256  # of a key, which the kernels take


def has_kernel(q: Tensor, v: Tensor, gates: Tensor | None, betas: Tensor | None) -> bool:
    """Return whether a kernel computes linear attention with these arguments of `linear_attention`.

    There is none in fp32, for gates of channels without the delta rule, and where torch is to be deterministic.
    """
    return (
        v.device.type in GPU_TYPES
        and v.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= _MOST_CHANNELS
        and (betas is not None or (gates is not None and gates.ndim == 3))
        and not torch.are_deterministic_algorithms_enabled()
        and (v.device.type != "cuda" or is_installed())
    )


@cache
def is_installed() -> bool:
    """Return whether the package is there, and warn once if it would refuse this GPU."""
    if find_spec("fla") is None:
        return False
    # Its backward pass is wrong on Hopper with these versions of Triton, and it raises an error there (its issue 640).
    is_refused = (
        compute_capability("cuda")[0] == 9
        and (3, 4)
        <= (triton := tuple(map(int, re.findall(r"\d+", version("triton")))))
        < (3, 7, 1)
        and find_spec("tilelang") is None
    )
    if is_refused:
        warnings.warn(
            f"linear attention runs in plain torch: on this GPU, flash-linear-attention needs triton 3.7.1 or newer, as in torch 2.13 "
            f"(this is {'.'.join(map(str, triton))}), or the package tilelang",
            stacklevel=2,
        )
    return not is_refused


def attend_with_kernel(
    q_BGSK: Tensor,
    k_BGSK: Tensor,
    v_BHSV: Tensor,
    gates: Tensor | None,
    betas_BHS: Tensor | None,
    *,
    scale: float,
    starts_BS: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention by a kernel, as titan/contrib/transformers/linear_attention.py does in plain torch.

    Args:
        q_BGSK: queries.
        k_BGSK: keys.
        v_BHSV: values, in 16 bits.
        gates: logarithms of what remains of the state, (B, H, S) or (B, H, S, K). None: all remains.
        betas_BHS: strengths of the delta rule. None: no delta rule.
        scale: factor of the output.
        starts_BS: whether a document starts at a position, bool. None: no documents.
        state: state before the first position, or None.

    Returns:
        The output, (B, H, S, V), and the state after the last position, (B, H, K, V), in fp32.
    """
    v_size, (batch, k_size) = v_BHSV.shape[-1], (len(q_BGSK), q_BGSK.shape[-1])
    heads, dtype = v_BHSV.shape[1], v_BHSV.dtype
    if betas_BHS is None:
        copies = heads // q_BGSK.shape[1]
        q_BGSK, k_BGSK = (x.repeat_interleave(copies, dim=1) for x in (q_BGSK, k_BGSK))
    elif gates is None:
        gates = torch.zeros_like(betas_BHS, dtype=torch.float32)
    assert gates is not None
    if state is None:
        state = torch.zeros(batch, heads, k_size, v_size, device=v_BHSV.device)
    first = state.float()
    if starts_BS is not None:
        first = first.masked_fill(starts_BS[:, 0, None, None, None], 0)
    tensors = [x.to(dtype).transpose(1, 2) for x in (q_BGSK, k_BGSK, v_BHSV)]
    betas = None if betas_BHS is None else betas_BHS.float().transpose(1, 2)
    out_BSHV, last = _attend(
        *tensors, gates.float().transpose(1, 2), betas, first, starts_BS, scale
    )
    return out_BSHV.transpose(1, 2), last


@torch.library.custom_op("titan::linear_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    betas: Tensor | None,
    first: Tensor,
    starts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output, (B, S, H, V), and the states after each sequence, (B, H, K, V). Heads come after positions."""
    documents = _Documents(starts)
    given = [*documents.flat(q, k, v, gates, betas), documents.spread(first, documents.first_B)]
    out, last = _call(given, documents, scale)
    return out.view_as(v), documents.pick(last, documents.last_B)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gates: Any, betas: Any, first: Tensor, *_: Any) -> Any:
    return torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(first)


@torch.library.custom_op("titan::linear_attention_backward", mutates_args=())
def _attend_backward(
    grad_out: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    betas: Tensor | None,
    first: Tensor,
    starts: Tensor | None,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of q, k, v, gates, betas if there are any, and first."""
    documents = _Documents(starts)
    given = [*documents.flat(q, k, v, gates, betas), documents.spread(first, documents.first_B)]
    leaves = [None if x is None else x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        outs = _call(leaves, documents, scale)
    [grad_out] = documents.flat(grad_out.contiguous())
    *grads, grad_first = torch.autograd.grad(
        outs,
        [x for x in leaves if x is not None],
        [grad_out, documents.spread(grad_last, documents.last_B)],
    )
    shaped = [x.view(q.shape[:2] + x.shape[2:]) for x in grads]
    return [*shaped, documents.pick(grad_first, documents.first_B)]


@_attend_backward.register_fake
def _(grad_out: Any, grad_last: Any, *given: Any) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in given[:6]
        if x is not None
    ]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> Any:
    grads = _attend_backward(grad_out, grad_last, *ctx.saved_tensors, ctx.scale)
    betas = None if ctx.saved_tensors[4] is None else grads[4]
    return *grads[:4], betas, grads[-1], None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


class _Documents:
    """The documents of a batch as the kernels want them: one after the other, with a state for each."""

    def __init__(self, starts_BS: Tensor | None) -> None:
        self.cu_seqlens = self.first_B = self.last_B = None
        if starts_BS is None:
            return
        starts = starts_BS.clone()
        starts[:, 0] = True
        ends = starts.new_full((1,), starts.numel(), dtype=torch.int64)
        self.cu_seqlens = torch.cat([starts.flatten().nonzero().flatten(), ends])
        numbers_BS = starts.flatten().cumsum(0).view_as(starts) - 1
        self.first_B, self.last_B = numbers_BS[:, 0], numbers_BS[:, -1]

    def flat(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Return the sequences of a batch as one: (B, S, ...) -> (1, B * S, ...)."""
        if self.cu_seqlens is None:
            return tensors
        return tuple(None if x is None else x.flatten(0, 1)[None] for x in tensors)

    def spread(self, x_B: Tensor, places_B: Any) -> Tensor:
        """Return a state for each document, of zeros but at these places: (B, ...) -> (N, ...)."""
        if self.cu_seqlens is None:
            return x_B
        x_N = x_B.new_zeros(len(self.cu_seqlens) - 1, *x_B.shape[1:])
        x_N[places_B] = x_B
        return x_N

    def pick(self, x_N: Tensor, places_B: Any) -> Tensor:
        """Return the states of the documents at these places: (N, ...) -> (B, ...)."""
        return x_N if self.cu_seqlens is None else x_N[places_B]


def _call(tensors: Sequence[Any], documents: _Documents, scale: float) -> tuple[Tensor, Tensor]:
    """Call the kernel for these gates and strengths, with q, k, v, gates, strengths or None, and the state before each document."""
    q, k, v, gates, betas, first = tensors
    name, more = "kda" if gates.ndim == 4 else "gated_delta_rule", {"beta": betas}
    if betas is None:
        name, more = "simple_gla", {}
    kernel = getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
    return kernel(
        q,
        k,
        v,
        g=gates,
        **more,
        scale=scale,
        initial_state=first,
        output_final_state=True,
        cu_seqlens=documents.cu_seqlens,
    )
