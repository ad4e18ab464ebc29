"""Module of a job's task, and checks of its options. Imports no torch.

The module of a task has `TaskOptions`, a frozen dataclass of its options, and `build_task(config, options)`, which returns a
`titan.tasks.base.Task`. A family names its task in `TASK`, or its package is such a module itself. All tasks but next-token
prediction are entry points of the group `titan.tasks`. docs/models.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .errors import RuleViolation, choose
from .model import check_fields, family, replace_fields
from .plug_ins import load_plug_in, plug_ins
from .schema import JobConfig, TaskSection

NEXT_TOKEN = "next_token"


def task_module(config: JobConfig) -> ModuleType | None:
    """Return the module of a job's task, or None for next-token prediction.

    Raises:
        KeyError: the task or the family is not installed.
        ConfigError: a package cannot be imported.
    """
    name, package = config.task.name, None
    if not name:
        package = family(config.model.name)
        name = getattr(package, "TASK", NEXT_TOKEN)
    if package is not None and hasattr(package, "build_task"):
        return package
    if name == NEXT_TOKEN:
        return None
    return load_plug_in({entry.name: entry for entry in plug_ins("titan.tasks")}[name])


def task_options(config: JobConfig) -> Any:
    """Return the task's options as its dataclass, or None for next-token prediction, which has none."""
    module = task_module(config)
    return None if module is None else options_of(module, config.task)


def options_of(module: ModuleType, section: TaskSection) -> Any:
    """Return the options of a task, as the dataclass of its module."""
    return replace_fields(module.TaskOptions(), section.options)


def reads_text(config: JobConfig) -> bool:
    """Return whether the task reads the sources of [training] and [data] with a tokenizer, as most tasks do."""
    return _says(config, "reads_text")


def data_keys(config: JobConfig) -> tuple[str, ...]:
    """Return the keys of [data] that a task without text reads: those in the `data_keys` of its options."""
    return _says(config, "data_keys", ())


def predicts_tokens(config: JobConfig) -> bool:
    """Return whether the model's outputs are logits for the loss of [loss], which may then apply the output layer itself."""
    return _says(config, "predicts_tokens")


def _says(config: JobConfig, name: str, default: Any = True) -> Any:
    try:
        module = task_module(config)
    except KeyError:
        return default  # `check_task` reports it
    return default if module is None else getattr(module.TaskOptions, name, default)


def check_task(config: JobConfig) -> Iterator[RuleViolation]:
    """Check the name and the options, and yield the problems that the task itself finds in the job."""
    section = config.task
    try:
        module = task_module(config)
    except KeyError:
        if section.name:
            names = [NEXT_TOKEN, *(entry.name for entry in plug_ins("titan.tasks"))]
            yield "name", f'unknown task "{section.name}"{choose(section.name, names)}'
        return
    if module is None:
        if section.options:
            yield (
                "options",
                "next-token prediction has none; set task.name to the task of a package",
            )
        return
    if not hasattr(module, "TaskOptions") or not hasattr(module, "build_task"):
        name = getattr(module, "__name__", section.name)
        yield (
            "name",
            f"{name} lacks TaskOptions or build_task; see docs/models.md, A task of your own",
        )
        return
    violations = [*check_fields(section.options, module.TaskOptions(), prefix="task.options")]
    yield from violations
    sizes = config.model.resolved[0]
    if not violations and sizes is not None:
        options = task_options(config)
        if hasattr(options, "problems"):
            for key, *rest in options.problems(config, sizes):
                yield f"task.{key}" if key.startswith("options.") else key, *rest
