"""Find what `[task]` trains a model on, and check its options. Imports no torch.

A task is a module with `TaskOptions`, a frozen dataclass of its options, and `build_task(config, options)`, which returns a
`titan.task.Task`. A family whose models are not trained on the next token has both in its package; another package registers such
a module under the entry point `titan.tasks`. docs/own_task.md says what titan reads, with an example.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .base import load_plug_in, plug_ins
from .errors import RuleViolation, choose
from .model import check_fields, family, replace_fields, resolve_model
from .schema import JobConfig

NEXT_TOKEN = "next_token"


def task_module(config: JobConfig) -> ModuleType | None:
    """Return the module of a job's task; None: next-token prediction. Raises KeyError for a task or family that is not installed,
    ConfigError for a package that cannot be imported."""
    name = config.task.name
    if name == NEXT_TOKEN:
        return None
    if name:
        return load_plug_in({entry.name: entry for entry in plug_ins("titan.tasks")}[name])
    package = family(config.model.name)
    return package if hasattr(package, "build_task") else None


def task_options(config: JobConfig) -> Any:
    """Return the task's options as its dataclass; None: next-token prediction, which has none."""
    module = task_module(config)
    return None if module is None else replace_fields(module.TaskOptions(), config.task.options)


def reads_text(config: JobConfig) -> bool:
    """Return whether the task reads the sources of [training] and [data] with a tokenizer, as most do."""
    return _says(config, "reads_text")


def data_keys(config: JobConfig) -> tuple[str, ...]:
    """Return the keys of [data] that a task reads which does not read text: what its options name as `data_keys`."""
    return _says(config, "data_keys", ())


def predicts_tokens(config: JobConfig) -> bool:
    """Return whether the model's output are logits for the loss of [loss], which may then apply the output layer itself."""
    return _says(config, "predicts_tokens")


def _says(config: JobConfig, name: str, default: Any = True) -> Any:
    try:
        module = task_module(config)
    except KeyError:
        return default  # `check_task` reports it
    return default if module is None else getattr(module.TaskOptions, name, default)


def check_task(config: JobConfig) -> Iterator[RuleViolation]:
    """Check the name, the options, and what the task itself says about the job."""
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
        yield "name", f"{module.__name__} lacks TaskOptions or build_task; see docs/own_task.md"
        return
    violations = [*check_fields(section.options, module.TaskOptions(), prefix="task.options")]
    yield from violations
    sizes, _ = resolve_model(config.model)
    if not violations and sizes is not None:
        options = task_options(config)
        if hasattr(options, "problems"):
            yield from options.problems(config, sizes)
