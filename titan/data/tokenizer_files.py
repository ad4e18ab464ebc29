"""Files of a tokenizer, and their copy in the run folder, with which a run can be used from any folder or machine.

RUN/tokenizer/    the file that the job names, and files beside it that name special tokens or that an export copies
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.config.schema import JobConfig, TokenizerSection
from titan.data.named_tokens import BESIDE
from titan.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from titan.run_writer import require_inside, write_atomically
from titan.untrusted import InputError, decode, is_there, parse_json, read_bytes, root_of

FOLDER = "tokenizer"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "generation_config.json",
)
# Values of a tokenizer.json. A vocabulary of 250,000 tokens with its merges has 1.5 million.
_MAX_VALUES = 3_000_000

_LOG = logging.getLogger("titan")


def tokenizer_path(config: JobConfig) -> str:
    """Return the path of a job's tokenizer, or "" for the embedded tokenizer, which has no file."""
    section = config.tokenizer
    return "" if section.name == "bytes" else section.path or config.model.hf_assets_path


def tokenizer_files(where: str) -> list[Path]:
    """Return the tokenizer's files in a folder or beside a file. "" is the embedded tokenizer, which has no files."""
    if not where:
        return []
    path = Path(where).expanduser()
    folder = path if path.is_dir() else path.parent
    files = [folder / name for name in TOKENIZER_FILES if is_there(folder / name)]
    # Without a vocabulary, the other files are no tokenizer.
    return files if files and files[0].name in ("tokenizer.json", "tokenizer.model") else []


def read_asset(file: Path) -> bytes:
    """Read a file of a tokenizer.

    Raises:
        InputError: the content does not fit the name, or the file is a link out of its folder.
    """
    data = read_bytes(file, within=root_of(file.parent))
    if file.suffix == ".json":
        parse_json(data, dict[str, Any], name=file, values=_MAX_VALUES)
    elif file.suffix in (".txt", ".jinja") and "\0" in decode(data, name=file):
        raise InputError(f"{file}: is not text")
    return data


def keep_tokenizer(tokenizer: Tokenizer, run: Path) -> None:
    """Copy a tokenizer's files into a run folder. One rank calls this at each start.

    A later start writes nothing while the files are the same, and replaces the copy if the job names other files.

    Raises:
        OSError: the copy cannot be written.
    """
    used, folder = tokenizer.file, run / FOLDER
    if used is None:
        if tokenizer.chat_template:
            write_files({CHAT_TEMPLATE: tokenizer.chat_template.encode()}, folder, within=run)
        return
    if used.resolve().is_relative_to(folder.resolve()):
        return
    require_inside(folder / f".{used.name}", run)  # before files of these names are removed
    # The tokenizer's own files may be links to anywhere, since they have been read already.
    read = {used.name, *(BESIDE if tokenizer.kind == "huggingface" else ())}
    contents = {}
    for name in sorted({*read, *TOKENIZER_FILES}):
        file = used.with_name(name)
        try:
            if is_there(file):
                contents[name] = read_bytes(
                    file, within=None if name in read else root_of(file.parent)
                )
        except InputError as error:  # training needs none of these
            _LOG.warning("%s has no copy of a file beside the tokenizer: %s", folder, error)
    if tokenizer.chat_template:  # its file may be elsewhere
        contents[CHAT_TEMPLATE] = tokenizer.chat_template.encode()
    # Remove the files of an earlier job's tokenizer: one of another kind could be found first.
    for name in {*TOKENIZER_FILES, *BESIDE} - contents.keys():
        (folder / name).unlink(missing_ok=True)
    write_files(contents, folder, within=run)


def write_files(contents: Mapping[str, bytes], folder: Path, *, within: Path | None = None) -> None:
    """Write the files of a tokenizer, by name, into a folder. A file that has the same content already stays untouched.

    Args:
        contents: content of each file.
        folder: folder of the files.
        within: folder that no link may lead out of.
    """
    for name, data in contents.items():
        file = folder / name
        if not (file.is_file() and file.read_bytes() == data):
            write_atomically(file, data, durable=False, within=within)


def with_tokenizer(config: JobConfig, *, run: Path | None, path: str = "") -> JobConfig:
    """Return a run's config with the tokenizer to use now.

    The run's copy comes before the path in the config. That path may be relative, and mean another file in this working folder.

    Args:
        config: the run's config.
        run: the run folder, or None.
        path: "bytes", a file or a folder, which replaces the run's tokenizer. Empty keeps it.
    """
    where = tokenizer_path(config)
    if path:
        section = TokenizerSection(name="bytes") if path == "bytes" else TokenizerSection(path=path)
    elif where and run is not None and (copy := run / FOLDER).is_dir():
        # A job may name the file itself, since its folder may have a tokenizer of another kind, too.
        named = copy / Path(where).name
        used = named if named.is_file() else copy
        section = config.tokenizer.model_copy(update={"path": str(used), "chat_template": ""})
    elif run is not None and (template := run / FOLDER / CHAT_TEMPLATE).is_file():
        section = config.tokenizer.model_copy(update={"chat_template": str(template)})
    else:
        return config
    return config.model_copy(update={"tokenizer": section})
