"""docs/paper.md: what it promises is shown by tests and pages that exist, and what it cites is what was published."""

from __future__ import annotations

import re
import sys

from tests.support.jobs import ROOT
from titan.config.toml import read_toml
from titan.contrib.reproduce.cli import published

sys.path.insert(0, str(ROOT / "scripts"))
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


def test_each_promise_is_shown_by_what_exists() -> None:
    from paper import promises

    assert "\n".join(promises()) in PAGE, "run scripts/paper.py --promises"
    groups = read_toml(ROOT / "scripts" / "paper.toml")[0]["group"]
    for row in (row for group in groups for row in group["promises"]):
        assert row["stands"] == "Y" or (row["stands"] in ("part", "N") and row["but"])
        for shown in row["shown"].split(", "):
            file, _, test = shown.partition("::")
            assert (ROOT / file).is_file(), shown
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), shown


def test_its_tables_have_every_row_of_the_paper() -> None:
    cited = set(re.findall(r"^\| ((?:[RCPN]\d[\w-]*(?:, )?)+) \|", PAGE, re.MULTILINE))
    names = {name for cell in cited for name in cell.split(", ")}
    assert names == {name for name in published() if re.match(r"[RCP]\d|N592", name)}
    assert "| +65.08% | +49.5% |" in PAGE and "| +12.59% | +5.7% |" in PAGE
