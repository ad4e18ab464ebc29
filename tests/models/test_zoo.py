"""The rows of docs/zoo.md: each class is equal to transformers alone where the page says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.hf_families import LAYOUTS, PROOFS, families, is_equal, row_of
from tests.support.ranks import Pool

PAGE = (Path(__file__).parents[2] / "docs/zoo.md").read_text(encoding="utf-8")
COLUMNS = [*LAYOUTS, *PROOFS]


def rows() -> dict[str, dict[str, str]]:
    """Return the cells of each class of the page's first table, by column."""
    found = {}
    for line in PAGE.partition("\n## ")[0].splitlines():
        name, *cells = line.strip("| ").split(" | ")
        if name == "class":
            assert cells == [*COLUMNS, "why not"]
        elif name.startswith("`") and cells:
            found[name.strip("`")] = dict(zip(COLUMNS, cells, strict=False))
    return found


def equal_columns(row: dict[str, str]) -> set[str]:
    """Return the columns in which a class is equal."""
    return {name for name in COLUMNS if is_equal(row.get(name, "-"))}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", rows())
def test_a_class_is_equal_where_the_page_says_so(architecture: str, pool: Pool) -> None:
    [kind] = [k for k, name in families().items() if name == architecture]
    row = row_of(pool, kind, LAYOUTS | PROOFS)
    assert equal_columns(row) == equal_columns(rows()[architecture]), row


def test_the_page_counts_what_it_lists() -> None:
    cells = rows().values()
    whole = sum("no" not in row.values() for row in cells)
    [told] = re.findall(r"^\*\*(\d+) classes .*, and (\d+) in some\.\*\*", PAGE, re.MULTILINE)
    assert told == (str(whole), str(len(cells) - whole))
