"""Files of a tokenizer: what those beside a tokenizer.json say of special tokens, and the copy in the run folder.

With the copy, a run can be used from any folder or machine.

RUN/tokenizer/    the file that the job names, and files beside it that name special tokens or that an export copies
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.base.run_writer import require_inside, write_atomically
from titan.base.untrusted import (
    InputError,
    decode,
    is_there,
    parse_json,
    printable,
    read_bytes,
    read_json,
    root_of,
)
from titan.config.schema import JobConfig, TokenizerSection
from titan.data import DataError
from titan.data.special_tokens import Tokenizer
from titan.data.unread import file_line

CHAT_TEMPLATE = "chat_template.jinja"
# Files beside a tokenizer.json that may name its special tokens. Earlier files win.
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
BESIDE = (TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION_CONFIG, "config.json")
# Ids from a file must be smaller.
_MAX_ID = 2**24
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
# The order in which transformers adds them.
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FOLDER = "tokenizer"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
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
                root = None if name in read else root_of(file.parent)
                contents[name] = read_bytes(file, within=root)
        except InputError as error:  # training needs none of these
            _LOG.warning("%s has no copy of a file beside the tokenizer: %s", folder, error)
    if tokenizer.chat_template:  # its file may be elsewhere
        contents[CHAT_TEMPLATE] = tokenizer.chat_template.encode()
    # Remove the files of an earlier job's tokenizer: one of another kind could be found first.
    for name in {*TOKENIZER_FILES, *BESIDE} - contents.keys():
        (folder / name).unlink(missing_ok=True)
    write_files(contents, folder, within=run)


def write_files(
    contents: Mapping[str, bytes], folder: Path, *, within: Path | None = None
) -> None:
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
        section = (
            TokenizerSection(name="bytes") if path == "bytes" else TokenizerSection(path=path)
        )
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


def read_beside(file: Path) -> dict[str, Any]:
    """Return the object in a file beside a tokenizer.json, or {} if there is no file.

    Raises:
        InputError: the file is not a JSON object.
    """
    return read_json(file, dict[str, Any]) if file.is_file() else {}


def added_beside(folder: Path) -> list[tuple[str, int | None, dict[str, bool]]]:
    """Return the tokens that transformers adds to a tokenizer.json, in its order: text, id and flags of each.

    They are those of `added_tokens_decoder` or, without it, of added_tokens.json, then the named special tokens, whose id is None:
    the next one.

    Raises:
        DataError: the files name a token without a text or an id.
    """
    values, texts = read_beside(folder / TOKENIZER_CONFIG), token_texts(folder)
    # Other names, such as image_token, follow these.
    names = sorted(texts, key=lambda name: [*_NAMES, name].index(name))
    special = [texts[name] for name in names]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = values.get(key) or read_beside(folder / BESIDE[1]).get(key)
        special += map(_text, more if isinstance(more, list) else ())
    added = values.get("added_tokens_decoder")
    if added is None:
        legacy = read_beside(folder / "added_tokens.json").items()
        added = {n: {"content": token, "special": token in special} for token, n in legacy}
    found: list[tuple[str, int | None, dict[str, bool]]] = []
    for number, token in added.items() if isinstance(added, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not re.fullmatch(r"\d{1,8}", str(number)):
            raise DataError(
                f"{folder}: its files add a token without a text or an id: {number!r}"
            )
        # The library's default for `normalized`.
        flags = {"normalized": not token.get("special")} | token
        found.append((content, int(number), {n: bool(flags[n]) for n in _FLAGS if n in flags}))
    found.sort(key=lambda token: token[1] or 0)
    flags = {"special": True, "normalized": False}
    texts = dict.fromkeys(text for text in special if isinstance(text, str))
    return [*found, *((text, None, flags) for text in texts)]


def add_tokens(library: Any, path: Path) -> None:
    """Add the tokens of files beside a tokenizer.json to the library's tokenizer, as transformers does.

    Raises:
        DataError: a file gives a token another id than the library does.
    """
    from tokenizers import AddedToken

    known = {token.content: token for token in library.get_added_tokens_decoder().values()}
    for content, number, flags in added_beside(path.parent):
        token = AddedToken(content, **flags)
        # A named token keeps the flags of its entry.
        is_known = number is None and content in known and known[content].special
        if not is_known and repr(known.get(content)) != repr(token):
            library.add_tokens([token])
            known[content] = token
        found = library.token_to_id(content)
        if number not in (None, found):
            raise DataError(
                f"tokenizer {path}: a file beside it gives {printable(content, 60)!r} the id {number}, and it is {found} here: "
                "they belong to two tokenizers; save the tokenizer again (transformers: save_pretrained)"
            )


def _is_name(key: str) -> bool:
    """Return whether the value of a key is the text of a special token."""
    return key.endswith("_token") and not key.startswith("add_")


def unread_beside(folder: Path) -> list[str]:
    """Return a line for each file beside a tokenizer with keys that nothing reads."""
    lines = []
    for name in (TOKENIZER_CONFIG, GENERATION_CONFIG):
        values = read_beside(folder / name)
        keys = [key for key, value in values.items() if value and not _is_name(key)]
        templates = values.get("chat_template")
        named = templates if isinstance(templates, list) else []
        read = ("default", "tool_use")
        keys += [f"chat_template {n.get('name')}" for n in named if n.get("name") not in read]
        lines += file_line(folder / name, keys)
    return lines


def token_texts(folder: Path) -> dict[str, str]:
    """Return the texts of named special tokens, such as pad_token. Chat templates may use these names."""
    texts: dict[str, str] = {}
    for file in reversed(BESIDE[:2]):
        values = read_beside(folder / file)
        extra = values.get("extra_special_tokens")
        named = values | (extra if isinstance(extra, dict) else {})
        for name, token in named.items():
            text = _text(token)
            if name.endswith("_token") and isinstance(text, str):
                texts[name] = text
            elif name.endswith("_token") and text is None:
                texts.pop(name, None)
    return texts


def find_special(folder: Path, which: str, vocab: dict[str, int]) -> int | None:
    """Return the id of "bos" or "eos", from the first file beside a tokenizer.json that names the token or sets it to null.

    Args:
        folder: folder of the tokenizer.
        which: "bos" or "eos".
        vocab: ids of the tokens by their text.

    Returns:
        The id, or None if no file names such a token.

    Raises:
        DataError: a file names the token by a value that is no text.
    """
    # For "bos", transformers reads only the tokenizer's own files.
    has_own = which == "bos" and (folder / BESIDE[0]).is_file()
    for name in BESIDE[: 2 if has_own else None]:
        values = read_beside(folder / name)
        token, ids = _text(values.get(f"{which}_token")), _ids(values.get(f"{which}_token_id"))
        if not isinstance(token, str | None):
            raise DataError(
                f"{folder / name}: {which}_token is a {type(token).__name__}, not a text"
            )
        if token in vocab:
            return vocab[token]
        if ids:
            return ids[0]
        if token is None and f"{which}_token" in values:
            return None
    return None


def generation_ends(folder: Path) -> set[int]:
    """Return all ids that end a generated text, from generation_config.json or, if it is missing, from config.json."""
    files = [folder / name for name in BESIDE[2:]]
    values = read_beside(files[0] if files[0].is_file() else files[1])
    return {*_ids(values.get("eos_token_id"))}


def _text(token: Any) -> Any:
    """Return the text of a token that is a text, or an object with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _ids(value: Any) -> list[int]:
    """Return the valid ids in a number or a list."""
    numbers = value if isinstance(value, list) else [value]
    return [n for n in numbers if type(n) is int and 0 <= n < _MAX_ID]
