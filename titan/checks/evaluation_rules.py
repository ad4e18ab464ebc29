"""Rules of [[evaluation]], of the prompts of [validation], and of tasks' files. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan.config.errors import RuleViolation
from titan.config.schema import JobConfig
from titan.config.task import task_module
from titan.data.examples import read_task
from titan.untrusted import InputError


def check_evaluation(config: JobConfig) -> Iterator[RuleViolation]:
    """Check that evaluations and prompts have next-token prediction.

    Two tasks must not have columns of one name.
    """
    with suppress(KeyError):  # `check_task` reports it
        if task_module(config) is not None:
            wanted = {
                "evaluation": config.evaluation,
                "validation.prompts": config.validation.prompts,
            }
            for key in (key for key, value in wanted.items() if value):
                yield key, "needs next-token prediction, and this model has another task; remove it"
    if config.validation.prompts and not config.validation.enable:
        yield "validation.prompts", "has no effect: set validation.enable = true, or remove it"
    used: set[str] = set()
    for number, section in enumerate(config.evaluation):
        for task in section.tasks:
            if (name := Path(task).stem) in used:
                yield f"evaluation[{number}].tasks", f'two tasks are named "{name}"; rename a file'
            used.add(name)


def check_task_files(config: JobConfig) -> Iterator[RuleViolation]:
    """Read the tasks as the run will. This is part of the checks of a machine."""
    for number, section in enumerate(config.evaluation):
        for task in section.tasks:
            try:
                read_task(task, num_examples=section.num_examples)
            except InputError as error:  # noqa: PERF203 (each task has its own line)
                yield f"evaluation[{number}].tasks", str(error)
