"""Recorder of a train step: titan/numerics/recorder.py, with the shapes and the samples of a job. Its hook is for `titan diff`."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import titan
from titan.base.run_folder import git_state
from titan.config.layout import AXES
from titan.data.base import TensorBatch
from titan.parallel import shard_sequence
from titan.parallel.mesh import axis_rank, axis_size
from titan.parallel.tensor_styles import argument_names
from titan.run.hook import Hook
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport, TrainStep
from titan.step.whole_model import build_whole_model
from titan.tasks import task_of

from .digests import whole
from .recorded import FOLDER, RecordedStep, write_step
from .recorder import Recorder, whole_shapes

_LOG = logging.getLogger("titan")


class StepRecorder:
    """Recorder of the steps of a `TrainStep`.

    Attributes:
        recorder: the recorder of its modules.
    """

    def __init__(self, step: TrainStep, *, perturbed: int = 0) -> None:
        """Hook the modules of a train step.

        Args:
            step: the train step.
            perturbed: see `Recorder`.
        """
        self.step = step
        self.recorder = Recorder(
            step.model_parts, _shapes(step), mesh=step.mesh, perturbed=perturbed
        )

        def gradients() -> None:
            if self.recorder.active:
                self.recorder.parameters("gradient")

        step.call_with_gradients(gradients)

    def begin(self, batches: Sequence[Any]) -> None:
        """Begin the record of a step with these micro-batches of this rank."""
        step, local = self.step, [self.step.to_local(batch) for batch in batches]
        first = local[0].input
        length = first.shape[1] * axis_size(step.mesh, "cp")
        positions = torch.arange(length)
        if (cp := axis_size(step.mesh, "cp")) > 1:
            rank = axis_rank(step.mesh, "cp")
            balanced = step.config.parallelism.splits_from_both_ends
            positions = shard_sequence(positions, dim=0, rank=rank, size=cp, balanced=balanced)
        self.recorder.begin(
            batch=len(first),
            samples=len(first) * len(batches),
            positions=positions,
            length=length,
        )
        for number, each in enumerate(local):
            self.recorder.inputs(number * len(first), tokens=each.input, labels=each.targets)

    def end(self, number: int, report: StepReport) -> RecordedStep:
        """End the record of a step. On ranks other than the first it has no tensors.

        Args:
            number: number of the step.
            report: its numbers.
        """
        step = self.step
        self.recorder.parameters("update")
        about = {
            "titan": titan.__version__,
            "torch": torch.__version__,
            "host": platform.node(),
            "draws": step.draws.seen,
            "commit": git_state(Path(titan.__file__).parent),
        }
        return RecordedStep(
            step=number,
            loss=report.loss.item(),
            grad_norm=whole(report.grad_norm).item(),
            axes={axis: n for axis in AXES if (n := axis_size(step.mesh, axis)) > 1},
            computes_in=str(step.config.training.mixed_precision_param),
            about=about,
            tensors=self.recorder.end(),
        )


def _shapes(step: TrainStep) -> dict[str, Any]:
    """Return the whole shapes of the outputs of modules, from a run on meta."""
    job = step.job

    def run(model: nn.Module, batch: int, length: int) -> None:
        training = job.config.training
        training = training.model_copy(update={"local_batch_size": batch, "seq_len": length})
        task = task_of(job.config.model_copy(update={"training": training}))
        meta = torch.device("meta")
        whole = task.complete(task.random_batch(0), device=meta, is_cut=True)
        inputs = task.microbatch(whole.map(lambda _, tensor: tensor.to(meta)))
        # Documents of variable length are for the hook that makes their mask.
        named = {n: x for n, x in inputs.inputs.items() if n in argument_names(model)}
        with torch.no_grad():
            model(inputs.input, **named)

    try:
        model, _ = build_whole_model(job)
        return whole_shapes(model, run, length=job.config.training.seq_len)
    except Exception as error:  # of any model's code
        _LOG.warning(
            "outputs of modules are not recorded, since the model does not run on meta: %s",
            error,
        )
        return {}


class Recording(Hook):
    """Record of the steps of `debug.record_steps`, in the folder `recorded` of the run."""

    priority = 110

    def __init__(self, trainer: RunProgress) -> None:
        debug = trainer.config.debug
        self.trainer, self.steps = trainer, frozenset(debug.record_steps)
        self.recorder = StepRecorder(trainer.train_step, perturbed=debug.record_perturbed)

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        if self.trainer.step in self.steps:
            self.recorder.begin(batches)

    def updated(self, report: StepReport) -> None:
        trainer = self.trainer
        if trainer.step in self.steps:
            recorded = self.recorder.end(trainer.step, report)
            if trainer.rank == 0:
                write_step(trainer.run_dir, recorded)
                _LOG.info("recorded step %s in %s/%s", trainer.step, trainer.run_dir, FOLDER)


def hook(trainer: RunProgress) -> Recording | None:
    """Return the hook of a run with `debug.record_steps`."""
    return Recording(trainer) if trainer.config.debug.record_steps else None
