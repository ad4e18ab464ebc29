"""The recipes of AGENTS.md: each is applied to a copy of the tree, where its test passes; without the change it fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.commands import finished
from tests.test_cli import install
from titan.config.toml import tomllib

ROOT = Path(__file__).parents[1]
COPIED = ("titan", "models", "train_configs", "tests", "conftest.py", "pyproject.toml")
# In a test that is itself the change: the line without which it must fail.
CHANGE = "# the change"


class Block(NamedTuple):
    language: str
    path: str
    text: str


def recipes() -> dict[str, list[Block]]:
    """Blocks by the recipe's heading. The one of `sh` is the command that tests it."""
    _, *parts = re.split(r"^### (.+)\n", (ROOT / "AGENTS.md").read_text(), flags=re.MULTILINE)
    pattern = re.compile(
        r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
    )
    found = {
        name: [Block(*match) for match in pattern.findall(text)]
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {name: blocks for name, blocks in found.items() if blocks}


RECIPES = recipes()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy(ROOT / name, folder / name)
    # Where an installation has it: before the editable one of the tree that this test is in.
    (folder / "titan" / "models").symlink_to(folder / "models")
    return folder


def edited(text: str, diff: str) -> str:
    """Apply hunks that are divided by @@ lines. What each replaces must be there once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{text.count(old)} times in the file:\n{old}"
        text = text.replace(old, new)
    return text


def apply(blocks: list[Block], tree: Path) -> dict[Path, str | None]:
    """Write and edit files; return their former texts, None for files that are new."""
    before: dict[Path, str | None] = {}
    for block in blocks:
        if block.path:
            path = tree / block.path
            before[path] = former = path.read_text() if path.exists() else None
            assert (former is None) == (block.language != "diff"), block.path
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text if former is None else edited(former, block.text))
    return before


def restore(before: dict[Path, str | None]) -> None:
    for path, text in before.items():
        path.unlink() if text is None else path.write_text(text)


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    install(tree, "titan_pretrain", **{k[6:]: v for k, v in project["entry-points"].items()})
    variables = dict(os.environ) | {"PYTHONPATH": str(tree)}
    return finished(command, cwd=tree, env=variables, code=None)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_what_it_says(name: str, tree: Path) -> None:
    before = apply(RECIPES[name], tree)
    try:
        if find_spec("ruff"):
            files = [str(path) for path in before if path.suffix == ".py"]
            for check in (["check"], ["format", "--check"]):
                command = [sys.executable, "-m", "ruff", *check, *files]
                result = finished(command, cwd=tree)
        [command] = [block.text for block in RECIPES[name] if block.language == "sh"]
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/pytest"
        result = run(tree, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
    finally:
        restore(before)


def test_without_the_changes_the_tests_fail(tree: Path) -> None:
    """All in one process, which takes less time."""
    tests = [
        block._replace(text="\n".join(x for x in block.text.split("\n") if CHANGE not in x))
        for blocks in RECIPES.values()
        for block in blocks
        if block.path.startswith("tests/") and block.language != "diff"
    ]
    assert len(tests) == len(RECIPES) == 4
    before = apply(tests, tree)
    try:
        paths = [block.path for block in tests]
        result = run(tree, "-rfE", "--continue-on-collection-errors", *paths)
        for path in paths:
            assert re.search(f"^(FAILED|ERROR) {path}", result.stdout, re.MULTILINE), (
                result.stdout
            )
    finally:
        restore(before)
