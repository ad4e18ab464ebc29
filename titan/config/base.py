"""What a section is. A plug-in derives its own from here, and not from titan.config.sections, which imports every plug-in,
also the one that is just being imported."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from .problems import ConfigError, Problem


class Section(BaseModel):
    """Base of every section: frozen, strict about types, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class DocumentOptions(Section):
    """Shared by every source."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples drawn from this source, relative to the other sources' weights."""


def load_plug_in(entry: EntryPoint) -> Any:
    """What an entry point names; raises `ConfigError` where its package cannot be imported."""
    try:
        return entry.load()
    except Exception as error:
        package = f" (package {entry.dist.name})" if entry.dist else ""
        said = f"cannot be loaded: {type(error).__name__}: {error}"
        problem = Problem("", 0, "", f"entry point {entry.name}{package} {said}")
        raise ConfigError([problem]) from error
