"""Rows of parametrized tests that are data: each test file may have a JSON of its name beside it, with a table for each test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(file: str, test: str) -> list[Any]:
    """Return the rows of a test, given the file and the test's name without "test_"."""
    return json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))[test]
