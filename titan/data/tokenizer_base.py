"""Define what a tokenizer is: text to ids and back, and which tokens begin and end a text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from titan.data import DataError

if TYPE_CHECKING:
    import numpy as np

LOSSY = (
    "this tokenizer drops or changes parts of a text, such as spaces: bits per byte are left out, since bytes cannot be "
    "counted from its tokens"
)
# Contains what some tokenizers drop or change: runs of spaces, lines, capitals, accents, rare characters.
_SAMPLE = "The cat,  2 cats;\n\tif x == 1:\n    naïve ﬁne Straße 日本語 \U0001f600 don't. "


class Tokenizer(ABC):
    """Encode text and decode ids. `bos_id` and `eos_id` are None if the tokenizer has no such token."""

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: dict[str, int]
    token_texts: dict[str, str]
    """The special tokens by the names that chat templates know, such as eos_token."""
    begin_ids: list[int] | None
    """What it puts in front of a text by itself. None: it says nothing about that."""
    end_ids: set[int]
    """What ends a generated text: `eos_id` and the ids of generation_config.json."""
    file: Path | None = None
    """What it was read from. None: it is embedded."""
    chat_template: str = ""
    """Jinja text that makes conversations text (chat.py). Empty: it has none."""
    fingerprint: str
    """Changes whenever the same text could become other ids. It is part of every cache key."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of the text alone: no begin or end token is added, and none is recognised in the text."""

    def encode_rest(self, text: str) -> list[int]:
        """Return the ids of text that goes on where another piece of its document ended (`titan.data.reading.pieces`)."""
        return self.encode(text)

    @abstractmethod
    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of what a chat template wrote, and the characters that each stands for: here special tokens are recognised."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of text that a token stands for, b"" for a special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens. Broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text that ids add to a prompt's. Decoders drop a space in front of a text, which ids alone would lose."""
        before, whole = self.decode(prompt), self.decode([*prompt, *new])
        # They differ where the prompt ended within a character.
        return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071

    def id_of(self, name: str) -> int | None:
        """Return the id of a token by its text in the vocabulary."""
        return self.special_ids.get(name)

    def name_tokens(self, *, bos: str = "", eos: str = "") -> None:
        """Let tokens of the vocabulary begin and end texts; "" changes nothing. Raises DataError for an unknown one."""
        for which, name in (("bos", bos), ("eos", eos)):
            if name and (token := self.id_of(name)) is None:
                raise DataError(
                    f'tokenizer.{which}_token = "{name}" is no token of {self.file or "the embedded tokenizer"}'
                )
            if name:
                self.special_ids[name] = token
                self.token_texts[f"{which}_token"] = name
                setattr(self, f"{which}_id", token)
        if bos:
            self.begin_ids = [self.special_ids[bos]]
        if eos:
            self.end_ids = self.end_ids | {self.special_ids[eos]}

    @cached_property
    def identity(self) -> str:
        """Name which text each id stands for: equal for one tokenizer in another form or place, or with more special tokens."""
        texts = [self.token_bytes(token) for token in range(self.vocab_size)]
        while texts and not texts[-1]:
            texts.pop()
        return fingerprint(*texts, self.encode(_SAMPLE))

    @cached_property
    def keeps_bytes(self) -> bool:
        """Return whether the tokens of a text have as many bytes as the text, not counting a space put in front."""
        num_bytes = sum(len(self.token_bytes(token)) for token in self.encode(_SAMPLE))
        # Tokenizers with a leading space add one byte.
        return num_bytes - len(_SAMPLE.encode()) in (0, 1)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of text of each token, int64[vocab_size], which turn a loss per token into one per byte."""
        import numpy as np

        return np.array([len(self.token_bytes(t)) for t in range(self.vocab_size)], dtype=np.int64)


def fingerprint(*parts: object) -> str:
    return hashlib.blake2b(json.dumps([str(p) for p in parts]).encode(), digest_size=8).hexdigest()
