"""Module of a job's task, and checks of its options. Imports no torch.

The module of a task has `TaskOptions`, a frozen dataclass of its options, and `build_task(config, options)`, which returns a
`titan.tasks.base.Task`. A family names its task in `TASK`, or its package is such a module itself. All tasks but next-token
prediction are entry points of the group `titan.tasks`. docs/models.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from .base import completed
from .errors import Violations, choose
from .model import check_fields, family, replace_fields
from .plug_ins import load_plug_in, plug_ins_by_name
from .schema import JobConfig, TaskSection

NEXT_TOKEN = "next_token"


class TaskModule:
    """Attributes of the module of a task, or of the package of a family, that titan reads.

    Attributes:
        TASK: name of the task of a family.
        TaskOptions: dataclass of [task] options.
        build_task: function that returns the task.
    """

    TASK: str = NEXT_TOKEN
    TaskOptions: Any = None
    build_task: Callable[..., Any] | None = None


class OptionDefaults:
    """Attributes of a task's options that titan reads.

    Attributes:
        reads_text: the task reads the sources of [training] and [data] with a tokenizer.
        predicts_tokens: the model's outputs are logits for the loss of [loss].
        data_keys: keys of [data] that a task without text reads.
        may_change: options that a resumed run may have otherwise.
    """

    reads_text: bool = True
    predicts_tokens: bool = True
    data_keys: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ("path",)

    @staticmethod
    def problems(config: JobConfig, sizes: Any) -> Iterable[Any]:
        """Yield the mistakes of a job, each a key and a message."""
        return ()

    @staticmethod
    def missing() -> Iterable[Any]:
        """Yield what this machine lacks for the task."""
        return ()

    @staticmethod
    def shrink() -> dict[str, Any]:
        """Return the keys that make a job small."""
        return {}


def any_options(config: JobConfig) -> OptionDefaults:
    """Return the options of a job's task, with what they lack."""
    return completed(task_options(config), OptionDefaults)


def task_module(config: JobConfig) -> ModuleType | None:
    """Return the module of a job's task, or None for next-token prediction.

    Raises:
        KeyError: the task or the family is not installed.
        ConfigError: a package cannot be imported.
    """
    name, package = config.task.name, None
    if not name:
        package = family(config.model.name)
        name = completed(package, TaskModule).TASK
    if package is not None and completed(package, TaskModule).build_task is not None:
        return package
    if name == NEXT_TOKEN:
        return None
    return load_plug_in(plug_ins_by_name("titan.tasks")[name])


def task_options(config: JobConfig) -> Any:
    """Return the task's options as its dataclass, or None for next-token prediction, which has none."""
    module = task_module(config)
    return None if module is None else options_of(module, config.task)


def options_of(module: ModuleType, section: TaskSection) -> Any:
    """Return the options of a task, as the dataclass of its module."""
    return replace_fields(module.TaskOptions(), section.options)


def reads_text(config: JobConfig) -> bool:
    """Return whether the task reads the sources of [training] and [data] with a tokenizer, as most tasks do."""
    return _said(config).reads_text


def data_keys(config: JobConfig) -> tuple[str, ...]:
    """Return the keys of [data] that a task without text reads: those in the `data_keys` of its options."""
    return _said(config).data_keys


def predicts_tokens(config: JobConfig) -> bool:
    """Return whether the model's outputs are logits for the loss of [loss], which may then apply the output layer itself."""
    return _said(config).predicts_tokens


def _said(config: JobConfig) -> OptionDefaults:
    module = None
    with suppress(KeyError):  # `check_task` reports it
        module = task_module(config)
    return completed(module and module.TaskOptions, OptionDefaults)


def check_task(config: JobConfig) -> Violations:
    """Check the name and the options, and yield the problems that the task itself finds in the job."""
    section = config.task
    try:
        module = task_module(config)
    except KeyError:
        if section.name:
            names = [NEXT_TOKEN, *plug_ins_by_name("titan.tasks")]
            yield "name", f'unknown task "{section.name}"{choose(section.name, names)}'
        return
    if module is None:
        if section.options:
            yield (
                "options",
                "next-token prediction has none; set task.name to the task of a package",
            )
        return
    has = completed(module, TaskModule)
    if has.TaskOptions is None or has.build_task is None:
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
        for key, *rest in any_options(config).problems(config, sizes):
            yield f"task.{key}" if key.startswith("options.") else key, *rest
