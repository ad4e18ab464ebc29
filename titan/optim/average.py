"""Average of the weights over the steps of a run, in fp32 and sharded like the weights.

The method is Polyak averaging (Polyak and Juditsky, 1992), as an exponential moving average (arXiv:1809.11096, appendix C).
Samples and validation may use the average in place of the weights.

After step s, with n = s - start_step: average = d x average + (1 - d) x weights, with d = min(decay, (1 + n) / (10 + n)), which
forgets the first steps early. Up to start_step it is a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan.config.schema import AverageSection
from titan.parallel.float8 import plain
from titan.parallel.init_weights import canonical_name

from .adam import local


class WeightAverage:
    """Average of the parameters of a model, or of its pipeline stages on this rank. It begins as a copy of the weights.

    Attributes:
        parts: The model, or its stages on this rank.
        section: [average].
        parameters: Parameters by their plain names.
        tensors: The average in fp32, laid out like the parameters, by their plain names.
    """

    def __init__(self, parts: Sequence[nn.Module], section: AverageSection) -> None:
        self.parts, self.section = parts, section
        # A shared parameter comes once.
        self.parameters = {
            canonical_name(name): p for part in parts for name, p in part.named_parameters()
        }
        self.tensors = {
            name: torch.empty_like(plain(p), dtype=torch.float32, requires_grad=False)
            for name, p in self.parameters.items()
        }
        self.restart()

    def restart(self) -> None:
        """Set the average to the weights."""
        self._mix(1.0)

    def update(self, step: int) -> None:
        """Add the weights after a step to the average."""
        number = step - self.section.start_step
        decay = min(self.section.decay, (1 + number) / (10 + number)) if number > 0 else 0.0
        self._mix(1 - decay)

    @torch.no_grad()
    def _mix(self, share: float) -> None:
        averages = [local(self.tensors[name]) for name in self.parameters]
        weights = [local(parameter) for parameter in self.parameters.values()]
        if share == 1:
            torch._foreach_copy_(averages, weights)
        elif all(weight.dtype == torch.float32 for weight in weights):
            torch._foreach_lerp_(averages, weights, share)  # a few kernels for all
        else:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.float(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights by the average within a block. A copy of the weights is kept, sharded as they are."""
        weights = [local(p) for p in self.parameters.values()]
        kept = [weight.clone() for weight in weights]
        try:
            self._set(weights, map(local, self.tensors.values()))
            yield
        finally:
            self._set(weights, kept)

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor], values: Iterator[Tensor] | Sequence[Tensor]) -> None:
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
        _reshard(self.parts)


@contextmanager
def of_optimizer(optimizer: Any, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the weights by the optimizer's average within a block (arXiv:2405.15682).

    Args:
        optimizer: Optimizer with methods `eval` and `train`, which set the average and the weights.
        parts: The model, or its stages on this rank.
    """
    optimizer.eval()
    _reshard(parts)
    try:
        yield
    finally:
        optimizer.train()
        _reshard(parts)


def _reshard(parts: Sequence[nn.Module]) -> None:
    """Make FSDP drop its gathered weights, which may be outdated."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def averaged(step: Any, *, wanted: bool = True) -> AbstractContextManager[None]:
    """Return a block in which the model has an average of its weights: the job's, or the optimizer's.

    Args:
        step: The run's TrainStep.
        wanted: Use the job's average if there is one.
    """
    step.before_change()
    if step.average is not None and wanted:
        return step.average.in_place()
    if hasattr(step.optimizer, "eval"):
        return of_optimizer(step.optimizer, step.model_parts)
    return nullcontext()
