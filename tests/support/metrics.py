"""Rows of metrics, and a clock that tests set, for tests of what a run reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan.base.rows import Row
from titan.observe.columns import empty_row


def step_row(step: int, **changes: Any) -> Row:
    """Return a row with plausible values for what `changes` leaves out."""
    row: Row = {"step": step, "loss": 10.0 / step, "grad_norm": 1.2345, "lr": 3e-4}
    row |= {"tokens": 100 * step, "tokens_per_s": 131_072.4, "step_s": 1.0, "eta_s": 11_988.0}
    row |= {"data_wait_s": 0.0003, "memory_gib": 61.2}
    row |= {"validation_s": 0.0, "checkpoint_s": 0.0, "memory_kind": "device"}
    row["mfu_convention"] = "full"
    return empty_row() | row | changes


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Each must be JSON, which has no NaN, and end with a newline."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
