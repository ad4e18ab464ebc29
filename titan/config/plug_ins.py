"""Entry points, through which an installed package extends titan. Imports no large package.

A package names them in its pyproject.toml, under `[project.entry-points."GROUP"]`. titan's own optional parts do the
same, and no other part of titan imports them:

    titan.hooks        NAME = a subclass of titan.run.hook.Hook, or a function of the run that returns a hook, or None for a run
                       that needs none
    titan.rules        SECTION.NAME = a rule like those of titan/checks/section_rules.py, between the sections of a job.
                       machine.NAME = a rule that asks the machine that is to run the job, as titan/checks/machine.py does
    titan.commands     NAME = the function behind `titan NAME`: it takes the arguments and returns the exit code. The first
                       line of its docstring is its line in `titan --help`
    titan.sections     SECTION.NAME = a base.py `Section`, whose keys are added to [SECTION]. A section of a new name is
                       a new table of the job
    titan.supervisors  NAME = the class that watches over each rank of a run: a titan.run.supervisor.Supervisor
    titan.extensions   KIND.NAME = an optional part. The code that asks for a part declares its contract, a Protocol or a base
                       class, with `@door("KIND")`. docs/architecture.md has the table of kinds. python.NAME = a function
                       titan.sim.NAME
    titan.tasks, titan.models, titan.optimizers, titan.losses, titan.sources
                       NAME = a choice of task.name, model.name, optimizer.name, loss.name, type of [[data.sources]]
    titan.pictures     NAME = a value of task.options.source of flow matching.
                       captions = a function that draws the descriptions of a validation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn, Protocol, TypeVar

T = TypeVar("T")

GROUPS = (
    "titan.hooks",
    "titan.rules",
    "titan.commands",
    "titan.sections",
    "titan.extensions",
    "titan.tasks",
    "titan.models",
    "titan.optimizers",
    "titan.losses",
    "titan.sources",
    "titan.supervisors",
    "titan.pictures",
    "torch_dynamo_backends",
)
DOORS: dict[type, str] = {}


@cache
def installed_entry_points() -> dict[str, list[EntryPoint]]:
    """Return the entry points that titan reads, by group. The search reads a file of each installed package."""
    found = entry_points()
    return {group: list(found.select(group=group)) for group in GROUPS}


def plug_ins(group: str, *, of: str = "") -> list[EntryPoint]:
    """Return the entry points that packages register under a group, sorted by name.

    Args:
        group: name of the group.
        of: keep only entry points with this name, or with this name and a dot at the beginning. Empty keeps all.
    """
    found = sorted(installed_entry_points()[group], key=lambda entry: entry.name)
    return [entry for entry in found if not of or f"{entry.name}.".startswith(f"{of}.")]


def plug_ins_by_name(group: str) -> dict[str, EntryPoint]:
    """Return the entry points that packages register under a group, by name."""
    return {entry.name: entry for entry in plug_ins(group)}


def load_plug_in(entry: EntryPoint) -> Any:
    """Import the object that an entry point names.

    Args:
        entry: the entry point.

    Raises:
        ConfigError: Its package cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:
        from .errors import ConfigError, Problem  # imports pydantic

        if isinstance(error, ConfigError):  # from a plug-in that this plug-in needs
            raise
        package = f" (package {entry.dist.name})" if entry.dist else ""
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
        problem = Problem("", 0, "", f"entry point {entry.name}{package} {reason}")
        raise ConfigError([problem]) from error


def load_plug_ins(group: str, *, of: str = "") -> list[Any]:
    """Import the objects that the entry points of a group name, in the order of the names.

    Args:
        group: name of the group.
        of: as for `plug_ins`.
    """
    return [load_plug_in(entry) for entry in plug_ins(group, of=of)]


def door(kind: str) -> Callable[[type[T]], type[T]]:
    """Make a class the contract of the entry points KIND.NAME of `titan.extensions`.

    A base class has subclasses as its parts, which are created without arguments. A Protocol has objects, functions or
    modules as its parts, which are taken as they are. tests/test_doors.py holds each installed part against its contract.
    """

    def declare(contract: type[T]) -> type[T]:
        DOORS[contract] = kind
        return contract

    return declare


def parts_of(contract: type[T]) -> Iterator[T]:
    """Import the installed parts of a contract, one by one in the order of their names.

    Args:
        contract: a class declared with `door`.
    """
    for entry in plug_ins("titan.extensions", of=DOORS[contract]):
        part = load_plug_in(entry)
        if Protocol in contract.__mro__:
            yield part
        elif isinstance(part, type) and issubclass(part, contract):
            yield part()
        else:
            refuse(
                "", f"entry point {entry.name}: {part} is no subclass of {contract.__name__}"
            )


def load_part(contract: type[T]) -> T | None:
    """Import the first installed part of a contract. None: no package has one."""
    return next(parts_of(contract), None)


def require_part(contract: type[T], *, key: str, missing: str) -> T:
    """Import the first installed part of a contract.

    Args:
        contract: a class declared with `door`.
        key: key or option that needs it.
        missing: what is missing, and what to do instead.

    Raises:
        ConfigError: No package has one.
    """
    if (part := load_part(contract)) is None:
        refuse(key, missing)
    return part


def refuse(key: str, message: str) -> NoReturn:
    """Raise ConfigError for a key, or for none, without its place."""
    from .errors import COMMAND_LINE, ConfigError, Problem  # imports pydantic

    raise ConfigError([Problem(COMMAND_LINE if key else "", 0, key, message)])


def is_ours(entry: EntryPoint) -> bool:
    """Return whether an entry point is titan's own. Tests check these, so they are not checked when they are loaded."""
    return entry.module.startswith("titan.")
