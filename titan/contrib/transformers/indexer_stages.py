"""Stages of training an indexer (docs/models.md): what each phase of a run trains, and columns of the metrics.

"dense": attention sees all keys, and indexers are frozen. "indexer": all but the indexers is frozen, and they learn from attention to all
keys. "joint": attention sees the chosen keys. What is frozen in a stage has no gradient when the optimizer steps, so that its weights
and its optimizer state stay.

L layers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan.base.async_scalars import AsyncScalars
from titan.data.base import TensorBatch
from titan.observe.clock import Window
from titan.parallel.init_weights import canonical_name
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport

from .config import TransformersConfig


class IndexerStages(Hook):
    """Stages of the phases, and the figures of indexers at logged steps.

    Attributes:
        layers: layers of this rank that choose their keys, by number.
        others: this rank's parameters that are not of indexers.
        measured: figures of the last step, if it was logged.
    """

    priority = 110

    def __init__(self, trainer: RunProgress) -> None:
        from .sparse_attention import SparseAttention

        self.trainer = trainer
        self.measured: AsyncScalars | None = None
        self.layers: dict[int, SparseAttention] = {}
        self.others: list[nn.Parameter] = []
        for part in trainer.train_step.model_parts:
            self.others += (p for n, p in part.named_parameters() if ".indexer." not in n)
            for name, module in part.named_modules():
                if isinstance(module, SparseAttention):
                    self.layers[int(canonical_name(name).split(".")[1])] = module
        trainer.train_step.call_with_gradients(self.freeze)

    @property
    def stage(self) -> str:
        """Return the stage of the phase that runs."""
        job: Any = self.trainer.phase.config
        return job.sparse_attention.stages[0]

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        for module in self.layers.values():
            module.begin(self.stage)

    def freeze(self) -> None:
        """Remove the gradients of what the stage does not train. In "dense", indexers have none."""
        for parameter in self.others if self.stage == "indexer" else ():
            del parameter.grad  # sets it to None

    def updated(self, report: StepReport) -> None:
        step, self.measured = self.trainer.train_step, None
        if not self.trainer.logs_this_step:
            return
        # A stage of a pipeline fills the rows of its layers: loss, mass in the choice, and queries.
        sums_L3 = torch.zeros(self.trainer.sizes.n_layers, 3, device=step.device)
        for layer, module in self.layers.items():
            sums_L3[layer] = module.sums
        if step.groups.loss is not None:
            dist.all_reduce(sums_L3, group=step.groups.loss)
        step.sum_over_groups([sums_L3])
        self.measured = AsyncScalars([sums_L3])

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        if self.measured is None:
            return {}
        sums_L3 = torch.tensor(self.measured.values()).view(-1, 3)
        layers = [layer for layer, sums in enumerate(sums_L3) if sums[2]]
        if not layers:
            return {}
        means_L2 = sums_L3[layers, :2] / sums_L3[layers, 2:]
        losses, recalls = means_L2.T.tolist()
        return {
            "indexer_loss": sum(losses) / len(losses),
            "indexer": {"layer": layers, "loss": losses, "recall": recalls},
        }


def hook(trainer: RunProgress) -> IndexerStages | None:
    """Return the hook of a model whose layers choose their keys."""
    sizes = trainer.sizes
    is_ours = isinstance(sizes, TransformersConfig) and sizes.index_width > 0
    return IndexerStages(trainer) if is_ours else None
