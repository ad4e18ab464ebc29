"""Gradients of single documents of a step, for document_losses.py.

A document's own gradient is that of the step's loss with all other documents' labels ignored. So the gradients of all documents sum to
the step's gradient g, except for terms without labels such as those that balance experts. Its share is <own, g> / <g, g>.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan.losses.loss import IGNORED
from titan.optim.clipping import clip_gradients
from titan.step.train_step import StepReport, TrainStep


def own_gradients(
    step: TrainStep, batches: Sequence[Any], found: Sequence[np.ndarray], *, number: int
) -> Callable[[float, float], tuple[float, float]]:
    """Return a function of a document and the number of its labels, which returns the norm of its gradient, and its share.

    Args:
        step: the training step, whose weights stay as they are.
        batches: this rank's batches.
        found: int64[B, S] for each batch: the document of each label.
        number: the step's number.
    """
    parameters = step.parameters

    def train(batches: Sequence[Any], on_gradients: Callable[[], None]) -> StepReport:
        # Without the run's other listeners.
        listeners, step.on_gradients = step.on_gradients, [on_gradients]
        report = step.train(batches, step=number, accept=lambda *_: False)
        step.on_gradients = listeners
        return report

    kept: list[Tensor | None] = []
    of_step = train(
        batches,
        lambda: kept.extend(None if p.grad is None else p.grad.clone() for p in parameters),
    )
    norm, num_labels = float(of_step.grad_norm), float(of_step.num_valid)

    def of(document: float, tokens: float) -> tuple[float, float]:
        norms = []

        def add_the_step() -> None:
            # This gradient is a mean over the document's labels, and the step's one over all labels.
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(tokens / num_labels)
            stages = step.groups.stages
            norms.append(float(clip_gradients(parameters, max_norm=0, stages=stages)))
            for parameter, whole in zip(parameters, kept, strict=True):
                if whole is not None:
                    grad = parameter.grad
                    parameter.grad = whole.clone() if grad is None else grad + whole

        masked = []
        for batch, here in zip(batches, found, strict=True):
            is_own = torch.from_numpy(here == document)
            masked.append(replace(batch, labels_BS=batch.labels_BS.where(is_own, IGNORED)))
        both, [own] = float(train(masked, add_the_step).grad_norm), norms
        # |own + g|^2 = |own|^2 + 2 <own, g> + |g|^2
        return own, (both**2 - own**2 - norm**2) / 2 / norm**2

    return of
