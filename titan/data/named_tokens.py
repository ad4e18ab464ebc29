"""Special tokens as the files beside a tokenizer.json state them: their names, and the tokens that end a generated text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan.data import DataError
from titan.untrusted import read_json

# Files beside a tokenizer.json that may name its special tokens. Earlier files win.
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
BESIDE = (TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION_CONFIG, "config.json")
# Ids from a file must be smaller.
_MAX_ID = 2**24


def read_beside(file: Path) -> dict[str, Any]:
    """Return the object in a file beside a tokenizer.json, or {} if there is no file.

    Raises:
        InputError: the file is not a JSON object.
    """
    return read_json(file, dict[str, Any]) if file.is_file() else {}


def added_beside(folder: Path) -> list[tuple[str, int]]:
    """Return special tokens and their ids from tokenizer_config.json, which may name more than tokenizer.json does."""
    added = read_beside(folder / "tokenizer_config.json").get("added_tokens_decoder")
    named = []
    for number, token in added.items() if isinstance(added, dict) else ():
        content = token.get("content") if isinstance(token, dict) and token.get("special") else None
        if isinstance(content, str) and number.isdecimal() and len(number) < 9:
            named += [(content, int(number))] if int(number) < _MAX_ID else []
    return named


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
