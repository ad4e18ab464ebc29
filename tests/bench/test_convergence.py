"""scripts/bench/convergence.py prints its figures before it draws, and draws where matplotlib is installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT

LOSSES = {"titan": [8.0, 7.5, 7.0], "torchtitan": [8.0, 7.0, 7.0]}


@pytest.mark.parametrize("installed", [True, False])
def test_figures_come_before_the_picture(
    installed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    names = runpy.run_path(str(ROOT / "scripts/bench/convergence.py"))["main"].__globals__
    printed: list[str] = []

    def draw(*_: Any) -> None:
        printed.append(capsys.readouterr().out)

    monkeypatch.setitem(names, "contestant", lambda _, name: LOSSES[name])
    monkeypatch.setitem(names, "draw", draw)
    monkeypatch.setitem(names, "find_spec", lambda _: installed or None)
    monkeypatch.setattr(sys, "argv", f"convergence.py --steps 3 --folder {tmp_path}".split())
    names["main"]()
    after = capsys.readouterr()
    table = printed[0] if installed else after.out
    assert "| 3 | 7.00000 | 7.00000 | 0.0e+00 |" in table
    assert "mean of the last 100: 7.50000 and 7.33333" in table
    assert ("no picture: matplotlib is not installed" in after.err) != installed
