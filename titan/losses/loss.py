"""Cross entropy and output layer in chunks, so that neither the logits nor their gradient exist as a whole.

For N tokens and vocabulary V, the plain loss in bf16 training holds N x V logits in bf16, again in fp32, and their
log-probabilities in fp32. These are ten bytes for each logit: 78 GiB for Llama 3's vocabulary and 65,536 tokens. Here, C tokens at a
time go through the output layer and the loss. Their gradient (softmax minus one-hot) goes back through the output layer at once. Only
the gradients of the output layer's input and weight are kept, and the backward pass scales them. The three matmuls are those of the
plain loss. (Known from Liger Kernel, arXiv:2410.10989, and Cut Cross-Entropy, arXiv:2411.09009.)

The input may also be logits that the caller has computed. Then chunks limit the fp32 copies alone.

Under tensor parallelism the logits may stay sharded over the vocabulary. Ranks then exchange three numbers for each token, and not
its logits (Megatron-LM, arXiv:1909.08053, section 3).

A package's loss can replace the cross entropy (docs/optimizers.md). It gets the fp32 logits of a chunk over the whole vocabulary.
Where the vocabulary is sharded, ranks gather the logits of a chunk, and each rank keeps the gradient of its own columns.

N tokens, C tokens of a chunk, D model, V vocabulary or this rank's shard of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.losses.groups import GroupSums
from titan.losses.loss_kernels import Kernels
from titan.losses.vocabulary import (
    IGNORED,
    VocabularyShard,
    gather_vocabulary,
    local_shard,
    plain_over_vocabulary,
    sum_over_vocabulary,
)
from titan.parallel.matmul_fp32 import multiplies_into_fp32

# Tokens of a matmul in 8 bits are a multiple of 128 at most, those of each chunk but the last.
_FLOAT8_TOKENS = 128


# Maps the output layer's input (N, D) to logits (N, V), differentiable in the input and in a weight of its own.
LogitsFn = Callable[[Tensor], Tensor]
# A package's loss: fp32 logits (C, V) and labels (C,), IGNORED where not trained on, to the sum over the valid tokens.
CustomLoss = Callable[[Tensor, Tensor], Tensor]


def _chunks(x: Tensor, num_parts: int, chunk_tokens: int) -> list[tuple[int, Tensor]]:
    """Return the chunks of a tensor along its tokens, each with the number of its part."""
    parts = enumerate(x.chunk(num_parts))
    return [(n, chunk) for n, part in parts for chunk in part.split(chunk_tokens)]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Autograd function of the loss. It computes gradients in the forward pass, and scales them in the backward pass.

    `input_ND` is the input of an output layer with `weight_VD`, or the logits if there is no weight. Its tokens have as many parts as
    there are scales. The result is the scaled total and, for several parts, the sum of each part, which is not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_ND: Tensor,
        weight_VD: Tensor | None,
        labels_N: Tensor,
        of: LossSum,
        scales: Sequence[float],
    ) -> tuple[Tensor, ...]:
        device = input_ND.device
        sums = [torch.zeros((), dtype=torch.float32, device=device) for _ in scales]
        differentiate = any(ctx.needs_input_grad)
        d_input_ND = torch.empty_like(input_ND) if differentiate else None
        # A sum over chunks, in fp32. The first chunk writes it.
        d_weight_VD: Tensor | None = None
        wants_weight = weight_VD is not None and ctx.needs_input_grad[1]
        # Logits in fp32 from the matmul itself, where the device can: exact to the inputs, and no cast of them.
        into_fp32: Any = (
            {"out_dtype": torch.float32}
            if multiplies_into_fp32(input_ND.dtype, input_ND.device.type)
            else {}
        )
        # The last chunk of a part may be shorter. Chunks are views, so results are written where they belong.
        chunks_of = partial(_chunks, num_parts=len(scales), chunk_tokens=of.chunk_tokens)
        inputs = chunks_of(input_ND)
        d_inputs = inputs if d_input_ND is None else chunks_of(d_input_ND)
        chunks = zip(inputs, d_inputs, chunks_of(labels_N), strict=True)
        for (part, input_CD), (_, d_input_CD), (_, labels_C) in chunks:
            scale = scales[part]
            if of.logits_fn is not None:
                input_CD = input_CD.detach().requires_grad_()
                with torch.set_grad_enabled(differentiate):
                    logits_CV = of.logits_fn(input_CD)
            else:
                logits_CV = (
                    input_CD
                    if weight_VD is None
                    else torch.mm(input_CD, weight_VD.T, **into_fp32)
                )
            chunk_loss, d_logits_CV = _one_chunk(
                logits_CV.detach(),
                labels_C,
                of=of,
                gradient_dtype=input_CD.dtype if differentiate else None,
            )
            sums[part] += chunk_loss
            if d_logits_CV is None:
                continue
            if weight_VD is None:
                # The logits' gradient is the result: the caller's own backward pass goes on from it.
                _scale(d_input_CD.copy_(d_logits_CV), scale)
                continue
            if of.logits_fn is not None:
                wanted = [input_CD, weight_VD] if wants_weight else [input_CD]
                d_input, *d_weight = torch.autograd.grad(logits_CV, wanted, d_logits_CV)
                _scale(d_input_CD.copy_(d_input), scale)
                if wants_weight:
                    d_weight_VD = _add(d_weight_VD, d_weight[0], scale)
                continue
            # Into the view: no second buffer of this size.
            torch.mm(d_logits_CV, weight_VD, out=d_input_CD)
            _scale(d_input_CD, scale)
            if not wants_weight:
                continue
            if d_weight_VD is None or not into_fp32:
                d_weight = torch.mm(d_logits_CV.T, input_CD, **into_fp32)
                d_weight_VD = _add(d_weight_VD, d_weight, scale)
            else:
                scaled = into_fp32 if scale == 1 else into_fp32 | {"alpha": scale}
                torch.addmm(d_weight_VD, d_logits_CV.T, input_CD, out=d_weight_VD, **scaled)
        ctx.weight_dtype = None if weight_VD is None else weight_VD.dtype
        ctx.scaled = (of.kernels or Kernels()).scaled
        if weight_VD is None:
            ctx.gradient = d_input_ND
        else:  # autograd frees them after the backward pass, though a pipeline schedule keeps its losses to the end of the step
            ctx.save_for_backward(d_input_ND, d_weight_VD)
        return _scaled_total(sums, scales)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.weight_dtype is None:  # in place: the largest tensor of the step
            d_logits_NV, ctx.gradient = ctx.gradient, None
            if d_logits_NV is None:
                raise RuntimeError("this loss keeps its gradient for one backward pass only")
            return d_logits_NV.mul_(grad_output), None, None, None, None
        d_input_ND, d_weight_VD = ctx.saved_tensors
        if d_weight_VD is not None:
            d_weight_VD = ctx.scaled(d_weight_VD, grad_output, ctx.weight_dtype)
        return d_input_ND * grad_output, d_weight_VD, None, None, None


def _scale(gradient: Tensor, scale: float) -> None:
    if scale != 1:
        gradient.mul_(scale)


def _add(total: Tensor | None, gradient: Tensor, scale: float) -> Tensor:
    """Add the gradient of a chunk, times its scale, to the sum in fp32, which the first chunk, of scale 1, begins."""
    return gradient.float() if total is None else total.add_(gradient, alpha=scale)


def _one_chunk(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    of: LossSum,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk, a scalar in fp32, and its gradient in the logits if `gradient_dtype` is given."""
    shard, kernels = of.shard, of.kernels or Kernels()
    if of.custom is not None:
        return _custom_chunk(logits_CV, labels_C, of.custom, shard, gradient_dtype)
    groups_C = labels_C
    if of.groups.count:
        labels_C, groups_C = of.groups.split(labels_C)
    is_valid_C = labels_C != IGNORED
    column_C, is_mine_C = labels_C.clamp(min=0), is_valid_C
    if shard is not None:
        # A label outside this rank's shard contributes nothing here; another rank has its logit.
        column_C = column_C - shard.start
        is_mine_C = is_valid_C & (column_C >= 0) & (column_C < logits_CV.shape[1])
        # Any valid column will do for labels of other ranks: the mask leaves them out.
        column_C = column_C.clamp(0, logits_CV.shape[1] - 1)
    lse_C, target_logit_C, state = kernels.statistics(logits_CV, column_C)
    whole_lse_C = lse_C
    if shard is not None:
        whole_lse_C, target_logit_C = sum_over_vocabulary(
            lse_C, target_logit_C, is_mine_C, shard.group
        )
    # Masked by filling, since a multiplication would keep the nan of an ignored token.
    losses_C = (whole_lse_C - target_logit_C).masked_fill(~is_valid_C, 0.0)
    loss = losses_C.sum()
    if of.groups.count:
        of.groups.add(losses_C, groups_C, is_valid_C)
    if gradient_dtype is None:
        return loss, None
    # Tokens that are not valid get probabilities of exp(-inf).
    whole_lse_C = whole_lse_C.masked_fill(~is_valid_C, torch.inf)
    return loss, kernels.gradient(
        state, lse_C, whole_lse_C, column_C, is_mine_C, gradient_dtype
    )


def _custom_chunk(
    logits_CV: Tensor,
    labels_C: Tensor,
    custom: CustomLoss,
    shard: VocabularyShard | None,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return loss and gradient of a chunk as `_one_chunk` does, by a package's loss, which autograd differentiates."""
    columns = slice(None)
    if shard is not None:
        columns = slice(shard.start, shard.start + logits_CV.shape[1])
        logits_CV = gather_vocabulary(logits_CV, shard)
    logits_CV = logits_CV.float().detach().requires_grad_(gradient_dtype is not None)
    with torch.set_grad_enabled(gradient_dtype is not None):
        loss = custom(logits_CV, labels_C)
    if gradient_dtype is None:
        return loss, None
    (d_logits_CV,) = torch.autograd.grad(loss, logits_CV)
    return loss.detach(), d_logits_CV[:, columns].to(gradient_dtype)


def _plain(logits_NV: Tensor, labels_N: Tensor, *, groups: GroupSums) -> Tensor:
    """Return torch's own cross entropy, summed."""
    if not groups.count:
        return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    labels_N, groups_N = groups.split(labels_N)
    losses_N = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none")
    groups.add(losses_N, groups_N, labels_N != IGNORED)
    return losses_N.sum()


def _parts(
    loss: CustomLoss, input_ND: Tensor, labels_N: Tensor, scales: Sequence[float]
) -> tuple[Tensor, ...]:
    """Return the result of `LossSum.scaled` for a loss that autograd differentiates."""
    parts = (x.chunk(len(scales)) for x in (input_ND, labels_N))
    return _scaled_total([*map(loss, *parts)], scales)


def _scaled_total(sums: list[Tensor], scales: Sequence[float]) -> tuple[Tensor, ...]:
    """Return the sum of all parts, each times its scale, and for several parts their own sums."""
    if len(sums) == 1:
        return (sums[0],)
    total = sums[0]
    for scale, one in zip(scales[1:], sums[1:], strict=True):
        total = total + scale * one
    return total, torch.stack(sums).detach()


def defer_lm_head(output: nn.Module) -> None:
    """Make the output layer return its input, so that the loss can apply its weight in chunks.

    Raises:
        ValueError: the layer has a bias.
    """
    if any(name == "bias" for name, _ in output.named_parameters()):
        raise ValueError(
            "the loss applies the output layer's weight only: build it with bias=False"
        )
    output.forward = lambda x: x


def logits_fn_of(output: nn.Module, *, backend: str = "") -> LogitsFn:
    """Return the forward pass of an output layer after `defer_lm_head`, through torch.compile if a backend is given."""
    # The class's, since the layer itself returns its input.
    forward = partial(type(output).forward, output)
    return torch.compile(forward, backend=backend) if backend else forward


@dataclass(frozen=True)
class LossSum:
    """Loss function: maps a model's output and labels to the summed loss.

    Attributes:
        chunk_tokens: tokens that are computed at once; 0: all. A single chunk is torch's own cross entropy on an fp32 copy of the logits.
        shard: this rank's shard of logits that are split over the vocabulary.
        output: output layer that the loss applies; None: the model's output are logits.
        kernels: fused kernels for the loss of a chunk.
        logits_fn: the output layer's own forward pass, if it multiplies in 8 bits: maps (N, D) to logits in place of a matmul.
        custom: training loss in place of the cross entropy. Without gradients, in validation, the loss is the cross entropy.
        groups: gets the sums of the groups in the labels, if it counts any. A custom loss has none, since it returns a sum.
    """

    chunk_tokens: int
    shard: VocabularyShard | None = None
    output: nn.Module | None = None
    kernels: Kernels | None = None
    logits_fn: LogitsFn | None = None
    custom: CustomLoss | None = None
    groups: GroupSums = field(default_factory=GroupSums)

    def __call__(
        self, input: Tensor, labels_BS: Tensor, *, custom: CustomLoss | None = None
    ) -> Tensor:
        """Return the sum. `custom` computes it from logits and labels, in place of the training loss."""
        return self.scaled(input, labels_BS, (1.0,), custom=custom)[0]

    def scaled(
        self,
        input: Tensor,
        labels: Tensor,
        scales: Sequence[float],
        *,
        custom: CustomLoss | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the sum of the loss in nats over the valid labels. It is differentiable once, in input and weight.

        Args:
            input: (..., D), input of the output layer; or the logits (..., V) without an output layer and `weight`. Any floating dtype.
                With `shard`, its gradient is this rank's part of a sum over the ranks.
            labels: (...) int64 ids of the whole vocabulary, IGNORED where not trained on. Ids outside the vocabulary are not checked for.
            scales: with P scales, the first of which is 1, the tokens are P parts of equal size, and the sum has each part times its
                scale. All parts share one gradient of the weight.
            custom: computes the sum from logits and labels, in place of the training loss.
            weight: (V, D), weight of the output layer if `output` is None. With `shard`, it is this rank's shard (V/tp, D), also as the
                DTensor that tensor parallelism made.

        Returns:
            The sum, a scalar in fp32, the same on every rank of a shard; and with several scales the sums of the parts, fp32 (P,), which
            are not differentiable.

        Raises:
            ValueError: labels have another shape, or the weight is not gathered.
        """
        if self.output is not None:
            # FSDP keeps the unit of the output layer gathered after its forward pass.
            weight = self.output.get_parameter("weight")
        custom = custom or (self.custom if torch.is_grad_enabled() else None)
        with torch.profiler.record_function(
            "titan: loss"
        ):  # a module's range, to `titan profile`
            return self._scaled(input, labels, scales, custom, weight)

    def _scaled(
        self,
        input: Tensor,
        labels: Tensor,
        scales: Sequence[float],
        custom: CustomLoss | None,
        weight: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # Shapes are checked here: a broadcast would give a wrong loss without an error.
        if labels.shape != input.shape[:-1]:
            raise ValueError(
                f"labels are {tuple(labels.shape)} and the input is {tuple(input.shape)}: one label for each position"
            )
        if isinstance(weight, DTensor):
            weight = local_shard(weight, self.shard)
        shard = self.shard
        input_ND, labels_N = input.reshape(-1, input.shape[-1]), labels.reshape(-1)
        part_tokens = len(input_ND) // len(scales)
        num_chunks = -(-part_tokens // (self.chunk_tokens or part_tokens))
        loss = custom or partial(_plain, groups=self.groups)
        # A single chunk gains nothing from the code for several, unless ranks share the vocabulary or a compiler fuses it.
        if (
            num_chunks == 1
            and shard is None
            and (self.kernels is None or not self.chunk_tokens)
        ):
            linear = self.logits_fn or (lambda x: x if weight is None else F.linear(x, weight))
            return _parts(lambda x, y: loss(linear(x).float(), y), input_ND, labels_N, scales)
        is_plain = not (self.chunk_tokens or self.groups.count) and weight is None
        is_plain = is_plain and custom is None
        if is_plain and shard is not None and shard.mesh is not None:
            plain = partial(plain_over_vocabulary, mesh=shard.mesh, start=shard.start)
            return _parts(plain, input_ND, labels_N, scales)
        size = -(-part_tokens // num_chunks)
        if self.logits_fn is not None:
            size = -(-size // _FLOAT8_TOKENS) * _FLOAT8_TOKENS
        of = replace(self, chunk_tokens=size, custom=custom)
        return _ChunkedCrossEntropy.apply(input_ND, weight, labels_N, of, scales)
