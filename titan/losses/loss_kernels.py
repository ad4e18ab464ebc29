"""Elementwise parts of the cross entropy, eager or through torch.compile.

C tokens of a chunk, V vocabulary or this rank's shard of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

# `statistics` returns the log-sum-exp of each token and the logit of its target, in fp32, and a tensor that `gradient` then
# overwrites. `gradient` returns the gradient of the summed loss in the logits: softmax, less one at the target. lse_C is over this
# rank's shard, whole_lse_C over the whole vocabulary, and inf for tokens that are not valid.


def _statistics(logits_CV: Tensor, column_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p_CV = logits_CV.float().log_softmax(dim=-1)
    target_C = logits_CV.gather(1, column_C[:, None])[:, 0].float()
    # From the largest logit: that of a target that does not count may be masked, at -inf.
    max_C, at_C = logits_CV.max(dim=-1)
    return max_C.float() - log_p_CV.gather(1, at_C[:, None])[:, 0], target_C, log_p_CV


def _gradient(
    log_p_CV: Tensor,
    lse_C: Tensor,
    whole_lse_C: Tensor,
    column_C: Tensor,
    is_mine_C: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    log_p_CV.sub_((whole_lse_C - lse_C)[:, None])
    target_C1 = log_p_CV.gather(1, column_C[:, None])
    # exp(x) - 1 in fp32: a probability next to 1 would be 1 in bf16.
    target_C1 = torch.where(is_mine_C[:, None], target_C1.expm1(), target_C1.exp())
    p_CV = log_p_CV if dtype == log_p_CV.dtype else torch.empty_like(log_p_CV, dtype=dtype)
    return torch.exp(log_p_CV, out=p_CV).scatter_(1, column_C[:, None], target_C1.to(dtype))


def _scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


def _fused_statistics(logits_CV: Tensor, column_C: Tensor) -> tuple[Tensor, Tensor]:
    target_C = logits_CV.gather(1, column_C[:, None])[:, 0].float()
    # Inductor finds the online softmax (arXiv:1805.02867) in these operations, and reads the logits once. torch.logsumexp also replaces
    # infinite maxima, which hides the pattern: the logits would be read twice.
    logits_CV = logits_CV.float()
    max_C1 = logits_CV.amax(dim=-1, keepdim=True)
    sum_C1 = (logits_CV - max_C1).exp().sum(dim=-1, keepdim=True)
    # A shard of the vocabulary may be all padding, at -inf: the difference is no number then, but the maximum is.
    lse_C1 = torch.where(max_C1.isinf(), max_C1, max_C1 + sum_C1.log())
    return lse_C1[:, 0], target_C


def _fused_gradient(
    logits_CV: Tensor,
    _: Tensor,
    whole_lse_C: Tensor,
    column_C: Tensor,
    is_mine_C: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    # Compare instead of scatter, so that a compiler fuses it with the exponential.
    columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    is_target_CV = (columns_V == column_C[:, None]) & is_mine_C[:, None]
    return ((logits_CV - whole_lse_C[:, None]).exp() - is_target_CV.float()).to(dtype)


def _fused_scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor * factor).to(dtype)


@dataclass(frozen=True)
class Kernels:
    """The elementwise parts, which a compiler may fuse.

    Attributes:
        statistics: maps logits and target columns to the statistics of each token.
        gradient: maps them to the gradient in the logits.
        scaled: multiplies a tensor by a scalar tensor, into a dtype.
    """

    statistics: Callable[..., tuple[Tensor, Tensor, Tensor]] = _statistics
    gradient: Callable[..., Tensor] = _gradient
    scaled: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _scaled

    @staticmethod
    def compiled(backend: str) -> Kernels:
        """Return the parts through torch.compile: two passes over the logits. Compilation happens at the first call."""
        compiled = partial(torch.compile, backend=backend, fullgraph=True)
        statistics = compiled(_fused_statistics)
        return Kernels(
            statistics=lambda *args: (*statistics(*args), args[0]),
            gradient=compiled(_fused_gradient),
            scaled=compiled(_fused_scaled),
        )
