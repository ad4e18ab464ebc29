"""The notebook of the first page has the form of nbformat 4.5, and its cells run: tests/config/test_config_docs.py keeps it fresh."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.jobs import ROOT
from tests.support.pages import blocks

FILE = ROOT / "docs/first_run.ipynb"
BOOK = json.loads(FILE.read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in BOOK["cells"] if cell["cell_type"] == "code"]


def test_it_has_the_form_of_a_notebook() -> None:
    assert set(BOOK) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (BOOK["nbformat"], BOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in BOOK["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    for cell in BOOK["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code
        assert cell["cell_type"] in ("code", "markdown") and not any(
            cell.get(key) for key in code
        )
        assert all(line.endswith("\n") for line in cell["source"][:-1]) and cell["source"]


def test_its_cells_are_the_commands_of_the_page_which_run_there() -> None:
    cells = [re.sub(r"%%bash\n(command -v .*\n)?", "", cell) for cell in CODE[1:]]
    assert cells == [block.text.strip("\n") for block in blocks("docs/index.md", "bash")]


@pytest.mark.parametrize("folder", [FILE.parent, Path("/")])
def test_it_runs_in_a_checkout_and_beside_an_installed_titan(
    folder: Path, tmp_path: Path
) -> None:
    """The first cell finds the checkout and titan, and the next installs nothing: pip would fail the test."""
    (tmp_path / "pip").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "pip").chmod(0o755)
    (tmp_path / "titan").write_text("#!/bin/sh\n")
    (tmp_path / "titan").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    setup = f"import sys; sys.executable = {str(tmp_path / 'python')!r}\n{CODE[0]}"
    run = f"import subprocess; sys.exit(subprocess.run(['bash', '-ec', {CODE[1].removeprefix('%%bash')!r}]).returncode)"
    code = f"{setup}\nprint(os.getcwd(), flush=True)\n{run}"
    done = finished([sys.executable, "-S", "-c", code], cwd=folder, env=os.environ)
    assert done.stdout.split() == [str(ROOT if folder != Path("/") else folder)]
