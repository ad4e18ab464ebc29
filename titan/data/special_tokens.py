"""Tokenizers as the data sees them: text to ids and back, and the marks where a document begins and ends.

The kinds of tokenizers are in tokenizer.py. Text never encodes to the ids of marks. So the tokens themselves show where documents
begin, from any source.

In a conversation, a chat template writes special tokens anywhere, and only answers are predicted. So each id of a conversation
has a kind in the bits above the largest id: kind << KIND_SHIFT | id. Ids of plain text have no kind.

B samples, T tokens
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from titan.data import DataError

if TYPE_CHECKING:  # `titan check` reads tokenizers and needs no arrays
    import numpy as np

KIND_SHIFT = 24
# Kinds of a conversation's tokens: in an answer, outside of answers, and first token. Only PREDICTED tokens are labels.
PREDICTED, CONTEXT, START = 1, 2, 3

LOSSY = (
    "this tokenizer drops or changes parts of a text, such as spaces: bits per byte are left out, since bytes cannot be "
    "counted from its tokens"
)
# A text of parts that some tokenizers drop or change: runs of spaces, lines, capitals, accents, rare characters.
_SAMPLE = "The cat,  2 cats;\n\tif x == 1:\n    naïve ﬁne Straße 日本語 \U0001f600 don't. "


# A text of what patterns of tokenizers cut in their own ways: digits, capitals, white space, marks, scripts.
_HARD = (
    "1 22 333 4444 1234567890 3.14 1,000 ½ ² Ⅷ ٣٤ DON'T we'Ve I'M they'll camelCase HTTPServer snake_case a--b ...!? \r\n\n  \t x   "
    "\n\n\n  e\u0301 é \uff21\uff22 ﬁ ß İ ǆ हिन्दी ไทย עברית العربية 한국어 かな漢字。 \U0001f469\u200d\U0001f467 🇳🇴 \u200b\u00a0\ufeff <|x|> </s> [INST] <0x41> ▁x Ġy "
)
_MOST_ASKED, _LAST_ASKED = 8192, 1024  # tokens of the vocabulary


class Tokenizer(ABC):
    """Tokenizer of text.

    Attributes:
        kind: "bytes", "tiktoken" or "huggingface".
        vocab_size: number of ids, which is one more than the largest id.
        bos_id: id that begins a text, or None if the tokenizer has no such token.
        eos_id: id that ends a text, or None if the tokenizer has no such token.
        special_ids: ids of the special tokens by their text.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: dict[str, int]
    token_texts: dict[str, str]
    """Texts of the special tokens by the names that chat templates use, such as eos_token."""
    begin_ids: list[int] | None
    """Ids that the tokenizer puts before a text by default, or None if its files do not say."""
    end_ids: set[int]
    """Ids that end a generated text: `eos_id` and the ids in generation_config.json."""
    file: Path | None = None
    """File that the tokenizer was read from, or None for the embedded tokenizer."""
    chat_template: str = ""
    """Jinja text that turns conversations into text (chat.py). Empty if there is none."""
    unread: Sequence[str] = ()
    """A line for each file with keys that nothing read."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of the text alone: no begin or end token is added, and no special token is recognized in the text."""

    def encode_rest(self, text: str) -> list[int]:
        """Return the ids of a text that continues an earlier piece of its document (`titan.data.reading.pieces`)."""
        return self.encode(text)

    @abstractmethod
    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text that a chat template rendered. Special tokens in the text are recognized.

        Returns:
            The ids, and the (begin, end) of each token in the text, in characters.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of text that a token stands for, or b"" for a special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens. Broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text that new ids add to a prompt's text.

        Decoders drop a space at the beginning of a text. To keep such a space, the new ids are decoded together with the
        prompt.
        """
        before, whole = self.decode(prompt), self.decode([*prompt, *new])
        # `before` is no prefix of `whole` if the prompt ended within a character.
        return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071

    def id_of(self, name: str) -> int | None:
        """Return the id of a token by its text in the vocabulary, or None if there is no such token."""
        return self.special_ids.get(name)

    def name_tokens(self, *, bos: str = "", eos: str = "") -> None:
        """Choose the tokens of the vocabulary that begin and end texts. "" keeps the present token.

        Raises:
            DataError: the vocabulary has no such token.
        """
        for which, name in (("bos", bos), ("eos", eos)):
            if not name:
                continue
            token = self.id_of(name)
            if token is None:
                raise DataError(
                    f'tokenizer.{which}_token = "{name}" is no token of {self.file or "the embedded tokenizer"}'
                )
            self.special_ids[name] = token
            self.token_texts[f"{which}_token"] = name
            setattr(self, f"{which}_id", token)
        if bos:
            self.begin_ids = [self.special_ids[bos]]
        if eos:
            self.end_ids = self.end_ids | {self.special_ids[eos]}

    @cached_property
    def identity(self) -> str:
        """Return a hash of the text of each id.

        It is equal for one tokenizer in another file format, in another place, or with more special tokens.
        """
        texts = [self.token_bytes(token) for token in range(self.vocab_size)]
        while texts and not texts[-1]:
            texts.pop()
        return fingerprint(*texts, self.encode(_SAMPLE))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the ids that texts become. It is part of every cache key.

        It is equal for one tokenizer in another file format, or in a file that was saved again. So it asks for the ids of a text
        with all that tokenizers cut or change in their own ways, and of tokens from the whole vocabulary, one after another.
        """
        pieces = [self.token_bytes(token) for token in range(self.vocab_size)]
        known = [piece.decode("utf-8", "ignore") for piece in pieces]
        chosen = known[:: max(1, len(known) // _MOST_ASKED)] + known[-_LAST_ASKED:]
        return fingerprint(self.identity, *self.encode(_HARD), *self.encode(" ".join(chosen)))

    @cached_property
    def keeps_bytes(self) -> bool:
        """Return whether the tokens of a text have as many bytes as the text, not counting a space put before it."""
        num_bytes = sum(len(self.token_bytes(token)) for token in self.encode(_SAMPLE))
        # Tokenizers that add a leading space add one byte.
        return num_bytes - len(_SAMPLE.encode()) in (0, 1)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of text of each token, int64[vocab_size]. They convert a loss per token to a loss per byte."""
        import numpy as np

        return np.array(
            [len(self.token_bytes(t)) for t in range(self.vocab_size)], dtype=np.int64
        )


def text_fingerprint(tokenizer: Tokenizer, *, has_chats: bool) -> str:
    """Return the hash of the ids that documents become, and in conversations of the special tokens, too."""
    ids = tokenizer.fingerprint
    return fingerprint(ids, sorted(tokenizer.special_ids.items())) if has_chats else ids


def fingerprint(*parts: object) -> str:
    """Return a hash of the parts, as 16 hexadecimal digits."""
    return hashlib.blake2b(
        json.dumps([str(p) for p in parts]).encode(), digest_size=8
    ).hexdigest()


def without_kind(tokens: np.ndarray) -> np.ndarray:
    """Return the ids alone. Padding, which is negative, stays."""
    return tokens & (tokens >> 63 | (1 << KIND_SHIFT) - 1)


def begin_ids(tokenizer: Tokenizer, *, add_bos: bool) -> list[int]:
    """Return the ids that begin a text to be continued or scored, as in training.

    Args:
        tokenizer: the tokenizer of the model.
        add_bos: whether training added the begin token (`data.add_bos`).
    """
    if not add_bos or tokenizer.begin_ids is not None:
        return list(tokenizer.begin_ids or ()) if add_bos else []
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token that predicts the first token of a text without context, or [] if the tokenizer has no such token."""
    marks = (tokenizer.bos_id, tokenizer.eos_id)
    return [token for token in marks if token is not None][:1]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that begin and end a document. None means that no id is written there."""

    bos_id: int | None
    eos_id: int | None

    @staticmethod
    def of(
        tokenizer: Tokenizer, *, add_bos: bool = True, add_eos: bool = True
    ) -> SpecialTokens:
        """Return the wanted ids that the tokenizer has."""
        # Models of a tokenizer that puts nothing before a text were trained on documents without a begin token.
        bos_id = tokenizer.bos_id if add_bos and tokenizer.begin_ids != [] else None
        eos_id = tokenizer.eos_id if add_eos else None
        if tokenizer.bos_id == tokenizer.eos_id:
            # GPT-2's vocabulary has one token for both. Write it once, at the beginning.
            return SpecialTokens(eos_id if bos_id is None else bos_id, None)
        return SpecialTokens(bos_id, eos_id)

    @property
    def marks_boundaries(self) -> bool:
        """Return whether the tokens show where documents begin."""
        return self.bos_id is not None or self.eos_id is not None

    def wrap(self, ids: list[int], *, first: bool = True, last: bool = True) -> list[int]:
        """Add the begin and end ids to the ids of a document, or of its first, middle or last piece."""
        head = [self.bos_id] if first and self.bos_id is not None else []
        tail = [self.eos_id] if last and self.eos_id is not None else []
        return head + ids + tail

    def starts(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return where documents begin, bool[B, T]: at each begin token, or after each end token."""
        # -1 matches no token.
        starts_BT = tokens_BT == (-1 if self.bos_id is None else self.bos_id)
        if self.eos_id is not None:
            starts_BT[:, 1:] |= tokens_BT[:, :-1] == self.eos_id
        return starts_BT
