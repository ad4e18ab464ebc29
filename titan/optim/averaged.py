"""Weights replaced by an average of them, for validations and samples.

An installed part may keep an average beside the weights (step.NAME of the entry points `titan.extensions`): a function of the
model's parts and the job that returns an `Average`, or None. Some optimizers keep one themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan.config.plug_ins import door, parts_of
from titan.config.schema import JobConfig


class Average(Protocol):
    """Average of the weights of a training step.

    Attributes:
        tensors: the average, laid out like the parameters, by their plain names. Checkpoints hold it.
        validates: a validation uses the average.
    """

    tensors: Mapping[str, Tensor]
    validates: bool

    def restart(self) -> None:
        """Begin again with the weights."""

    def update(self, step: int) -> None:
        """Add the weights after a step to the average."""

    def in_place(self) -> AbstractContextManager[None]:
        """Replace the weights by the average within a block."""
        ...


@runtime_checkable
class AveragingOptimizer(Protocol):
    """Optimizer that replaces the weights by its own average until `train` is called, as schedule-free ones do."""

    def eval(self) -> object:
        """Put the average in place."""
        ...


@door("step")
class BuildAverage(Protocol):
    """Function that builds the average that a job asks for, or returns None. It may set up the model's parts by the job, too."""

    def __call__(self, parts: Sequence[nn.Module], config: JobConfig, /) -> Average | None: ...


def build_average(parts: Sequence[nn.Module], config: JobConfig) -> Average | None:
    """Return the average that a job asks for, or None."""
    built = [build(parts, config) for build in parts_of(BuildAverage)]
    return next(filter(None, built), None)


def averaged(step: Any, *, validates: bool = False) -> AbstractContextManager[None]:
    """Return a block in which the model has an average of its weights: the job's, or the optimizer's.

    Args:
        step: the run's TrainStep.
        validates: the block validates, for which a job may want the weights.
    """
    step.before_change()
    average = step.average
    if average is not None and (average.validates or not validates):
        return average.in_place()
    if isinstance(step.optimizer, AveragingOptimizer):
        return of_optimizer(step.optimizer, step.model_parts)
    return nullcontext()


@contextmanager
def of_optimizer(optimizer: Any, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the weights by the optimizer's average within a block (arXiv:2405.15682).

    Args:
        optimizer: optimizer with methods `eval` and `train`, which set the average and the weights.
        parts: the model, or its stages on this rank.
    """
    optimizer.eval()
    reshard(parts)
    try:
        yield
    finally:
        optimizer.train()
        reshard(parts)


def reshard(parts: Sequence[nn.Module]) -> None:
    """Make FSDP drop its gathered weights, which may be outdated."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
