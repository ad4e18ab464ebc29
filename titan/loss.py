"""Cross entropy in chunks: logits exist whole only in the model's precision, never in fp32.

Over N positions with vocabulary V, the plain loss in bf16 training holds N x V logits in bf16, again in fp32, and
their log-probabilities in fp32: ten bytes a logit. Here each chunk of rows goes to fp32 by itself, and its gradient
(softmax minus one-hot) is worked out there and then, in the logits' precision: four bytes a logit in all, and
the backward pass only scales what is there. (The idea is known from Liger Kernel, arXiv:2410.10989.)

N positions, V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.data.packing import IGNORED


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, chunk: int) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
        with_grad = ctx.needs_input_grad[0]
        grad_NV = torch.empty_like(logits_NV) if with_grad else None
        for start in range(0, logits_NV.shape[0], chunk):
            rows = slice(start, start + chunk)
            log_p_CV = F.log_softmax(logits_NV[rows], dim=-1, dtype=torch.float32)
            labels_C = labels_N[rows]
            loss += F.nll_loss(log_p_CV, labels_C, ignore_index=IGNORED, reduction="sum")
            if grad_NV is not None:
                valid_C1 = (labels_C != IGNORED).unsqueeze(1).float()
                p_CV = log_p_CV.exp_()
                p_CV.scatter_add_(1, labels_C.clamp(min=0).unsqueeze(1), -valid_C1)
                torch.mul(p_CV, valid_C1, out=p_CV)
                grad_NV[rows] = p_CV
        ctx.grad_NV = grad_NV
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_NV, ctx.grad_NV = ctx.grad_NV, None
        if grad_NV is None:
            raise RuntimeError("this loss keeps its gradient for one backward pass only")
        return grad_NV.mul_(grad_output), None, None  # in place: the largest tensor of the step


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, chunk_tokens: int) -> Tensor:
    """Sum of the cross entropy in nats over the valid labels, a scalar in fp32.

    logits (..., V) in any floating dtype; labels (...) int64, IGNORED where not trained on. Differentiable
    once in the logits.
    """
    logits_NV = logits.reshape(-1, logits.shape[-1])
    return _ChunkedCrossEntropy.apply(logits_NV, labels.reshape(-1), chunk_tokens)  # pyright: ignore[reportReturnType]
