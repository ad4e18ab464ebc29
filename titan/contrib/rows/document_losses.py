"""Loss and gradient of each document of a step, with the weights before it or, if the run begins later, its first ones, for `titan audit --rows`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan.base.run_writer import run_files
from titan.base.untrusted import InputError
from titan.contrib.rows.gradients import own_gradients
from titan.contrib.rows.ranking import SHOWN, lines, rank, worst_first
from titan.run.hook import Hook
from titan.run.progress import RunProgress


class DocumentLosses(Hook):
    """documents.json of the run: documents as RankedDocument, and the lines that are shown."""

    priority = 112

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.wanted = trainer, trainer.config.debug.document_losses

    def before_forward(self, batches: Sequence[Any]) -> None:
        trainer, wanted = self.trainer, self.wanted
        loader = trainer.loader
        if trainer.step != max(wanted, trainer.first_step):
            return
        if wanted < trainer.step:  # its samples, with later weights
            begin, stride = (wanted - 1) * trainer.sequences_per_step, loader.share.stride
            batches = [loader.make_batch(begin + n * stride) for n in range(len(batches))]
        step, samples = trainer.train_step, loader.samples
        part = samples.part()
        first = part.first if part else 0
        rows = np.arange(len(batches[0].labels_BS)) - first
        found = [samples.documents(each.first_sample + rows)[:, 1:] for each in batches]
        every = [np.unique(found)] * trainer.world_size
        dist.all_gather_object(every, every[0])
        names = np.unique(np.concatenate(every))
        sums = step.group_sums
        sums.expect(len(names))
        step.evaluate(
            replace(batch, groups_BS=torch.from_numpy(names.searchsorted(each)))
            for batch, each in zip(batches, found, strict=True)
        )
        sums.expect(len(sums.names))
        rows = np.column_stack([names, sums.sums[0][:-1].cpu()])
        rows = rows[rows[:, 2] > 0].tolist()
        # Else no gradient is kept, or that of few labels exceeds float16.
        if step.in_backward is None and step.loss_scale is None:
            gradient_of = own_gradients(step, batches, found, number=trainer.step)
            for _, row in worst_first(rows)[:SHOWN]:
                row += gradient_of(row[0], row[2])
        if trainer.rank == 0:
            ranked = rank(trainer.config, rows)
            after = trainer.step - 1
            late = f" (NOT ITS WEIGHTS: those after step {after})" * (wanted <= after)
            late += " (without the rows of data.skip)" if trainer.config.data.skip else ""
            content = {
                "weights_after_step": after,
                "rows": [*map(asdict, ranked)],
                "lines": [f"step {wanted}{late}:", *lines(ranked)],
            }
            run_files(trainer.run_dir).replace("documents.json", json.dumps(content))


def hook(trainer: RunProgress) -> DocumentLosses | None:
    """Return the hook of a run with `debug.document_losses`."""
    if not trainer.config.debug.document_losses:
        return None
    if not trainer.task.loss_can("sums_groups"):
        raise InputError(
            f"the loss of {type(trainer.task).__name__} cannot be summed by document"
        )
    return DocumentLosses(trainer)
