"""Attention to one block of keys with its logsumexp, by which blocks can be merged, and its gradient.

torch's public scaled_dot_product_attention does not return the logsumexp. The operators under it do, and have the same schemas
in torch 2.11 to 2.15; only this file calls them. A CPU has one kernel. On an accelerator it is FlashAttention (arXiv:2307.08691)
in 16 bits, or cuDNN if that is faster, and otherwise the memory-efficient kernel. cuDNN on an H200 took 0.6 of FlashAttention's
time (bf16, 64k tokens, 32 heads of 128).

The gradient of a block is exact if the kernel gets the output and the logsumexp over all keys: it recomputes the block's
probabilities exp(qk - logsumexp), which are then those of the whole softmax. A sink (StreamingLLM, arXiv:2309.17453; learned for
each head in gpt-oss, arXiv:2508.10925) is such a block, with one key, whose logit is a parameter and whose value is zero.

B batch, S queries, T keys, H query heads, G key/value heads, K head dim, N = B * S tokens of a flattened batch
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from .torch_compat import compute_capability

_aten = torch.ops.aten

# The memory-efficient kernel wants the queries of the logsumexp padded to a multiple of it (kAlignLSE in mem_eff_attention).
_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT = 16


class AttentionSpec(NamedTuple):
    """Keys that a query sees.

    Attributes:
        causal: a query sees no key after itself.
        window: number of the newest keys that a query sees, its own included. 0: all.
    """

    causal: bool = True
    window: int = 0

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a boolean mask of the queries and keys at these positions. Shapes are broadcast."""
        sees = query >= key if self.causal else torch.ones_like(query == key)
        return sees & (query - key < self.window) if self.window else sees

    @property
    def flash_window(self) -> tuple[int, int]:
        """Return the numbers of keys before and after itself that a query sees: -1 for all, as in FlashAttention."""
        return (self.window - 1, 0) if self.causal else (-1, -1)


CAUSAL = AttentionSpec()


def attend(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    *,
    spec: AttentionSpec,
    scale: float | None,
    mask_BST: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, H, S, K) in q's dtype and its natural logsumexp (B, H, S).

    The logsumexp is in fp32 (fp64 for fp64). Query head h reads key/value head h // (H // G).

    Args:
        q_BHSK: queries.
        k_BGTK: keys.
        v_BGTK: values.
        spec: keys that a query sees. S equals T if it is causal.
        scale: None is 1 / sqrt(K).
        mask_BST: the keys that a query sees, in place of `spec`. A query without keys has output 0 and logsumexp -inf.
        ends: cu_seqlens of FlashAttention's sequences in the flattened batch, see `varlen_attention`; only in 16 bits on a GPU.
    """
    mask_BST, ends = _windowed(q_BHSK, spec, mask_BST, ends)
    if ends is not None:
        length, flat = q_BHSK.shape[2], [_flat(x) for x in (q_BHSK, k_BGTK, v_BGTK)]
        how: dict[str, Any] = {"ends": ends, "length": length, "spec": spec, "scale": scale}
        out, lse_HN = varlen_attention(*flat, **how)
        return _unflat(out, length), lse_HN.unflatten(1, (-1, length)).transpose(0, 1)
    kernel, causal = choose_kernel(q_BHSK, masked=mask_BST is not None), spec.causal
    if kernel == "flash":
        out_BHSK, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q_BHSK, k_BGTK, v_BGTK, 0.0, causal, scale=scale
        )
        return out_BHSK, lse
    if kernel == "cudnn":
        out_BHSK, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q_BHSK, k_BGTK, v_BGTK, None, True, 0.0, causal, scale=scale
        )
        return out_BHSK, lse.flatten(2)  # (B, H, S, 1)
    # The kernels below take no grouped heads.
    k_BHTK, v_BHTK = _expand(k_BGTK, q_BHSK.shape[1]), _expand(v_BGTK, q_BHSK.shape[1])
    bias = None if mask_BST is None else _bias(mask_BST, q_BHSK)
    causal = causal and bias is None
    if kernel == "cpu":
        out_BHSK, lse_BHS = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSK, k_BHTK, v_BHTK, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        out_BHSK, lse_BHS, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BHSK, k_BHTK, v_BHTK, bias, True, 0.0, causal, scale=scale
        )
        # Cut off the padding of queries.
        lse_BHS = lse_BHS[..., : q_BHSK.shape[2]]
    if mask_BST is None:
        return out_BHSK, lse_BHS
    # Kernels disagree about a query that sees no key.
    sees_B1S = mask_BST.any(-1)[:, None]
    out_BHSK = torch.where(sees_B1S[..., None], out_BHSK, 0.0)
    return out_BHSK, lse_BHS.masked_fill(~sees_B1S, float("-inf"))


def attend_backward(
    grad_BHSK: Tensor,
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out_BHSK: Tensor,
    lse_BHS: Tensor,
    *,
    spec: AttentionSpec,
    scale: float | None,
    mask_BST: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by this block, in the shapes and dtype of the inputs.

    Args:
        grad_BHSK: gradient of the output over all keys.
        q_BHSK: queries.
        k_BGTK: keys of this block.
        v_BGTK: values of this block.
        out_BHSK: output over all keys.
        lse_BHS: logsumexp over all keys, fp32.
        spec: as for `attend`.
        scale: as for `attend`.
        mask_BST: as for `attend`.
        ends: as for `attend`.
    """
    mask_BST, ends = _windowed(q_BHSK, spec, mask_BST, ends)
    if ends is not None:
        rows = [_flat(x) for x in (grad_BHSK, q_BHSK, k_BGTK, v_BGTK, out_BHSK)]
        lse_HN, length = lse_BHS.transpose(0, 1).flatten(1).contiguous(), q_BHSK.shape[2]
        how: dict[str, Any] = {"ends": ends, "length": length, "spec": spec, "scale": scale}
        dq, dk, dv = (_unflat(x, length) for x in varlen_backward(*rows, lse=lse_HN, **how))
        return dq, dk, dv
    kernel = choose_kernel(q_BHSK, masked=mask_BST is not None)
    sizes = q_BHSK.shape[2], k_BGTK.shape[2]
    causal, lse_BHS = spec.causal, lse_BHS.contiguous()  # some kernels assume it
    inputs = (grad_BHSK, q_BHSK, k_BGTK, v_BGTK)
    if kernel == "flash":
        state = torch.empty(2, dtype=torch.uint64, device=q_BHSK.device)  # of dropout: not read
        return _aten._scaled_dot_product_flash_attention_backward(
            *inputs,
            out_BHSK,
            lse_BHS,
            None,
            None,
            *sizes,
            0.0,
            causal,
            state,
            state,
            scale=scale,
        )
    state = torch.empty((), dtype=torch.int64, device=q_BHSK.device)
    if kernel == "cudnn":
        lse_BHS1, absent = lse_BHS[..., None], (None, None, None)  # a bias and documents
        return _aten._scaled_dot_product_cudnn_attention_backward(
            *inputs, out_BHSK, lse_BHS1, state, state, *absent, *sizes, 0.0, causal, scale=scale
        )
    k_BHTK, v_BHTK = _expand(k_BGTK, q_BHSK.shape[1]), _expand(v_BGTK, q_BHSK.shape[1])
    inputs = (grad_BHSK, q_BHSK, k_BHTK, v_BHTK)
    bias = None if mask_BST is None else _bias(mask_BST, q_BHSK)
    causal = spec.causal and bias is None
    if kernel == "cpu":
        dq_BHSK, dk_BHTK, dv_BHTK = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, out_BHSK, lse_BHS, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        needed = [True, True, True, False]  # of q, k, v and bias
        lse_padded = F.pad(lse_BHS, (0, -sizes[0] % _LSE_ALIGNMENT))
        dq_BHSK, dk_BHTK, dv_BHTK, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *inputs, bias, out_BHSK, lse_padded, state, state, 0.0, needed, causal, scale=scale
        )
    # The gradients of a head's copies are added up.
    groups = k_BGTK.shape[1]
    return dq_BHSK, _sum_groups(dk_BHTK, groups), _sum_groups(dv_BHTK, groups)


def _bias(mask_BST: Tensor, q_BHSK: Tensor) -> Tensor:
    """Return the tensor to add to the scores, (B, H, S, T): 0 for a visible key, else -inf. Heads share its memory."""
    (size, length), heads = mask_BST.shape[1:], q_BHSK.shape[1]
    # The memory-efficient kernel reads rows of the bias in whole vectors of 16 bytes.
    room = -(-length // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias_BST = q_BHSK.new_zeros(len(mask_BST), size, room)[..., :length]
    bias_B1ST = bias_BST.masked_fill_(~mask_BST, float("-inf"))[:, None]
    return bias_B1ST.expand(len(q_BHSK), heads, -1, -1)


def _windowed(
    q_BHSK: Tensor, spec: AttentionSpec, mask_BST: Tensor | None, ends: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask or cu_seqlens, with which a kernel computes a window, unless the caller made either."""
    if not spec.window or mask_BST is not None or ends is not None:
        return mask_BST, ends
    batch, length = q_BHSK.shape[0], q_BHSK.shape[2]
    if choose_kernel(q_BHSK) in ("flash", "cudnn"):
        return None, whole_rows(batch, length, q_BHSK.device)
    at_S = torch.arange(length, device=q_BHSK.device)
    return spec.sees(at_S[:, None], at_S)[None], None


def whole_rows(batch: int, length: int, device: torch.device) -> Tensor:
    """Return the cu_seqlens of `batch` sequences of `length` tokens, int32 (batch + 1,) on `device`."""
    return length * torch.arange(batch + 1, dtype=torch.int32, device=device)


def _flat(x_BHSK: Tensor) -> Tensor:
    """Return tokens and heads (B * S, H, K), as a view of the memory that the projection wrote."""
    return x_BHSK.transpose(1, 2).flatten(0, 1)


def _unflat(x: Tensor, length: int) -> Tensor:
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ends: Tensor,
    length: int,
    spec: AttentionSpec,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return FlashAttention's output (N, H, K) and logsumexp (H, N), for sequences of different lengths.

    The sequences follow each other in a flattened batch. The logsumexp has no gradient.

    Args:
        q: queries, (N, H, K).
        k: keys, (N, G, K).
        v: values, (N, G, K).
        ends: cu_seqlens, int32 (sequences + 1,): the first token of each sequence, and N.
        length: length of the longest sequence, or more.
        spec: keys of its sequence that a query sees.
        scale: None is 1 / sqrt(K).
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    varlen: Any = varlen_attn
    options: dict[str, Any] = {"scale": scale, "return_aux": AuxRequest(lse=True)}
    if _varlen_names_grouped_heads():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    window = spec.flash_window
    return varlen(q, k, v, ends, ends, length, length, window_size=window, **options)


def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    lse: Tensor,
    ends: Tensor,
    length: int,
    spec: AttentionSpec,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `varlen_attention`.

    Args:
        grad: gradient of the output over all keys.
        q: as for `varlen_attention`.
        k: as for `varlen_attention`.
        v: as for `varlen_attention`.
        out: output over all keys.
        lse: logsumexp over all keys, fp32 (H, N).
        ends: as for `varlen_attention`.
        length: as for `varlen_attention`.
        spec: as for `varlen_attention`.
        scale: as for `varlen_attention`.
    """
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout: not read
    window = list(spec.flash_window)
    places = (ends, ends, length, length)
    options = (window == [-1, 0], state, scale, window)
    return torch.ops.torch_attn._varlen_attn_backward(
        grad, q, k, v, out, lse, *places, *options
    )


@torch.compiler.assume_constant_result
def _varlen_names_grouped_heads() -> bool:
    """Return whether torch wants an argument for grouped heads, as from 2.12 on. Before, the kernel took them silently."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


_chosen = ExitStack()  # kept open: torch restores its choice when the context ends


def prefer_backend(name: str, device_type: str) -> None:
    """Put a kernel first in torch's attention priority, for this process. Only later backends remain as fallback.

    Args:
        name: "cudnn", "flash", "efficient", "math"; "fa3" or "fa4" for FlashAttention-3 or -4 in place of 2; "auto": torch's order.
        device_type: type of the device, such as "cuda".

    Raises:
        InputError: the device or the installation lacks the kernel.
    """
    if name == "auto":
        return
    from titan.base.untrusted import InputError  # needs pydantic, which helpers alone do not

    problem = f'model.attention_backend: "{name}"'
    if compute_capability(device_type) == (0, 0):
        raise InputError(
            f'{problem} is a kernel of GPUs, and this is "{device_type}"; use "auto"'
        )
    if name in ("fa3", "fa4"):
        try:
            attention.activate_flash_attention_impl(name.upper())
        except (AttributeError, ImportError, ValueError, RuntimeError) as error:
            why = f"torch {torch.__version__} cannot load it ({error})"
            raise InputError(f'{problem}: {why}; install it, or use "auto"') from error
        name = "flash"
    order = ("cudnn", "flash", "efficient", "math")
    backends = [getattr(SDPBackend, f"{n}_attention".upper(), SDPBackend.MATH) for n in order]
    _chosen.enter_context(sdpa_kernel(backends[order.index(name) :], set_priority=True))


def choose_kernel(
    q_BHSK: Tensor, *, masked: bool = False
) -> Literal["cpu", "flash", "cudnn", "efficient"]:
    """Return a kernel. flash and cudnn take grouped heads. Only efficient takes 32 bits and a mask."""
    if q_BHSK.device.type == "cpu":
        return "cpu"
    if masked or q_BHSK.dtype not in (torch.bfloat16, torch.float16):
        return "efficient"
    # cuDNN's limits: heads in multiples of 8 and up to 128, and more than one query.
    fits = q_BHSK.shape[3] % 8 == 0 and q_BHSK.shape[3] <= 128 and q_BHSK.shape[2] > 1
    # cuDNN's gradient differs from run to run.
    if fits and cudnn_is_faster() and not torch.are_deterministic_algorithms_enabled():
        return "cudnn"
    return "flash"


@torch.compiler.assume_constant_result
def cudnn_is_faster() -> bool:
    """Return whether torch's own attention prefers cuDNN, by the rules of its sdp_utils.cpp."""
    # Before 9.15.1 cuDNN reads beyond its inputs if 128 does not divide the lengths (pytorch#169849). Some wheels for
    # CUDA 12 come with older ones.
    return (
        torch.cuda.is_available()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and (torch.backends.cudnn.version() or 0) > 91500
        and torch.cuda.get_device_capability() in ((9, 0), (10, 0), (10, 3))
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )


def match_heads(
    q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, *, has_mask: bool = False
) -> tuple[Tensor, Tensor]:
    """Return keys and values for torch's attention, copied for each query head if no kernel takes grouped heads.

    Without the copies torch would keep S x T scores in memory.
    """
    heads = q_BHSK.shape[1]
    if heads == k_BGTK.shape[1] or _takes_grouped_heads(
        q_BHSK.device.type, q_BHSK.dtype, has_mask
    ):
        return k_BGTK, v_BGTK
    return _expand(k_BGTK, heads), _expand(v_BGTK, heads)


@torch.compiler.assume_constant_result
def _takes_grouped_heads(device_type: str, dtype: torch.dtype, has_mask: bool) -> bool:
    """Return whether a fused kernel takes grouped heads, by the rules of torch's sdp_utils.cpp (2.11 to 2.15)."""
    capability, allowed = compute_capability(device_type), torch.backends.cuda
    # The memory-efficient kernel needs copies. It takes 32 and 16 bits.
    if (
        capability == (0, 0)
        or dtype == torch.float64
        or not allowed.mem_efficient_sdp_enabled()
    ):
        return True
    if dtype == torch.float32 or capability < (8, 0):
        return False
    return allowed.cudnn_sdp_enabled() or (allowed.flash_sdp_enabled() and not has_mask)


def _expand(x_BGTK: Tensor, heads: int) -> Tensor:
    groups = x_BGTK.shape[1]
    return x_BGTK if groups == heads else x_BGTK.repeat_interleave(heads // groups, dim=1)


def _sum_groups(x_BHTK: Tensor, groups: int) -> Tensor:
    return x_BHTK if x_BHTK.shape[1] == groups else x_BHTK.unflatten(1, (groups, -1)).sum(dim=2)
