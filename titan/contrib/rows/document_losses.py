"""Loss and gradient of each document of a step, with the weights before it or, if the run begins later, its first ones, for `titan audit --rows`.

A document's own gradient is that of the step's loss with all other documents' labels ignored. So the gradients of all documents sum to
the step's gradient g, except for terms without labels such as those that balance experts. Its share is <own, g> / <g, g>.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan.base.run_writer import run_files
from titan.base.untrusted import InputError
from titan.contrib.rows.ranking import SHOWN, lines, rank, worst_first
from titan.losses.loss import IGNORED
from titan.optim.clipping import clip_gradients
from titan.run.hook import Hook
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport, TrainStep


class DocumentLosses(Hook):
    """documents.json of the run: documents as RankedDocument, and the lines that are shown."""

    priority = 112

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.wanted = trainer, trainer.config.debug.document_losses

    def before_forward(self, batches: Sequence[Any]) -> None:
        trainer, loader = self.trainer, self.trainer.loader
        wanted = self.wanted
        if trainer.step != max(wanted, trainer.first_step):
            return
        if wanted < trainer.step:  # its samples, with later weights
            begin, stride = (wanted - 1) * trainer.sequences_per_step, loader.share.stride
            batches = [loader.make_batch(begin + n * stride) for n in range(len(batches))]
        step, samples = trainer.train_step, loader.samples
        part = samples.part()
        first = part.first if part else 0
        size = np.arange(len(batches[0].labels_BS))
        found = [samples.documents(each.first_sample - first + size)[:, 1:] for each in batches]
        every = [np.unique(found)] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(every, every[0])
        names = np.unique(np.concatenate(every))
        sums = step.group_sums
        sums.expect(len(names))
        groups = (torch.from_numpy(names.searchsorted(each)) for each in found)
        step.evaluate(
            replace(batch, groups_BS=each) for batch, each in zip(batches, groups, strict=True)
        )
        sums.expect(len(sums.names))
        rows = np.column_stack([names, sums.sums[0][:-1].cpu()])
        rows = rows[rows[:, 2] > 0].tolist()
        if step.in_backward is None:  # else no gradient is kept
            gradient_of = own_gradients(step, batches, found, number=trainer.step)
            for _, row in worst_first(rows)[:SHOWN]:
                row += gradient_of(row[0], row[2])
        if trainer.rank == 0:
            ranked = rank(trainer.config, rows)
            after = trainer.step - 1
            late = f" (NOT ITS WEIGHTS: those after step {after})" * (wanted <= after)
            content = {
                "weights_after_step": after,
                "rows": [*map(asdict, ranked)],
                "lines": [f"step {wanted}{late}:", *lines(ranked)],
            }
            run_files(trainer.run_dir).replace("documents.json", json.dumps(content))


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
            own = clip_gradients(parameters, max_norm=0, stages=step.groups.stages)
            norms.append(float(own))
            for parameter, whole in zip(parameters, kept, strict=True):
                if parameter.grad is not None and whole is not None:
                    parameter.grad.add_(whole)
                elif whole is not None:
                    parameter.grad = whole.clone()

        masked = []
        for batch, here in zip(batches, found, strict=True):
            is_own = torch.from_numpy(here == document)
            masked.append(replace(batch, labels_BS=batch.labels_BS.where(is_own, IGNORED)))
        both, [own] = float(train(masked, add_the_step).grad_norm), norms
        # |own + g|^2 = |own|^2 + 2 <own, g> + |g|^2
        return own, (both**2 - own**2 - norm**2) / 2 / norm**2

    return of


def hook(trainer: RunProgress) -> DocumentLosses | None:
    """Return the hook of a run with `debug.document_losses`."""
    if not trainer.config.debug.document_losses:
        return None
    if not trainer.task.loss_can("sums_groups"):
        raise InputError(
            f"{type(trainer.task).__name__} has a loss of its own: no loss by document"
        )
    return DocumentLosses(trainer)
