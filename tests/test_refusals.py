"""Command lines that are refused before a run. test_refusals.json has a sentence for each, and the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import table
from titan import cli

ROWS: dict[str, dict[str, Any]] = table(__file__, "refusals")


@pytest.mark.parametrize("sentence", ROWS)
def test_a_refusal(sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a row, {folder} is an empty folder, in which its files are written. "not": what is not printed."""
    row = ROWS[sentence]
    for name, text in row.get("files", {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("{folder}", str(tmp_path)))
    assert cli.main([word.replace("{folder}", str(tmp_path)) for word in row["command"]]) == 2
    out, err = capsys.readouterr()
    if row["command"][-1] == "--json":
        assert json.loads(out)["problems"] and not err
    else:
        assert not out
    for text in row["prints"]:
        assert text.replace("{folder}", str(tmp_path)) in out + err
    assert row.get("not", "\0") not in out + err
