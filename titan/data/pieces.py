"""Cut long documents into pieces, so that no document needs to fit in memory and several workers can share one.

A document of at most `PIECE_CHARS` characters is one piece. A longer one is cut between a word and the space before the
next, or after a line, where the patterns of GPT-2's and Llama 3's tokenizers cut anyway: the tokens stay the same. Only
text without spaces and lines is cut elsewhere. Where the cuts lie depends on the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

PIECE_CHARS = 2**17
_WINDOW = 2**14  # at the end of a piece, in which a good place for the cut is looked for
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class LongText:
    """A document that is read in pieces, from its beginning each time `read` is called."""

    read: Callable[[], Iterator[str]]


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the text of the blocks in pieces of at most PIECE_CHARS characters."""
    rest = ""
    for block in blocks:
        rest += block
        begin = 0
        while len(rest) - begin > PIECE_CHARS:
            end = begin + PIECE_CHARS
            for cut in _CUT.finditer(rest, end - _WINDOW, end + 1):
                end = cut.end()  # the last one counts
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def pieces_of(document: str | LongText) -> Iterator[str]:
    """Yield the pieces of a document."""
    return document.read() if isinstance(document, LongText) else pieces([document])
