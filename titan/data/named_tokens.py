"""Special tokens as the files beside a tokenizer.json state them: their names, and the tokens that end a generated text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titan.data import DataError
from titan.data.unread import file_line
from titan.untrusted import printable, read_json

# Files beside a tokenizer.json that may name its special tokens. Earlier files win.
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
BESIDE = (TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION_CONFIG, "config.json")
# Ids from a file must be smaller.
_MAX_ID = 2**24
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
# The order in which transformers adds them.
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


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
    special = [texts[name] for name in sorted(texts, key=lambda name: [*_NAMES, name].index(name))]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = values.get(key) or read_beside(folder / BESIDE[1]).get(key)
        more = more if isinstance(more, list) else []
        special += [token.get("content") if isinstance(token, dict) else token for token in more]
    added = values.get("added_tokens_decoder")
    if added is None:
        legacy = read_beside(folder / "added_tokens.json").items()
        added = {n: {"content": token, "special": token in special} for token, n in legacy}
    found: list[tuple[str, int | None, dict[str, bool]]] = []
    for number, token in added.items() if isinstance(added, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not re.fullmatch(r"\d{1,8}", str(number)):
            raise DataError(f"{folder}: its files add a token without a text or an id: {number!r}")
        # The library's default for `normalized`.
        flags = {"normalized": not token.get("special")} | token
        found.append(
            (content, int(number), {name: bool(flags[name]) for name in _FLAGS if name in flags})
        )
    found.sort(key=lambda token: token[1] or 0)
    flags = {"special": True, "normalized": False}
    named = (token for token in dict.fromkeys(special) if isinstance(token, str))
    return [*found, *((token, None, flags) for token in named)]


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
        # A template that is called "default" is read.
        keys += [f"chat_template {n.get('name')}" for n in named if n.get("name") != "default"]
        lines += file_line(folder / name, keys)
    return lines


def token_texts(folder: Path) -> dict[str, str]:
    """Return the texts of named special tokens, such as pad_token. Chat templates may use these names."""
    texts: dict[str, str] = {}
    for file in reversed(BESIDE[:2]):
        values = read_beside(folder / file)
        extra = values.get("extra_special_tokens")
        named = {**values, **(extra if isinstance(extra, dict) else {})}
        for name, token in named.items():
            text = token.get("content") if isinstance(token, dict) else token
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
        token, number = values.get(f"{which}_token"), values.get(f"{which}_token_id")
        token = token.get("content") if isinstance(token, dict) else token
        number = _ids(number)[:1]
        if not isinstance(token, str | None):
            raise DataError(
                f"{folder / name}: {which}_token is a {type(token).__name__}, not a text"
            )
        if token in vocab:
            return vocab[token]
        if number:
            return number[0]
        if token is None and f"{which}_token" in values:
            return None
    return None


def generation_ends(folder: Path) -> set[int]:
    """Return all ids that end a generated text, from generation_config.json or, if it is missing, from config.json."""
    files = [folder / name for name in BESIDE[2:]]
    values = read_beside(files[0] if files[0].is_file() else files[1])
    return {*_ids(values.get("eos_token_id"))}


def _ids(value: Any) -> list[int]:
    """Return the valid ids in a number or a list."""
    numbers = value if isinstance(value, list) else [value]
    return [n for n in numbers if type(n) is int and 0 <= n < _MAX_ID]
