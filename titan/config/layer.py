"""One file of a job before it is merged with others, and the base class of changes that packages make to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import Problem, SourceLocation, Table, parent
from .plug_ins import door


@dataclass
class ConfigLayer:
    """Settings of one file or of the command line.

    Attributes:
        data: tables of the file.
        locations: place where each key was written.
    """

    data: Table
    locations: dict[str, SourceLocation]

    def table_of(self, key: str, *, create: bool = False) -> Table:
        """Return the table that contains the last part of `key`, or an empty table if there is none."""
        table = self.data
        for name in key.split(".")[:-1]:
            inner = table.setdefault(name, {}) if create else table.get(name)
            if not isinstance(inner, dict):
                return {}
            table = inner
        return table

    def remove(self, key: str) -> Any:
        """Remove a key, and the table around it if that is then empty. Return the key's value."""
        table = self.table_of(key)
        value = table.pop(last(key))
        if not table and parent(key):
            self.remove(parent(key))
        return value

    def move(self, old: str, new: str, value: Any) -> None:
        """Set `new` instead of `old`. Errors about it still name the old key and its line."""
        self.remove(old)
        self.table_of(new, create=True)[last(new)] = value
        for key in [k for k in self.locations if is_within(k, old)]:
            location = self.locations.pop(key)
            self.locations[new + key[len(old) :]] = SourceLocation(
                location.file, location.line, key
            )


def is_within(key: str, table: str) -> bool:
    """Return whether a key is a table, or one of its keys or items."""
    return key == table or key.startswith((f"{table}.", f"{table}["))


def last(key: str) -> str:
    """Return the last part of a key."""
    return key.rpartition(".")[2]


@door("load")
class LoadExtension:
    """Changes to job files before their keys are checked, such as old names of keys.

    A package registers a subclass under the entry point group `titan.extensions` as load.NAME (plug_ins.py).
    """

    def rename(self, layer: ConfigLayer) -> tuple[list[str], list[Problem]]:
        """Change one file in place. Return warnings and problems."""
        return [], []

    def complete(self, data: Table, locations: dict[str, SourceLocation]) -> list[str]:
        """Change the merged tables in place. Return warnings."""
        return []
