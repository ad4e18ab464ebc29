"""The README is short, and its figures are those of the pages; all pages are written in plain sentences."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import titan
from tests.support.commands import finished

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "scripts"))


def test_the_figures_are_those_of_the_pages() -> None:
    from readme_figures import updated

    assert updated(README.read_text()) == README.read_text(), "run scripts/readme_figures.py"


def test_its_first_screen_says_what_a_stranger_asks() -> None:
    first = README.read_text().split("## ")[0]
    assert f"version {titan.__version__}" in " ".join(first.split()) and "`git clone " in first
    # What ran on GPUs, and what did not.
    said = " ".join(next(x for x in first.split("\n\n") if x.startswith("**On GPUs**")).split())
    assert (
        "on one H100 with torch 2.11" in said and "nothing has run on two or more GPUs" in said
    )


def test_it_fits_a_screen_and_a_half() -> None:
    text = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 1000


def test_all_pages_are_in_plain_sentences() -> None:
    command = [sys.executable, "scripts/check_prose.py"]
    finished(command, cwd=ROOT)
