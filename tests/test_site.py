"""The documentation as a site: it builds without a warning, and every page is in its menu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

pytest.importorskip("mkdocs", reason="pip install 'titan-pretrain[docs]'")


def build(folder: Path, **variables: str) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(
        [*command, "--config-file", "scripts/site/mkdocs.yml"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TITAN_REPO_URL"}
        | {"NO_MKDOCS_2_WARNING": "1"}
        | variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_every_page_is_rendered_and_the_menu_is_short(tmp_path: Path) -> None:
    build(tmp_path)
    pages = {
        file.relative_to(ROOT / "docs").with_suffix(".html") for file in ROOT.glob("docs/**/*.md")
    }
    index = (tmp_path / "index.html").read_text()
    menu, _, home = index.partition('<nav class="md-nav md-nav--primary')[2].partition("<article")
    for page in pages - {Path("index.html")}:
        assert (tmp_path / page).exists() and f'href="{page}' in menu + home, page
    assert sum(f'href="{page}"' in menu for page in pages) <= 14
    assert 'id="install"' in index and "Edit this page" not in index
    # The log's rows would hide the pages in every search.
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in found}
    assert "config.html" in places and "log.html" not in places
    # Material breaks code anywhere; keys in tables stay whole.
    assert "stylesheets/site.css" in index
    style = (tmp_path / "stylesheets" / "site.css").read_text()
    assert "table:not([class]) code { word-break: normal;" in style


def test_a_site_with_an_address_links_to_the_repository(tmp_path: Path) -> None:
    build(tmp_path, TITAN_REPO_URL="https://example.org/me/titan")
    page = (tmp_path / "tutorials" / "plan.html").read_text()
    assert 'href="https://example.org/me/titan"' in page
    assert 'href="https://example.org/me/titan/edit/main/docs/tutorials/plan.md"' in page
