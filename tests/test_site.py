"""The documentation as a site: it builds without a warning, and every page is in its menu."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.jobs import ROOT

pytest.importorskip("mkdocs", reason="pip install 'titan-pretrain[docs]'")


def build(folder: Path, **variables: str) -> None:
    command = [sys.executable, *f"-m mkdocs build --strict --site-dir {folder}".split()]
    finished(
        [*command, "--config-file", "scripts/site/mkdocs.yml"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TITAN_REPO_URL"}
        | {"NO_MKDOCS_2_WARNING": "1"}
        | variables,
    )


def test_the_menu_has_every_page_and_few(tmp_path: Path) -> None:
    build(tmp_path)
    index = (tmp_path / "index.html").read_text()
    menu = index.partition('<nav class="md-nav md-nav--primary')[2].partition("<article")[0]
    # The log stays in the repository.
    files = {file.name for file in ROOT.glob("docs/*.md")} - {"log.md"}
    pages = {Path(name).with_suffix(".html").name for name in files}
    assert [page for page in pages - {"index.html"} if f'href="{page}"' not in menu] == []
    assert len(files) <= 20  # with the generated reference, the zoo and scaling
    # MkDocs looks at anchors, and lets links to files pass that it leaves out.
    links = [re.findall(r'href="([^":#]+)["#]', p.read_text()) for p in tmp_path.glob("*.html")]
    assert {
        n for names in links for n in names if not Path(f"{tmp_path}/{n}").exists()
    } == set()
    assert 'id="install"' in index and "Edit this page" not in index
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert "config.html" in {entry["location"].partition("#")[0] for entry in found}
    # The signatures come from the source.
    api = (tmp_path / "api.html").read_text()
    assert 'id="titan.parallel.apply_fsdp"' in api and 'id="titan.run.hook.Hook"' in api
    # Material breaks code anywhere; keys in tables stay whole.
    assert "stylesheets/site.css" in index
    # A window of 1,200 px has the menu beside the page.
    [theme] = tmp_path.glob("assets/stylesheets/main.*.css")
    assert "min-width:68.75em" in theme.read_text()
    style = (tmp_path / "stylesheets" / "site.css").read_text()
    assert "table:not([class]) code { word-break: normal;" in style


def test_a_site_with_an_address_links_to_the_repository(tmp_path: Path) -> None:
    build(tmp_path, TITAN_REPO_URL="https://example.org/me/titan")
    page = (tmp_path / "data.html").read_text()
    assert 'href="https://example.org/me/titan"' in page
    assert 'href="https://example.org/me/titan/edit/main/docs/data.md"' in page
