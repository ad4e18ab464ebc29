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
from titan.contrib.rows.ranking import lines, rank, worst
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
            gradients = OwnGradients(step, batches, found, number=trainer.step)
            for row in worst(rows):
                row += gradients.of(row[0], row[2])
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


class OwnGradients:
    """Gradients of single documents of a step."""

    def __init__(
        self,
        step: TrainStep,
        batches: Sequence[Any],
        found: Sequence[np.ndarray],
        *,
        number: int,
    ) -> None:
        """Compute the gradient of the step.

        Args:
            step: the training step, whose weights stay as they are.
            batches: this rank's batches.
            found: int64[B, S] for each batch: the document of each label.
            number: the step's number.
        """
        self._step, self._batches, self._found, self._number = step, batches, found, number
        self._whole: list[Tensor | None] = []
        report = self._train(batches, self._keep)
        self._norm, self._tokens = float(report.grad_norm), float(report.num_valid)

    def _train(self, batches: Sequence[Any], on_gradients: Callable[[], None]) -> StepReport:
        """Compute gradients, without an update and without the run's other listeners."""
        step, listeners = self._step, self._step.on_gradients
        step.on_gradients = [on_gradients]
        report = step.train(batches, step=self._number, accept=lambda *_: False)
        step.on_gradients = listeners
        return report

    def _keep(self) -> None:
        grads = (parameter.grad for parameter in self._step.parameters)
        self._whole = [None if grad is None else grad.clone() for grad in grads]

    def of(self, document: float, tokens: float) -> list[float]:
        """Return the norm of a document's own gradient, and its share.

        Args:
            document: its number.
            tokens: number of its labels in the step.
        """
        step, norms = self._step, list[float]()

        def add_the_step() -> None:
            # This gradient is a mean over the document's labels, and the step's one over all labels.
            for parameter in step.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(tokens / self._tokens)
            stages = step.groups.stages
            norms.append(float(clip_gradients(step.parameters, max_norm=0, stages=stages)))
            for parameter, whole in zip(step.parameters, self._whole, strict=True):
                if parameter.grad is not None and whole is not None:
                    parameter.grad.add_(whole)
                elif whole is not None:
                    parameter.grad = whole.clone()

        masked = []
        for batch, here in zip(self._batches, self._found, strict=True):
            is_own = torch.from_numpy(here == document)
            masked.append(replace(batch, labels_BS=batch.labels_BS.where(is_own, IGNORED)))
        both = float(self._train(masked, add_the_step).grad_norm)
        [own] = norms
        # |own + g|^2 = |own|^2 + 2 <own, g> + |g|^2
        return [own, (both**2 - own**2 - self._norm**2) / 2 / self._norm**2]


def hook(trainer: RunProgress) -> DocumentLosses | None:
    """Return the hook of a run with `debug.document_losses`."""
    if not trainer.config.debug.document_losses:
        return None
    if not trainer.task.loss_can("sums_groups"):
        raise InputError(
            f"{type(trainer.task).__name__} has a loss of its own: no loss by document"
        )
    return DocumentLosses(trainer)
