"""Base class of sections, and types of their fields.

A plug-in derives its sections from the base class here. It cannot import titan.config.schema, which imports every plug-in,
including the one that is being imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from titan.base.untrusted import read_lines

from .errors import KeyPath, UnknownValue
from .plug_ins import plug_ins_by_name


def _split_commas(value: Any) -> Any:
    """Split "a, b", which is how TorchTitan's older files write lists."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _numbers(value: Any) -> Any:
    """Read "1, 2, 3", or one number, as a list of numbers."""
    if isinstance(value, int):
        return [value]
    parts = _split_commas(value)
    is_text = isinstance(value, str)
    return [int(part) if part.isdecimal() else part for part in parts] if is_text else parts


def _rows(value: Any) -> Any:
    """Replace files among rows by their lines, so that the resolved job names every row."""
    if not isinstance(value, str | list):
        return value
    found = []
    for entry in map(str, _split_commas(value)):
        if ":" in entry:
            found += [entry]
        else:
            found += (line.strip() for _, line in read_lines(Path(entry).expanduser()))
    if wrong := [row for row in found if not re.fullmatch(r".+:[0-9]{1,12}", row)]:
        raise ValueError(f"{wrong[0]!r} is not SOURCE:ROW")
    return found


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1")
    return value


# Types of fields.
StrList = Annotated[list[str], BeforeValidator(_split_commas)]
RowList = Annotated[list[str], BeforeValidator(_rows)]
LIMIT = 2**31 - 1
"""Largest count of anything. A larger count is a mistake, and would overflow somewhere in torch."""
Positive = Annotated[int, Field(ge=1, le=LIMIT)]
NonNegative = Annotated[int, Field(ge=0, le=LIMIT)]
PositiveList = Annotated[list[Positive], BeforeValidator(_numbers)]
PositiveOrAuto = Annotated[int, Field(ge=-1, le=LIMIT), AfterValidator(_not_zero)]
NonNegativeOrAuto = Annotated[int, Field(ge=-1, le=LIMIT)]
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ReadWith:
    """Condition on another key of the section under which a key is read, as metadata of the key's type.

    A value other than the default is refused elsewhere, since nothing would read it (titan/checks/choice_rules.py). It is not for
    details that wait until a mode is switched on, by an overlay or by a search: keys beside `enable`, or of recomputation.

    Attributes:
        key: the other key.
        choices: its values with which the key is read. Empty: all but "", 0, false, "off" and nothing.
    """

    key: str
    choices: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        return value in self.choices if self.choices else bool(value) and value != "off"


@dataclass(frozen=True)
class Permission:
    """Permission that a key gives, as metadata of the key's type. Only the command line or the named job can give it.

    A config that comes with data loses it (permissions.py): that of a checkpoint, or of a run folder that was not named as a job.
    Reading a local file as data is no permission, since every reader of data expects a hostile file.

    Attributes:
        to: "code" runs programs that the person did not install. "network" reaches another machine. "read" copies a file into
            what titan writes, or reads weights. "write" writes files.
        unless: values that need no permission. Paths below the run folder need none either, unless they name code.
        below_run: a relative path begins in the run folder, not in the working folder.
        option: how a tool's command line gives the permission. Empty: --KEY=VALUE.
    """

    to: Literal["code", "network", "read", "write"]
    unless: tuple[str, ...] = ()
    below_run: bool = False
    option: str = ""

    def is_needed(self, value: Any, run: Path | None) -> bool:
        """Return whether a value of the key needs the permission.

        Args:
            value: the value.
            run: folder of the run or the step that the config belongs to. None: it has no local folder.
        """
        if not value or value in self.unless:
            return False
        return self.to in ("code", "network") or not self._is_within(str(value), run)

    def _is_within(self, path: str, run: Path | None) -> bool:
        if run is None or "://" in path or "\0" in path:
            return False
        if self.below_run:  # links are the owner's: he may keep checkpoints on another disk
            return Path(os.path.normpath(run / path)).is_relative_to(os.path.normpath(run))
        try:
            return Path(path).expanduser().resolve().is_relative_to(run.resolve())
        except (OSError, RuntimeError):  # links in a circle; ~nobody
            return False


LOCAL_PRESETS = (
    "text",
    "jsonl",
    "csv",
    "parquet",
    "conversations",
    "shards",
    *plug_ins_by_name("titan.sources"),
)
"""Dataset names that need a dataset_path."""
HUB_DATASET = Permission(
    "network",
    unless=(
        "stdlib",
        "synthetic",
        "c4_test",
        *LOCAL_PRESETS,
    ),
)
"""Permission of dataset names: names that titan does not know are fetched from the Hugging Face hub."""
TOKENIZER_FILE = Permission("read", option="--tokenizer PATH")
"""Permission of tokenizer paths: their files are copied into run folders and exports."""


T = TypeVar("T")


class _Completed:
    def __init__(self, thing: object, defaults: type) -> None:
        self._thing, self._defaults = thing, defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name, getattr(self._defaults, name))


def completed(thing: object, defaults: type[T]) -> T:
    """Return an object of another package, with a class's values for the attributes that it lacks.

    Args:
        thing: such as a section, the options of a task, or the module of a family.
        defaults: class whose attributes titan may read.
    """
    return cast(T, _Completed(thing, defaults))


class Section(BaseModel):
    """Base of every section. It is frozen and strict about types, and refuses unknown keys.

    Attributes:
        is_list: a new table that a package adds may stand several times in a job, as [[NAME]].
        by_phase: keys that are lists with a value for each phase. The last value goes on.
    """

    is_list: ClassVar[bool] = False
    by_phase: ClassVar[tuple[str, ...]] = ()

    # use_attribute_docstrings: the string below a field is its help.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnknownValue(name)
            return super().__getattr__(name)

    def in_phase(self, number: int) -> Section:
        """Return the section as phase 1, 2, ... of a job reads it: with that phase's value alone in each list of `by_phase`."""
        lists = {name: getattr(self, name) for name in self.by_phase}
        values = {n: [each[min(number, len(each)) - 1]] for n, each in lists.items()}
        return self.model_copy(update=values)

    def forget(self, path: KeyPath) -> None:
        """Make the value of the setting at `path` unknown. For an item of a list, the whole list becomes unknown."""
        # Reading the attribute then raises UnknownValue, in __getattr__.
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


class TokenFiles(DocumentOptions):
    """Files of tokens, which are mapped as they are. Base class of sources that no tokenizer reads."""

    path: str

    def open(self, options: Any) -> Any:
        """Return the tokens of a split.

        Args:
            options: `titan.data.shard_samples.SampleOptions` of the job.

        Returns:
            A `titan.data.shards.TokenShards`. None: `titan prepare` wrote the files.

        Raises:
            DataError: the files are damaged, or do not fit the job.
        """
