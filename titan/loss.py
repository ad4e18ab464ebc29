"""Cross entropy in chunks: logits exist whole only in the model's precision, never in fp32.

Over N positions with vocabulary V, the plain loss in bf16 training holds N x V logits in bf16, again in fp32, and
their log-probabilities in fp32: ten bytes a logit. Here each chunk of rows goes to fp32 by itself, and its gradient
(softmax minus one-hot) is worked out there and then, in the logits' precision: four bytes a logit in all, and
the backward pass only scales what is there. (The idea is known from Liger Kernel, arXiv:2410.10989.)

Under tensor parallelism the logits may stay split over the vocabulary: ranks then exchange three numbers a row, not
the row (Megatron-LM, arXiv:1909.08053, section 3).

N positions, C of a chunk, V vocabulary, or this rank's part of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan.data.packing import IGNORED


@dataclass(frozen=True)
class VocabularyShard:
    """Logits split over the vocabulary (loss parallel): this rank's begin at `start`; `group` holds all of them."""

    group: dist.ProcessGroup
    start: int


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, chunk: int, shard: VocabularyShard | None
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
        grad_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        for begin in range(0, logits_NV.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            valid_C = labels_N[rows] != IGNORED
            log_p_CV = F.log_softmax(logits_NV[rows], dim=-1, dtype=torch.float32)
            target_C, is_mine_C = labels_N[rows].clamp(min=0), valid_C
            if shard is not None:
                target_C = target_C - shard.start
                is_mine_C = valid_C & (target_C >= 0) & (target_C < log_p_CV.shape[1])
                target_C = target_C.clamp(0, log_p_CV.shape[1] - 1)
            log_p_target_C = log_p_CV.gather(1, target_C[:, None])[:, 0]
            scale_C = valid_C.float()  # of this rank's softmax in that of the whole vocabulary
            if shard is not None:
                log_p_target_C, correction_C = _across_ranks(
                    logits_NV[rows], log_p_CV, log_p_target_C, is_mine_C, shard.group
                )
                scale_C = scale_C * correction_C.exp()
            loss -= log_p_target_C.masked_fill(~valid_C, 0.0).sum()
            if grad_NV is not None:
                p_CV = log_p_CV.exp_().mul_(scale_C[:, None])
                p_CV.scatter_add_(1, target_C[:, None], -is_mine_C.float()[:, None])
                grad_NV[rows] = p_CV
        ctx.grad_NV = grad_NV
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_NV, ctx.grad_NV = ctx.grad_NV, None
        if grad_NV is None:
            raise RuntimeError("this loss keeps its gradient for one backward pass only")
        return (
            grad_NV.mul_(grad_output),
            None,
            None,
            None,
        )  # in place: the largest tensor of the step


def _across_ranks(
    logits_CV: Tensor,
    log_p_CV: Tensor,
    log_p_target_C: Tensor,
    is_mine_C: Tensor,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target in the whole vocabulary, and what to add to this rank's log-probabilities.

    Two all-reduces of one and two numbers a row: the largest log-sum-exp; then the sums of the ranks'
    exponentials and of the target's logit, which one rank has.
    """
    lse_C = logits_CV.amax(dim=-1).float() - log_p_CV.amax(dim=-1)
    largest_C = lse_C.clone()
    dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group)
    target_logit_C = torch.where(is_mine_C, log_p_target_C + lse_C, 0.0)
    sums_2C = torch.stack([(lse_C - largest_C).exp(), target_logit_C])
    dist.all_reduce(sums_2C, group=group)
    whole_C = largest_C + sums_2C[0].log()
    return sums_2C[1] - whole_C, lse_C - whole_C


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, chunk_tokens: int, shard: VocabularyShard | None = None
) -> Tensor:
    """Sum of the cross entropy in nats over the valid labels, a scalar in fp32, the same on every rank of a shard.

    logits (..., V) in any floating dtype, or this rank's columns (..., V/tp) with `shard`; labels (...) int64
    in the whole vocabulary, IGNORED where not trained on. Differentiable once in the logits.
    """
    logits_NV = logits.reshape(-1, logits.shape[-1])
    return _ChunkedCrossEntropy.apply(logits_NV, labels.reshape(-1), chunk_tokens, shard)  # pyright: ignore[reportReturnType]
