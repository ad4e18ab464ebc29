"""What a section is. A plug-in derives its own from here, and not from titan.config.schema, which imports every plug-in,
also the one that is just being imported."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .errors import ConfigError, KeyPath, Problem, UnknownValue


def _split_commas(value: Any) -> Any:
    """TorchTitan's older files write lists as "a, b"."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1")
    return value


StrList = Annotated[list[str], BeforeValidator(_split_commas)]
LIMIT = 2**31 - 1
"""Largest count of anything: what is more is a mistake, and would overflow somewhere in torch."""
Positive = Annotated[int, Field(ge=1, le=LIMIT)]
NonNegative = Annotated[int, Field(ge=0, le=LIMIT)]
PositiveOrAuto = Annotated[int, Field(ge=-1, le=LIMIT), AfterValidator(_not_zero)]
DType = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Base of every section: frozen, strict about types, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:  # else every name would pass for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnknownValue(name)
            return super().__getattr__(name)

    def forget(self, path: KeyPath) -> None:
        """Make the setting at `path` one that nobody knows; what is no setting by itself (an item of a list), the one that holds it."""
        name, *rest = path
        values: dict[Any, Any] = vars(self)
        if rest and isinstance(values.get(name), Section):
            values[name].forget(tuple(rest))
        else:
            values.pop(name, None)


class DocumentOptions(Section):
    """Settings that all sources share."""

    weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
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
