"""The job files that come with titan, and `titan init`, which writes the starter.

It is written as it is, for your own text with a tokenizer for it (--text), or for a Hugging Face model that goes on training (--hf).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import titan
from titan.base.untrusted import InputError
from titan.config.options import mistake
from titan.config.plug_ins import door, plug_ins, require_part
from titan.config.schema import source_of
from titan.config.toml import format_value

from .tables import parser_of

STARTER = "starter"
_LARGE = 100_000_000  # bytes of a text that a larger model suits, and from which a vocabulary is learnt at most
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
    if target.exists() or not target.parent.is_dir():
        reason = (
            "it exists already" if target.exists() else f"there is no folder {target.parent}"
        )
        raise InputError(f"{target}: cannot be written: {reason}")


def _changed(text: str, changes: Changes) -> str:
    """Return a job's text with other values of some keys, at the beginning of their sections."""
    lines: list[str] = []
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


def init(argv: list[str]) -> int:
    """Run `titan init`.

    Raises:
        ConfigError, InputError: a mistake of the user, which titan.cli reports.
    """
    options = parser_of("init").parse_args(argv)
    if options.vocab and (options.hf or not options.text):
        raise mistake(
            "--vocab", "goes with --text, and not with --hf, whose model has a tokenizer"
        )
    if options.text == "":  # of a variable that is not set
        raise mistake("--text", "names no path")
    require_new(options.file)
    changes: dict[str, dict[str, Any]] = {}
    if options.hf:
        changes |= folders().job_of(options.hf)
        model = changes["model"]
        changes["model"] = model | {key: model.get(key) for key in ("flavor", "overrides")}
        # The starter's rate is for a small model that begins from nothing.
        changes["optimizer"] = {"name": "AdamW", "lr": 2e-5}
    if options.text:
        changes |= _for_text(options)
    return copy(STARTER, options.file, changes)


def _for_text(options: Any) -> dict[str, dict[str, Any]]:
    """Return keys that suit the text. Train a tokenizer on it, unless the model brings one."""
    from titan.data.reading import PIECE_CHARS, pieces_of  # imports numpy
    from titan.data.sources import in_validation, source_of_path

    from . import tokenizer
    from .prepare import open_all

    source: Any = source_of_path(options.text, text_key="text")
    documents = open_all([source])
    num_bytes = documents.num_bytes or 0
    path = source_of(source).path  # Python's library has none
    changes: dict[str, dict[str, Any]] = {
        "training": {"dataset": source.type, "dataset_path": path}
    }
    if options.hf:
        return changes
    # Flavor, and ids of the vocabulary and steps at most.
    large, small = ("10M", 4096, 2000), ("1M", 2048, 250)
    flavor, ids, steps = large if num_bytes >= _LARGE else small
    # A model learns a short text by heart if it passes over it too often.
    steps = min(steps, 25 + num_bytes // 2500)
    print(f"{documents.name}, {num_bytes:,} bytes: model {flavor}, {steps:,} steps")
    folder = options.file.with_name(f"{options.file.stem}_tokenizer")
    tokenizer.train(
        documents,
        vocab_size=options.vocab or min(ids, 512 + num_bytes // 200),
        output=folder,
        every=1 + num_bytes // _LARGE,
    )
    some, data = [*islice(documents.read(), 1000)], {}
    if len(some) < 100 and source.type == "text":
        # Part of a few long files can be kept for validation if each is several documents.
        chars = min(max(num_bytes // 400, 2000), PIECE_CHARS)
        source = source.model_copy(update={"document_chars": chars})
        some = [*islice(open_all([source]).read(), 1000)]
        data = {"sources": [{"type": "text", "path": path, "document_chars": chars}]}
    for share in (0.02, 0.05, 0.1, 0.2):
        # At least eight documents, or none.
        if sum(in_validation(document, fraction=share) for document in some) > 7:
            is_stdlib, text = source.type == "stdlib", next(pieces_of(some[0]))
            prompt = "def __init__(self" if is_stdlib else " ".join(text[:20].split()) or "The"
            samples = {"prompts": [prompt], "prompt_tokens": 24}
            has_samples = plug_ins("titan.sections", of="validation")
            changes["validation"] = {"enable": True} | (samples if has_samples else {})
            changes["data"] = data | {"validation_fraction": share}
            if data:
                changes["training"] = {"dataset": None, "dataset_path": None}
            break
    changes["training"]["steps"] = steps
    changes["model"] = {"flavor": flavor}
    changes["tokenizer"] = {"path": str(folder)}
    return changes
