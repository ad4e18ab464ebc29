"""Profile that a trace corrects: the one to begin with, and the file of the result. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from titan.base.hardware import recognise
from titan.config.errors import ConfigError
from titan.config.options import mistake
from titan.sim.price.profiles import load_profile

Figures = dict[str, Any]


def base_of(name: str) -> str:
    """Return the name of the profile to begin with."""
    row = recognise(name)
    name_of_profile = row.name if row else ""
    try:
        load_profile(name_of_profile)
    except ConfigError:
        raise mistake(
            "--hardware",
            f"there is no profile of {name} to begin with: name the most similar one",
        ) from None
    return name_of_profile


def to_toml(name: str, base: str, figures: Figures, *, note: str) -> str:
    """Return the text of a profile file."""
    lines = [f"name = {json.dumps(name)}", f"base = {json.dumps(base)}", ""]
    lines += [f"{key} = {_value(value)}" for key, value in figures.items()]
    lines += ["", "[sources]", *(f"{key} = {json.dumps(note)}" for key in figures)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a figure in TOML's syntax."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.5g}" if isinstance(value, float) and value < 1e5 else f"{value}"
