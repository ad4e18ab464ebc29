"""What the pages say is there: links, files, the options of commands, the keys of jobs. tests/test_page_commands.py runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from tests.support.pages import (
    PRESENT,
    blocks,
    inline_commands,
    links,
    page_commands,
    pages,
    prose,
    refusal,
    slugs,
)
from titan.config.load import load_config
from titan.config.toml import read_toml
from titan.sim.price.profiles import load_profile


@pytest.mark.parametrize("page", pages())
def test_links_resolve(page: str) -> None:
    """Relative links to files and to headings, under GitHub's names of headings and under the site's."""
    broken = []
    for link in links(page):
        path, _, heading = link.partition("#")
        file = (ROOT / Path(page).parent / path if path else ROOT / page).resolve()
        names = slugs(str(file.relative_to(ROOT))) if heading and file.exists() else set()
        if not file.exists() or (heading and heading not in names):
            broken.append(link)
    assert not broken


def test_pages_name_files_that_exist() -> None:
    pattern = re.compile(
        r"(?:tests|titan|scripts|examples|models|docs|train_configs)/[\w./-]+\.(?:py|md|sh|toml|yaml|html)"
    )
    missing = {
        (page, name)
        for page in PRESENT
        # The files in a recipe's blocks are those that it adds: tests/test_agents.py.
        for name in pattern.findall(prose(page) if page == "AGENTS.md" else pages()[page])
        if not (ROOT / name).exists()
    }
    assert not missing


def test_the_source_names_pages_and_sections_that_exist() -> None:
    """In messages, docstrings and comments: `docs/NAME.md`, and its heading behind a comma."""
    missing = set()
    for folder in ("titan", "models", "scripts", "examples", "train_configs"):
        for file in (ROOT / folder).rglob("*.*"):
            # The published runs name pages of others.
            if file.suffix not in (".py", ".toml", ".sh") or file.parent.name == "published":
                continue
            # A message may go on in the next line.
            text = re.sub(r'"\n\s*f?"', "", file.read_text(encoding="utf-8"))
            for page, title in re.findall(r'(docs/[\w/-]+\.md)(?:, "?([A-Z][\w ]+))?', text):
                slug = title.lower().replace(" ", "-")
                if not (ROOT / page).exists() or (slug and slug not in slugs(page)):
                    missing.add((str(file.relative_to(ROOT)), page, title))
    assert not missing


def test_commands_are_labelled() -> None:
    """A block whose lines begin with a program is one of commands, so that it runs in a test."""
    unlabelled = {
        (block.page, block.line)
        for page in PRESENT
        for block in blocks(page)
        if block.language not in ("bash", "console", "python", "toml")
        and re.search(
            r"^(\$ )?(titan|python|torchrun|pip|scripts/\S+\.sh) ", block.text, re.MULTILINE
        )
    }
    assert not unlabelled


@pytest.mark.parametrize("page", PRESENT)
def test_commands_have_known_options(page: str) -> None:
    """Of blocks and of the text; the real parsers read them."""
    written = page_commands(page)
    refused = [refusal(command, whole=True) for command in written]
    refused += [refusal(command, whole=False) for command in inline_commands(page)]
    assert not any(refused), "\n".join(filter(None, refused))


@pytest.mark.parametrize("page", PRESENT)
def test_toml_blocks_are_valid(page: str, tmp_path: Path) -> None:
    """As overlays of the debug job, or as profiles of machines."""
    for block in blocks(page, "toml"):
        file = tmp_path / f"{block.line}.toml"
        file.write_text(block.text)
        table = read_toml(file)[0]
        if "base" in table:  # a machine
            load_profile(str(file))
        elif "project" not in table and table.get("optimizer", {}).get("name") != "SGD":
            # A package and its optimizer are installed by tests/test_cli.py. All else is of a job.
            load_config(ROOT / "train_configs" / "debug_model.toml", overlays=[file])


@pytest.mark.parametrize("page", PRESENT)
def test_python_blocks_compile(page: str) -> None:
    for block in blocks(page, "python"):
        compile(block.text, f"{page}:{block.line}", "exec")
