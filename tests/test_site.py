"""The documentation as a site: it builds without a warning, and every page is in its menu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

pytest.importorskip("mkdocs", reason="pip install 'titan-pretrain[docs]'")


def test_every_page_is_rendered_and_in_the_menu(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(
        [*build, "--config-file", "scripts/site/mkdocs.yml"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    pages = {
        file.relative_to(ROOT / "docs").with_suffix(".html") for file in ROOT.glob("docs/**/*.md")
    }
    menu = (tmp_path / "index.html").read_text().partition('<nav class="md-nav md-nav--primary')[2]
    for page in pages:
        assert (tmp_path / page).exists() and f'href="{page}"' in menu, page
