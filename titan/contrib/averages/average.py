"""Average of the weights over the steps of a run, in fp32 and sharded like the weights.

The method is Polyak averaging (Polyak and Juditsky, 1992), as an exponential moving average (arXiv:1809.11096, appendix C).
Samples and validation may use the average in place of the weights.

After step s, with n = s - start_step: average = d x average + (1 - d) x weights, with d = min(decay, (1 + n) / (10 + n)), which
forgets the first steps early. Up to start_step it is a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan.optim.averaged import reshard
from titan.optim.states import local
from titan.parallel.float8 import plain
from titan.parallel.init_weights import canonical_name


class WeightAverage:
    """Average of the parameters of a model, or of its pipeline stages on this rank. It begins as a copy of the weights.

    Attributes:
        parts: the model, or its stages on this rank.
        section: [average].
        validates: a validation uses the average.
        parameters: parameters by their plain names.
        tensors: the average in fp32, laid out like the parameters, by their plain names.
    """

    def __init__(self, parts: Sequence[nn.Module], section: Any) -> None:
        self.parts, self.section = parts, section
        self.validates = section.validate_with
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
    def _set(
        self, weights: Sequence[Tensor], values: Iterator[Tensor] | Sequence[Tensor]
    ) -> None:
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
        reshard(self.parts)


def build(parts: Sequence[nn.Module], config: Any) -> WeightAverage | None:
    """Return the average of a job, or None (step.NAME of `titan.extensions`)."""
    return WeightAverage(parts, config.average) if config.average.enable else None
