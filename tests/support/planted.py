"""Faults of expert parallelism that others had, planted in a rank before it trains: the comparison must see each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from tests.support.layouts import Layout, train
from titan.config.schema import JobConfig
from titan.contrib.transformers.model import TransformersModel
from titan.models.common import moe
from titan.models.common.attention import InnerAttention
from titan.models.common.dispatch import count
from titan.models.llama3.model import Llama
from titan.numerics.certify import steps
from titan.optim import expert_bias
from titan.step import parallelize, train_step


def train_with(fault: str, layout: Layout, steps: int = 0) -> dict[str, Any]:
    """Train as `tests.support.layouts.train` does, with a fault in this process."""
    FAULTS[fault]()
    return train(layout, steps=steps)


def unreduced_router() -> None:
    """Leave each tensor-parallel rank with the router's gradient of its own tokens (torchtitan#4054)."""

    def forward(self: Any, x: DTensor) -> DTensor:
        logits = F.linear(x.to_local(), self.weight.to_local())
        return DTensor.from_local(logits, x.device_mesh, (Shard(1),), run_check=False)

    moe.Gate.forward = forward


def doubled_experts() -> None:
    """Double the gradients of experts (pytorch#160285)."""
    forward = moe.Experts.forward

    def doubling(self: Any, *args: Any) -> Tensor:
        for name, weight in list(self._parameters.items()):
            self._parameters[name] = 2 * weight - weight.detach()
        return forward(self, *args)

    moe.Experts.forward = doubling


def norm_without_experts() -> None:
    """Leave experts out of the gradient norm (Megatron-LM#5916)."""
    clip: Any = train_step.clip_gradients
    train_step.clip_gradients = lambda parameters, **options: clip(
        [p for p in parameters if p.ndim < 3], **options
    )


def bias_of_one_rank() -> None:
    """Move the bias by the loads of one rank."""
    finish = expert_bias.ExpertBiasBalancer.finish

    def alone(self: expert_bias.ExpertBiasBalancer, *, accepted: bool) -> None:
        self.group = None
        finish(self, accepted=accepted)

    expert_bias.ExpertBiasBalancer.finish = alone


def counted_in_forward() -> None:
    """Count loads where tokens are routed: also in an evaluation, and twice where a block is recomputed (torchtitan#4148)."""
    apply = moe._RouterTerms.apply
    term_gradients = moe.MoE.term_gradients

    def counting(*args: Any) -> Any:
        ids_TK, module = args[3:5]
        module.loads += count(ids_TK.view(1, -1), module.config.num_experts)[0]
        return apply(*args)

    def without_counting(self: moe.MoE, *args: Any) -> Any:
        before = self.loads.clone()
        gradients = term_gradients(self, *args)
        self.loads.copy_(before)
        return gradients

    moe._RouterTerms.apply = counting
    moe.MoE.term_gradients = without_counting


def evaluate_before_steps() -> None:
    """Evaluate the batches of each step before it: no fault, unless something counts them."""
    train_one = train_step.TrainStep.train

    def evaluating(self: train_step.TrainStep, batches: Any, **options: Any) -> Any:
        self.evaluate(batches)
        return train_one(self, batches, **options)

    train_step.TrainStep.train = evaluating


def counted_in_evaluation() -> None:
    """Evaluate before each step, and count what is evaluated."""
    counted_in_forward()
    evaluate_before_steps()


def wrong_tokens() -> None:
    """Give each rank's tokens the results of their neighbours (torchtitan#3604)."""
    combine = moe.MoE.combine
    moe.MoE.combine = lambda self, rows, weights: combine(self, rows, weights).roll(1, 0)


def all_to_one_expert() -> None:
    _prefer(lambda num_experts: [num_experts - 1])


def all_to_one_rank() -> None:
    """Send all tokens to the first quarter of the experts, which one rank holds."""
    _prefer(lambda num_experts: list(range(num_experts // 4)))


def none_to_one_rank() -> None:
    _prefer(lambda num_experts: list(range(num_experts // 4, num_experts)))


def _prefer(experts: Callable[[int], list[int]]) -> None:
    def reset_buffers(self: moe.MoE) -> None:
        reset(self)
        self.bias[experts(len(self.bias))] = 100.0

    reset = moe.MoE.reset_buffers
    moe.MoE.reset_buffers = reset_buffers


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        unreduced_router,
        doubled_experts,
        norm_without_experts,
        bias_of_one_rank,
        wrong_tokens,
        counted_in_forward,
        counted_in_evaluation,
        evaluate_before_steps,
        all_to_one_expert,
        all_to_one_rank,
        none_to_one_rank,
    )
}


# ---- faults that `titan certify` has to name -----------------------------------------------------


def lost_partial_sum(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Train with `lose_partial_sums`."""
    lose_partial_sums()
    return steps.train_job(config, *options)


def lose_partial_sums() -> None:
    """Leave each tensor-parallel rank with its own part of what row-wise layers return."""

    def keep_own(
        layouts: Any, local: bool, module: nn.Module, output: DTensor, mesh: Any
    ) -> Any:
        if not isinstance(module, nn.Linear) or not output.placements[0].is_partial():
            return give(layouts, local, module, output, mesh)
        part = output.to_local().chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        part = DTensor.from_local(part, mesh, layouts, run_check=False)
        return part.to_local() if local else part

    give = RowwiseParallel._prepare_output_fn
    if dist.get_world_size() > 1:
        RowwiseParallel._prepare_output_fn = staticmethod(keep_own)


def doubled_gradient(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Double the gradient of a matrix in the second block."""
    return _scaled(2.0, "layers.1.feed_forward.w2.weight", config, options)


def clipped_late(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Clip at twice the norm, on each of several ranks."""
    clip: Any = train_step.clip_gradients

    def late(parameters: Any, *, max_norm: float, **others: Any) -> Tensor:
        return clip(parameters, max_norm=2 * max_norm, **others)

    if dist.get_world_size() > 1:
        train_step.clip_gradients = late
    return steps.train_job(config, *options)


def halved_router(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Halve the gradient of a router."""
    return _scaled(0.5, "layers.1.moe.router.gate.weight", config, options)


def _scaled(factor: float, name: str, config: JobConfig, options: Any) -> dict[str, Any]:
    """Train with a parameter's gradient multiplied by a factor, before it is clipped, on each of several ranks."""

    def record(train_step: train_step.TrainStep, *batches: Any) -> dict[str, Any]:
        gradient_of: Any = dict(steps.named_parameters(train_step))[name]
        clip = train_step._clip
        train_step._clip = lambda: (gradient_of.grad.mul_(factor), clip())[1]
        return whole(train_step, *batches)

    whole = steps.record
    if dist.get_world_size() > 1:
        steps.record = record
    return steps.train_job(config, *options)


def ignored_window(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Train with `ignore_windows`."""
    ignore_windows()
    return steps.train_job(config, *options)


def ignore_windows() -> None:
    """Make context-parallel ranks attend to all keys."""

    def apply(model: nn.Module, **options: Any) -> None:
        for module in model.modules():
            if isinstance(module, InnerAttention):
                module.window = 0
        whole(model, **options)

    whole = parallelize.apply_cp
    parallelize.apply_cp = apply  # of ranks with context parallelism only


def with_trait(trait: str, config: JobConfig, *options: Any) -> dict[str, Any]:
    """Train a model that titan refuses or cannot record, or that ends a rank."""

    def decode(self: Llama, x_BSD: Tensor, *args: Any, **options: Any) -> Any:
        several = dist.get_world_size() > 1
        if trait == "dies" and dist.get_rank() == 1:
            os._exit(9)
        if trait == "unmeta" and (x_BSD.sum().item(), several)[1]:
            x_BSD = 2 * x_BSD
        if trait == "raises" and several:
            self.get_submodule("norm")(x_BSD[..., 1:])
        out_BSV = whole(self, x_BSD, *args, **options)
        return (out_BSV, None) if trait == "pair" else out_BSV

    whole: Any = Llama.decode
    Llama.decode = decode
    return steps.train_job(config, *options)


def positions_of_a_part(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Count the positions of each context-parallel rank's tokens from zero."""

    def forward(self: Any, tokens_BS: Tensor, *_: Any, **options: Any) -> Tensor:
        return whole(self, tokens_BS, **{**options, "positions_BS": None})

    whole = TransformersModel.forward
    if dist.get_world_size() > 1:
        TransformersModel.forward = forward
    return steps.train_job(config, *options)


def damaged_between_stages(config: JobConfig, *options: Any) -> dict[str, Any]:
    """Double what a later pipeline stage gets."""

    def forward(self: Any, tokens_BS: Tensor, *args: Any, **options: Any) -> Tensor:
        is_later = self.tok_embeddings is None
        return whole(self, 2 * tokens_BS if is_later else tokens_BS, *args, **options)

    whole = TransformersModel.forward
    TransformersModel.forward = forward
    return steps.train_job(config, *options)


def reads_before_2(_: JobConfig, modules: list[list[str]]) -> dict[str, float]:
    """Report one wrong cut, the one before block 2."""
    return {name: float(name == "layers.2") for names in modules for name in names}


def reads_before_16(_: JobConfig, modules: list[list[str]]) -> dict[str, float]:
    return {name: float(name == "layers.16") for names in modules for name in names}
