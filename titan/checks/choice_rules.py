"""Keys that are read only with some values of another key (`ReadWith` in titan/config/base.py)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from titan.config.base import ReadWith, Section
from titan.config.errors import KeyPath, Violations, key_text

UNKNOWN = object()


@cache
def _declared(section: type[Section]) -> list[tuple[str, ReadWith, Any]]:
    """Return the keys of a section that belong to a choice, with what they need and their defaults."""
    return [
        (name, needs, field.get_default(call_default_factory=True))
        for name, field in section.model_fields.items()
        for needs in field.metadata
        if isinstance(needs, ReadWith)
    ]


def check_choices(section: Section, path: KeyPath = ()) -> Violations:
    """Refuse values that nothing reads, as they belong to another choice."""
    # Iterating a section skips values that are mistakes already.
    values: dict[str, Any] = dict(section)
    for name, value in values.items():
        if isinstance(value, Section):
            yield from check_choices(value, (*path, name))
    for name, needs, default in _declared(type(section)):
        now = values.get(needs.key, UNKNOWN)
        if values.get(name, default) == default or now is UNKNOWN or needs.holds(now):
            continue
        choices = " or ".join(map(json.dumps, needs.choices))
        fix = f"set {needs.key} = {choices}" if choices else f"set {needs.key}"
        # TOML has no word for a key that is not set.
        case = (
            f"without {needs.key}" if now is None else f"with {needs.key} = {json.dumps(now)}"
        )
        message = f"nothing reads it {case}; {fix}, or remove it"
        yield key_text((*path, name)), message
