"""Loss of an indexer: how far its scores are from what attention looks at (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

For each query t, the target p[t] is the mean of the heads' softmax over its keys, which sums up to 1, and q[t] is the softmax of the
indexer's scores over the same keys:

    loss = coefficient / tokens x sum over t of KL(p[t] || q[t]) = sum over s of p[t, s] (log p[t, s] - log q[t, s])

The keys are all that the query may see, in the stage "indexer", or the chosen ones, in the stage "joint". With a choice for each key/value
head, the target is the mean of that head's queries, and the loss is the mean over the choices. Attention is not trained by it, and the
indexer by nothing else.

The gradient in the scores is coefficient / tokens x (q - p). Like the terms that balance experts (models/common/moe.py), it enters
the backward pass of attention: once for each micro-batch, and divided by the tokens of the global batch, so that every layout computes
the same. Tensor-parallel ranks have some heads each, and sum the targets; then each computes the whole gradient.

B batch, S queries, T keys, H heads, G choices of a query, R queries at a time
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class IndexerLoss(torch.autograd.Function):
    """Identity on the output of attention, whose backward pass adds the indexer's gradients.

    Its arguments are the output; queries (B, S, I, D), keys (B, T, D) and weights (B, S, I) or None of the indexer; scaled queries and
    keys of attention and the choice, without gradients; the keys that the queries may see; and the layer's `SparseAttention`.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *rest: Any) -> Tensor:
        *tensors, ctx.visible, ctx.sparse = rest
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, w, *target = ctx.saved_tensors  # once: a recomputation gives each tensor once
        scored = [x for x in (q, k, w) if x is not None]
        found = [torch.zeros_like(x, dtype=torch.float32) for x in scored]
        if ctx.sparse.loss_coeff:
            _add_gradients(found, scored, target, ctx.visible, ctx.sparse)
        of_index = [total.to(x.dtype) for total, x in zip(found, scored, strict=True)]
        of_index += [None] * (3 - len(of_index))
        return *grads, *of_index, *[None] * 5


def _add_gradients(
    found: list[Tensor], scored: list[Tensor], target: list[Tensor], visible: Any, sparse: Any
) -> None:
    """Add the gradients of the loss to those of the indexer's queries, keys and weights, and its value to the layer's sums."""
    q_BHSK, k_BHTK, chosen_BGSN = target
    if k_BHTK.shape[2] < visible.first_BT.shape[1]:
        k_BHTK = sparse.whole(k_BHTK, 2)
    number = chosen_BGSN.shape[1]
    factor = sparse.loss_coeff / sparse.num_tokens / number
    for rows in visible.chunks():
        seen = visible.mask(rows)
        is_chosen = visible.chosen(chosen_BGSN[:, :, rows], rows)
        over = seen if sparse.stage == "indexer" else is_chosen
        p_BGRT, mass_BGR = _target(q_BHSK[:, :, rows], k_BHTK, seen, is_chosen, over, sparse)
        q, k, *w = (x.detach().requires_grad_() for x in _rows(scored, rows))
        with torch.enable_grad():
            scores_BGRT = sparse.score(q, k, *(w or [None]))
        log_q = scores_BGRT.detach().masked_fill(~over, -torch.inf).log_softmax(-1)
        grads = torch.autograd.grad(scores_BGRT, [q, k, *w], (log_q.exp() - p_BGRT) * factor)
        totals = _rows(found, rows)
        for total, grad in zip(totals, grads, strict=True):
            total += grad
        kl = (p_BGRT.xlogy(p_BGRT) - p_BGRT * log_q.masked_fill(~over, 0)).sum()
        queries = torch.full_like(kl, mass_BGR.numel() / number)
        sums = torch.stack([kl / number, mass_BGR.sum() / number, queries])
        sparse.sums = sparse.sums + sums


def _rows(tensors: list[Tensor], rows: slice) -> list[Tensor]:
    """Return the indexer's queries and weights of some queries, and all keys."""
    return [x if n == 1 else x[:, rows] for n, x in enumerate(tensors)]


def _target(
    q_BHRK: Tensor,
    k_BHTK: Tensor,
    seen: Tensor,
    is_chosen: Tensor,
    over: Tensor,
    sparse: Any,
) -> tuple[Tensor, Tensor]:
    """Return the target over the keys of `over`, (B, G, R, T), and the mass of dense attention in the choice, (B, G, R)."""
    heads, number = q_BHRK.shape[1], is_chosen.shape[1]
    k_BHTK = k_BHTK.repeat_interleave(heads // k_BHTK.shape[1], dim=1)
    scores = q_BHRK.float() @ k_BHTK.float().mT

    def attention(keys: Tensor) -> Tensor:
        return scores.masked_fill(~sparse.of_heads(keys, heads), -torch.inf).softmax(-1)

    # No more than three tensors of this size exist at once, which the estimate of memory knows.
    mass = (attention(seen) * sparse.of_heads(is_chosen, heads)).sum(-1, keepdim=True)
    both = torch.cat([attention(over), mass], dim=-1)
    total = both.new_zeros(len(both), number, *both.shape[2:])
    total.index_add_(1, sparse.choices(number, heads).to(both.device), both)
    if heads < sparse.heads:
        dist.all_reduce(total, group=sparse.tp.get_group())
    total = total * (number / sparse.heads)
    return total[..., :-1], total[..., -1]
