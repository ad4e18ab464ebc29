"""Training tasks: a job's batches, loss, validation metrics and samples (base.py). Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.config.schema import JobConfig
from titan.config.task import options_of, task_module

if TYPE_CHECKING:
    from titan.tasks.base import Task


def task_of(config: JobConfig) -> Task:
    """Return the task of a job, whose options have been checked."""
    if (module := task_module(config)) is not None:
        return module.build_task(config, options_of(module, config.task))
    from titan.tasks.next_token import NextToken

    return NextToken(config)
