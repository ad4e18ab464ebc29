"""Documents of a step by their loss, worst first, for `titan audit --rows`.

A document is judged by how far its mean loss is above the median document's, times the square root of its tokens, since the mean of
few tokens differs by chance. The unit is the median of these distances, as in titan/base/spikes.py. So documents that are all
learned badly, as after a step of too high a learning rate, do not stand out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import median
from typing import Any

from titan.base.untrusted import printable
from titan.config import schema as s
from titan.data.base import SOURCE_SHIFT
from titan.data.reading import pieces_of
from titan.data.rows import RowText
from titan.data.sources import in_validation, open_documents, source_names, training_sources

SHOWN = 10
_CHARS = 60
_STANDS_OUT = 8.0  # units; the worst of a thousand ordinary documents is at 4 or 5
_LEAST = 0.01  # share of the median loss: if documents hardly differ, none stands out


@dataclass
class RankedDocument:
    """A document of a step.

    Attributes:
        row: name of its source, and its number there, counted from 0.
        loss: mean over its tokens in the step, in nats.
        tokens: number of these tokens.
        score: how far it stands out. See the docstring of the module. Infinite if the loss is not finite.
        gradient: norm of its part of the step's gradient; of the worst ones, if the job keeps gradients.
        share: share of the step's gradient that is along this part.
        where: its file, and its line or row there; "" for shards, which do not keep them.
        text: its first characters.
    """

    row: str
    loss: float
    tokens: int
    score: float
    gradient: float | None = None
    share: float | None = None
    where: str = ""
    text: str = ""

    def __str__(self) -> str:
        numbers = f"{self.loss:10.4f}  {self.tokens:6,.0f}  {self.score:7.1f}"
        own = f"{'':15}" if self.share is None else f"{self.gradient:8.3g}  {self.share:5.0%}"
        return printable(f"{numbers}  {own}  {self.row}  {self.where}  {self.text}")


def scores(table: Sequence[Sequence[float]]) -> list[float]:
    """Return how far each document stands out.

    Args:
        table: number, summed loss and tokens of each document, and more.
    """
    means = [loss / tokens for _, loss, tokens, *_ in table]
    roots = [sqrt(row[2]) for row in table]
    middle = median([*filter(isfinite, means)] or [0.0])
    found = [(mean - middle) * root for mean, root in zip(means, roots, strict=True)]
    sizes = [abs(score) for score in found if isfinite(score)] or [0.0]
    unit = max(1.4826 * median(sizes), _LEAST * middle * median(roots or [0.0])) or 1.0
    return [score / unit if isfinite(score) else inf for score in found]


def worst_first(table: Sequence[list[float]]) -> list[tuple[float, list[float]]]:
    """Return the rows with their scores, worst first."""
    return sorted(zip(scores(table), table, strict=True), key=lambda pair: -pair[0])


def rank(config: s.JobConfig, table: Sequence[list[float]]) -> list[RankedDocument]:
    """Return the documents of a step, worst first.

    Args:
        config: the job. Its text is read up to the last of the documents that `lines` shows.
        table: number (`Samples.documents`), summed loss and tokens of each document; of some, norm and share of the own gradient.
    """
    names, ordered = source_names(training_sources(config)), worst_first(table)
    places = _places(config, [int(number) for _, (number, *_) in ordered[:SHOWN]])
    found = []
    for score, (number, loss, tokens, *own) in ordered:
        source, row = divmod(int(number), 2**SOURCE_SHIFT)
        own, mean = own or (None, None), loss / tokens
        more: Any = (*own, *places.get(int(number), ("", "")))
        found.append(RankedDocument(f"{names[source]}:{row}", mean, int(tokens), score, *more))
    return found


def _places(config: s.JobConfig, numbers: Collection[int]) -> dict[int, tuple[str, str]]:
    """Return place and first characters of documents."""
    found, fraction = {}, config.data.validation_fraction
    for source, section in enumerate(training_sources(config)):
        first = source << SOURCE_SHIFT
        last = max((n for n in numbers if n >> SOURCE_SHIFT == source), default=-1)
        if isinstance(section, s.TokenFiles) or last < 0:
            continue
        documents = open_documents(section)
        kept = (x for x in documents.read() if not in_validation(x, fraction=fraction))
        for number, document in zip(range(first, last + 1), kept, strict=False):
            if number in numbers:
                where = document.where if isinstance(document, RowText) else ""
                files = documents.identity[-1]
                if not where and isinstance(files, list):
                    where = files[documents.file()][0]
                found[number] = where, next(pieces_of(document))[:_CHARS]
    return found


def lines(rows: Sequence[RankedDocument]) -> list[str]:
    """Return the lines about the documents of a step."""
    standing = sum(row.score > _STANDS_OUT for row in rows)
    return [
        f"{standing} of {len(rows)} rows stand out" if standing else "no row stands out",
        "loss/token  tokens    score  gradient  share  row",
        *map(str, rows[:SHOWN]),
    ]
