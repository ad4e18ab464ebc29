"""Mixture of experts in place of a feed-forward layer: a router sends each token to a few of many experts.

Routing works on single tokens, so the module takes whatever part of the batch a rank holds. Only the dispatcher
needs to know which rank holds which token. The file knows nothing of parallelism. titan/parallel/expert.py gives each
rank some of the experts, and replaces `MoE.dispatcher`, which dispatches tokens to their experts and combines the outputs.

The gradients of the terms that balance the experts' loads enter the backward pass in one function (`_RouterTerms`),
divided by counts of the global batch that the trainer sets. So they are the same in every layout, and the loss itself
does not contain them.

B batch, S sequence, T = B S tokens, D model, E experts, e experts of this rank, K experts of a token, F width of an expert;
N = T K copies of tokens to dispatch, R copies that arrived
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.parallel.matmul_fp32 import linear_in_fp32
from titan.parallel.module_kinds import ExpertModule, GroupedExperts, RoutedExperts, RouteSource
from titan.parallel.token_order import host_counts
from titan.parallel.traits import BlockTraits

from .dispatch import count, dispatch, in_chunks, run_experts
from .moe_config import MoEConfig


class Gate(nn.Module):
    """Router's matrix. It computes in fp32 or better, since rounding decides where a token goes."""

    def __init__(self, dim: int, num_experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the router's logits, (B, S, E), in fp32 or better."""
        # bf16 would make scores equal that are not.
        logits_BSE = linear_in_fp32(x_BSD, self.weight)
        return logits_BSE if self.bias is None else logits_BSE + self.bias


class Router(nn.Module):
    """Router, which scores all experts for each token and chooses the best few."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(config.dim, config.num_experts, bias=config.moe_biases)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (T, E), the same normalized to a sum of 1, and the logits' logsumexp (T,), all in fp32 or better."""
        logits_TE = self.gate(x_BSD).flatten(0, 1)
        log_sum_T = logits_TE.logsumexp(-1)
        if self.config.score == "softmax":
            scores_TE = logits_TE.softmax(-1)
            return scores_TE, scores_TE, log_sum_T
        scores_TE = logits_TE.sigmoid()
        return scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True), log_sum_T

    def choose(self, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
        """Return the ids of each token's best experts, (T, K) int64. The bias affects this choice only, not the weights."""
        config = self.config
        # Not a decorator: torch compiles all functions with a wrapper of torch's as one, and optimizers have such, too.
        with torch.no_grad():
            scores_TE = scores_TE + bias_E
            if config.num_groups:
                # A group is as good as the sum of its best experts. Experts of other groups are left out.
                groups_TGe = scores_TE.unflatten(1, (config.num_groups, -1))
                best_TG = groups_TGe.topk(config.group_top_k, dim=-1).values.sum(-1)
                kept_TG = best_TG.topk(config.top_groups, dim=-1).indices
                left_out_TG = torch.ones_like(best_TG, dtype=torch.bool)
                left_out_TG = left_out_TG.scatter(1, kept_TG, False)
                groups_TGe = groups_TGe.masked_fill(left_out_TG[..., None], -torch.inf)
                scores_TE = groups_TGe.flatten(1)
            return scores_TE.topk(config.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the weights of each token's experts, (T, K)."""
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.config.normalize_weights:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.config.route_scale


class Experts(nn.Module, GroupedExperts):
    """SwiGLU of each expert, with weights and biases stacked by expert.

    Attributes:
        chunk_tokens: tokens that pass at a time, see `forward`. 0: all of them.
        grouped: function that multiplies tokens of all experts in one kernel, for `grouped_dtypes`.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.expert_dim, config.dim)
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape).mT.contiguous())
        self.w3 = nn.Parameter(torch.empty(shape))
        self.names: tuple[str, ...] = ("w1", "w2", "w3")
        for name in self.names if config.moe_biases else ():
            bias = nn.Parameter(torch.empty(self.get_parameter(name).shape[:2]))
            self.register_parameter(f"{name}_bias", bias)
            self.names += (f"{name}_bias",)
        self.limit = config.swiglu_limit
        self.chunk_tokens = 0
        self.grouped: Callable[..., Tensor] = grouped_matmuls
        self.grouped_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    def forward(self, tokens_RD: Tensor, counts_e: Tensor) -> Tensor:
        """Apply each expert to its tokens.

        With `chunk_tokens` = n, n tokens pass at a time, and each chunk is recomputed in the backward pass. So the memory of
        saved activations does not grow with the number of tokens that arrive. Outputs and gradients of tokens are the same bits.

        Args:
            tokens_RD: tokens sorted by expert.
            counts_e: number of tokens of each expert, int64.

        Returns:
            The experts' outputs, (R, D).
        """
        weights = tuple(getattr(self, name) for name in self.names)
        return in_chunks(self._products, self.chunk_tokens, tokens_RD, counts_e, *weights)

    def _products(self, tokens_RD: Tensor, counts_e: Tensor, *weights: Tensor) -> Tensor:
        """Return grouped matmuls in bf16, or a loop over the experts in another dtype, with the same bits."""
        is_grouped = tokens_RD.dtype in self.grouped_dtypes and len(tokens_RD) > 0
        products = self.grouped if is_grouped else looped_matmuls
        return products(tokens_RD, counts_e, *weights, limit=self.limit)


def gate(x_RF: Tensor, limit: float) -> Tensor:
    """Return the activation of one half of an expert's hidden channels, which multiplies the other half: silu for limit 0.

    A limit gives gpt-oss's (arXiv:2508.10925): x is clamped from above, and the sigmoid is steeper, which is close to GELU.
    """
    if not limit:
        return F.silu(x_RF)
    x_RF = x_RF.clamp(max=limit)
    return x_RF * torch.sigmoid(1.702 * x_RF)


def gated(x_RF: Tensor, limit: float) -> Tensor:
    """Return the factor of the activated half of the hidden channels: x, or with a limit x clamped to +-limit, plus 1 (gpt-oss)."""
    return x_RF.clamp(-limit, limit) + 1 if limit else x_RF


def grouped_mm(tokens_RI: Tensor, weights_eIO: Tensor, ends_e: Tensor) -> Tensor:
    """Multiply each token by the matrix of its group.

    Args:
        tokens_RI: tokens sorted by group.
        weights_eIO: one matrix for each group.
        ends_e: end of each group in `tokens_RI`, int32.
    """
    return torch._grouped_mm(
        tokens_RI, weights_eIO, offs=ends_e
    )  # public only from torch 2.12 on


def grouped_matmuls(
    tokens_RD: Tensor,
    counts_e: Tensor,
    *weights: Tensor,
    limit: float = 0.0,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_mm,
) -> Tensor:
    """Return the SwiGLU of each token's own expert, silu(x w1) (x w3) w2, by one kernel for all experts (bf16 only).

    Args:
        tokens_RD: tokens sorted by expert.
        counts_e: number of tokens of each expert.
        *weights: matrices of the activated half (e, F, D), of the output (e, D, F) and of the other half (e, F, D), and
            their biases in the same order, (e, F), (e, D), (e, F), or none.
        limit: see `gate`.
        product: grouped matmul, as `grouped_mm`.
    """
    # The kernel wants the ends of groups as int32.
    ends_e = counts_e.cumsum(0, dtype=torch.int32)

    def multiply(tokens_RI: Tensor, weights_eOI: Tensor, bias_eO: Tensor | None) -> Tensor:
        tokens_RO = product(tokens_RI, weights_eOI.mT, ends_e)
        if bias_eO is None:
            return tokens_RO
        # Float8 matmuls pad the groups (titan/parallel/grouped_float8.py).
        return _AddBias.apply(tokens_RO, bias_eO, ends_e, product is not grouped_mm)

    return _swiglu(multiply, tokens_RD, *weights, limit=limit)


def looped_matmuls(
    tokens_RD: Tensor, counts_e: Tensor, *weights: Tensor, limit: float = 0.0
) -> Tensor:
    """Return the result of `grouped_matmuls`, with `weights` as its weights and biases, expert by expert, in any precision."""
    # An expert without tokens takes part, so that its gradient is zeros and not None. unbind, since a gradient of w[i]
    # would be as large as w.
    sizes = [0] * len(counts_e)
    if len(tokens_RD):
        sizes = host_counts(counts_e, num_tokens=len(tokens_RD))
    experts = zip(*(weight.unbind() for weight in weights), strict=True)
    tokens = zip(tokens_RD.split(sizes), experts, strict=True)
    return torch.cat([_swiglu(F.linear, rows, *own, limit=limit) for rows, own in tokens])


def _swiglu(
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    tokens_RD: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    *biases: Tensor,
    limit: float,
) -> Tensor:
    w1_bias, w2_bias, w3_bias = biases or (None, None, None)
    hidden_RF = gate(multiply(tokens_RD, w1, w1_bias), limit)
    hidden_RF = hidden_RF * gated(multiply(tokens_RD, w3, w3_bias), limit)
    return multiply(hidden_RF, w2, w2_bias)


class _AddBias(torch.autograd.Function):
    """Addition of the bias of each token's expert. Its gradient is a matmul with zeros and ones: sums have a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, tokens_RO: Tensor, bias_eO: Tensor, ends_e: Tensor, is_padded: bool
    ) -> Tensor:
        numbers_R = torch.arange(len(tokens_RO), dtype=ends_e.dtype, device=ends_e.device)
        owners_R = torch.searchsorted(ends_e, numbers_R, right=True)
        ctx.save_for_backward(owners_R)
        ctx.num_experts, ctx.is_padded = len(bias_eO), is_padded
        # Padding behind the last group is cut off later, so any bias may be added to it.
        return (
            tokens_RO + bias_eO[owners_R.clamp(max=len(bias_eO) - 1) if is_padded else owners_R]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (owners_R,), (grad_RO,) = ctx.saved_tensors, grads
        experts_e = torch.arange(ctx.num_experts, device=owners_R.device)
        is_own_eR = (experts_e[:, None] == owners_R).to(grad_RO.dtype)
        # No kernel writes the gradients behind the last group, and zero times them may not be zero.
        known_RO = grad_RO
        if ctx.is_padded:
            known_RO = grad_RO.masked_fill((owners_R == ctx.num_experts)[:, None], 0)
        return grad_RO, is_own_eR @ known_RO, None, None


class MoE(nn.Module, ExpertModule, RoutedExperts):
    """Mixture of experts: routed experts, and shared experts for all tokens.

    Attributes:
        bias: routing bias, added to the scores when experts are chosen, (E,) fp32.
        loads: tokens that each expert got in backward passes since the last reset, (E,) int64.
        last_loads: loads of the last step, summed over all ranks, (E,) int64.
    """

    bias: Tensor
    loads: Tensor
    last_loads: Tensor

    def __init__(self, config: MoEConfig, *, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = shared_experts
        E = config.num_experts
        self.register_buffer("bias", torch.empty(E, dtype=torch.float32))
        self.register_buffer("loads", torch.empty(E, dtype=torch.int64), persistent=False)
        is_state = config.global_balance_coeff > 0
        self.register_buffer(
            "last_loads", torch.empty(E, dtype=torch.int64), persistent=is_state
        )
        self.dispatcher: Callable[..., Tensor] = run_experts
        self.route_sources: list[RouteSource] = []
        # The global batch's, set before each step.
        self.num_sequences, self.num_tokens = 1, 1
        # Adds up (B, E) over the ranks that share the sequences of a batch.
        self.sum_over_sequence: Callable[[Tensor], Tensor] | None = None

    def reset_buffers(self) -> None:
        """Set the bias and all counts of tokens to zero."""
        for buffer in (self.bias, self.loads, self.last_loads):
            buffer.zero_()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, plus the shared experts' output; shape and dtype as x."""
        x_TD = x_BSD.flatten(0, 1)
        # Sources are asked in order, and the first answer counts.
        given = (source.get(self, x_BSD) for source in self.route_sources)
        scores_TE, probs_TE, log_sum_T = self.router(x_BSD)
        ids_TK = next((ids for ids in given if ids is not None), None)
        if ids_TK is None:
            ids_TK = self.router.choose(scores_TE, self.bias)
        for source in self.route_sources:
            source.put(self, ids_TK)
        weights_TK = self.router.weigh(scores_TE, ids_TK)
        weights_TK = _RouterTerms.apply(
            weights_TK, probs_TE, log_sum_T, ids_TK, self, len(x_BSD)
        )
        shared: list[Tensor] = []

        def run_shared_experts() -> None:
            if self.shared_experts is not None:
                shared.append(self.shared_experts(x_BSD))

        def run(tokens_ND: Tensor, counts_E: Tensor) -> Tensor:
            # Shared experts need no other rank: a dispatcher runs them while it communicates.
            return self.dispatcher(tokens_ND, counts_E, self.experts, run_shared_experts)

        tokens_TKD = dispatch(x_TD, ids_TK, self.config.num_experts, run)
        y_BSD = self.combine(tokens_TKD, weights_TK).view(x_BSD.shape)
        return y_BSD + shared[0] if shared else y_BSD

    @property
    def traits(self) -> BlockTraits:
        """Return the functions to compile: all but the dispatcher, which waits for the device."""
        shared = () if self.shared_experts is None else ("shared_experts.forward",)
        router = ("router.forward", "router.choose", "router.weigh")
        return BlockTraits(
            compiled=(*router, "experts.grouped", "combine", *shared),
            varying=frozenset({"experts.grouped"}),
            # Their saved activations are K times as large as those of other modules.
            recomputed=frozenset({"experts.grouped", "combine"}),
        )

    def combine(self, tokens_TKD: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, (T, D) in their dtype, added in the order of K."""
        y_TD = (tokens_TKD.to(weights_TK.dtype) * weights_TK[..., None]).sum(1)
        return y_TD.to(tokens_TKD.dtype)

    def term_gradients(
        self, ids_TK: Tensor, log_sum_T: Tensor, batch: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Count loads, and compute the gradients of all balance terms for a batch of `batch` sequences.

        Returns:
            Gradients in the normalized scores, (T, E), and in the logsumexp, (T,). None for terms that are off.
        """
        config, E, K = self.config, self.config.num_experts, ids_TK.shape[1]
        counts_BE = count(ids_TK.view(batch, -1), E)
        self.loads += counts_BE.sum(0)
        grad_TE: Tensor | None = None
        if config.sequence_balance_coeff:
            # coeff / sequences x sum over b, i of f_bi P_bi, with f = E / (K S) counts and P the mean over S tokens
            length = len(ids_TK) // batch
            if self.sum_over_sequence is not None:
                counts_BE = self.sum_over_sequence(counts_BE)
                length = int(self.num_tokens // self.num_sequences)
            scale = (
                config.sequence_balance_coeff / self.num_sequences * E / (K * length * length)
            )
            grad_BE = counts_BE.to(log_sum_T.dtype) * scale
            grad_TE = grad_BE.repeat_interleave(len(ids_TK) // batch, 0)
        if config.global_balance_coeff:
            # The counts of this step are known only after it, so the last step's counts take their place.
            last_E = self.last_loads.to(log_sum_T.dtype)
            scale = config.global_balance_coeff * E / self.num_tokens
            grad_E = scale * last_E / last_E.sum().clamp(min=1)
            grad_TE = grad_E.expand(len(ids_TK), E) if grad_TE is None else grad_TE + grad_E
        if not config.router_z_loss_coeff:
            return grad_TE, None
        return grad_TE, 2 * config.router_z_loss_coeff / self.num_tokens * log_sum_T


class _RouterTerms(torch.autograd.Function):
    """Identity on the weights, whose backward pass counts the experts' loads and adds the balance terms' gradients.

    Counting in the backward pass counts each micro-batch once. A forward pass may run twice (recomputation), or belong to
    an evaluation.
    """

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, *rest: Any) -> Tensor:
        _, log_sum_T, ids_TK, ctx.moe, ctx.batch = rest
        ctx.save_for_backward(ids_TK, log_sum_T)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        terms = ctx.moe.term_gradients(*ctx.saved_tensors, ctx.batch)
        return *grads, *terms, None, None, None
