"""Rules of [[evaluation]], of the prompts of [validation], and of tasks' files. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan.base.untrusted import InputError, read_bytes
from titan.config.errors import RuleViolation
from titan.config.schema import JobConfig
from titan.config.task import task_module
from titan.data.special_tokens import fingerprint

from .examples import is_file, read_task


def check_evaluation(config: JobConfig) -> Iterator[RuleViolation]:
    """Check that evaluations and prompts have next-token prediction.

    Two tasks must not have columns of one name.
    """
    job: Any = config
    with suppress(KeyError):  # `check_task` reports it
        if task_module(config) is not None:
            wanted = {
                "evaluation": job.evaluation,
                "validation.prompts": job.validation.prompts,
            }
            lacks = "needs next-token prediction, and this model has another task; remove it"
            for key, value in wanted.items():
                if value:
                    yield key, lacks
    used: set[str] = set()
    for key, task, _ in _tasks(config):
        if (name := Path(task).stem) in used:
            yield key, f'two tasks are named "{name}"; rename a file'
        used.add(name)


def check_task_files(config: JobConfig) -> Iterator[RuleViolation]:
    """Read the tasks as the run will, and look for answers that no row can hold. This is part of the checks of a machine."""
    from titan.checks.machine import try_tokenizer  # opens files of data

    length = config.training.seq_len
    for key, task, num_examples in _tasks(config):
        try:
            pairs = read_task(task, num_examples=num_examples).pairs
        except InputError as error:
            yield key, str(error)
            continue
        # A token has at least one byte, so few answers have to be encoded.
        long = [answer for _, answer in pairs if len(answer.encode()) > length]
        tokenizer = try_tokenizer(config) if long else None
        for answer in long:
            if tokenizer and (count := len(tokenizer.encode(answer))) > length:
                fault = f"{task}: an answer has {count:,} tokens, and training.seq_len is {length:,}"
                yield key, f"{fault}: raise that, or shorten {answer[:40]!r}..."
                break


def task_facts(config: JobConfig) -> dict[str, Any]:
    """Return the identity of each file of a task, for titan.json."""
    facts = {}
    for key, task, _ in _tasks(config):
        if is_file(task):
            content = read_bytes(Path(task).expanduser())
            facts[f"{key}, {task}"] = {
                "files": 1,
                "bytes": len(content),
                "identity": fingerprint(content),
            }
    return facts


def _tasks(config: Any) -> Iterator[tuple[str, str, int]]:
    """Yield each task of a job, with its key before it and the number of its examples after it."""
    for number, section in enumerate(config.evaluation):
        for task in section.tasks:
            yield f"evaluation[{number}].tasks", task, section.num_examples
