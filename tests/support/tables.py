"""Rows of parametrized tests that are data: each test file may have a JSON of its name beside it, with a table for each test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def table(file: str, test: str) -> Any:
    """Return the rows of a test, given the file and the test's name without "test_"."""
    return json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))[test]


def tabled(names: str, **how: Any) -> Callable[[Callable[..., None]], Any]:
    """Parametrize a test by the rows of its table.

    Args:
        names: the arguments that a row gives, with commas.
        how: further arguments of pytest's `parametrize`, such as `ids`.
    """

    def decorate(test: Callable[..., None]) -> Any:
        rows = table(test.__globals__["__file__"], test.__name__.removeprefix("test_"))
        return pytest.mark.parametrize(names, rows, **how)(test)

    return decorate
