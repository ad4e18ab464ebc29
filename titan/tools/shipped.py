"""Job files that come with titan. `titan config --list` lists and copies them, and `titan init` writes the starter."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import titan
from titan.base.untrusted import InputError
from titan.config.plug_ins import door, require_part
from titan.config.toml import format_value

STARTER = "starter"
Changes = Mapping[str, Mapping[str, Any]]
"""Values of a job's keys by section; None removes a key."""


def shipped(name: str) -> Path:
    """Return a file or folder that comes with titan: inside the package, or beside it in a checkout."""
    package = Path(titan.__file__).parent
    return package / name if (package / name).exists() else package.parent / name


def jobs() -> dict[str, Path]:
    """Return the files of the shipped jobs by name, such as "llama3_8b"."""
    return {file.stem: file for file in sorted(shipped("train_configs").glob("*.toml"))}


def about(file: Path) -> str:
    """Return the first comment of a job file, which describes the job."""
    lines = (line for line in file.read_text().splitlines() if line.startswith("# "))
    return next(lines, "# ")[2:]


def copy(name: str, target: Path, changes: Changes) -> int:
    """Write a shipped job to a file that does not exist yet. Return the exit code.

    Args:
        name: the job.
        target: the file.
        changes: other values of its keys.

    Raises:
        InputError: the file cannot be written.
    """
    # The first line tells an editor where the schema is. Its path must work from any folder.
    text = jobs()[name].read_text()
    schema = shipped("docs/schema.json").as_uri()
    text = text.replace("#:schema ../docs/schema.json", f"#:schema {schema}", 1)
    if name == STARTER and re.fullmatch(r"[\w.-]+", target.stem):
        # Another run folder keeps a second job from finding the checkpoints of the first job.
        text = text.replace("outputs/first", f"outputs/{target.stem}")
        text = text.replace(" job.toml", f" {target.name}")
    require_new(target)
    try:
        target.write_text(_changed(text, changes), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from error
    print(f"wrote {target}; train it with: titan train {target}")
    return 0


def require_new(target: Path) -> None:
    """Raise InputError if a file exists, or the folder around it does not."""
    if target.exists():
        raise InputError(f"{target}: cannot be written: it exists already")
    if not target.parent.is_dir():
        raise InputError(f"{target}: cannot be written: there is no folder {target.parent}")


def _changed(text: str, changes: Changes) -> str:
    """Return a job's text with other values of some keys, at the beginning of their sections."""
    lines = []
    keys: Mapping[str, Any] = {}
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            keys = changes.get(header[1], {})
            values = {key: value for key, value in keys.items() if value is not None}
            lines += [
                line,
                *(f"{key} = {format_value(value)}" for key, value in values.items()),
            ]
        # The key's former line, and lines that show other values of it.
        elif not (word := re.match(r"\W*(\w+)", line)) or word[1] not in keys:
            lines.append(line)
    return "\n".join([*lines, ""])


@door("folder")
class FolderCommands(Protocol):
    """Functions behind `titan check --hf` and `titan init --hf`."""

    def main(self, options: Namespace) -> int:
        """Print which model of titan a folder has. Return the exit code."""
        ...

    def job_of(self, path: Path) -> dict[str, dict[str, Any]]:
        """Return the sections of a job for the model of a folder."""
        ...


def folders() -> FolderCommands:
    """Import the module that reads Hugging Face folders, or raise ConfigError if it is not installed."""
    missing = "this titan was installed without titan/huggingface, which reads folders"
    return require_part(FolderCommands, key="--hf", missing=missing)
