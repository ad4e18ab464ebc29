"""The package as installed: titan.models comes from models/, editable and from a wheel, whatever lies in the user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished

ROOT = Path(__file__).parents[1]
PROBE = "import titan, titan.models.llama3 as m; print(titan.__file__); print(m.__file__); print(m.FLAVORS['8B'].num_params)"


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A folder that holds a models/ of the user's own."""
    folder = tmp_path / "project"
    (folder / "models" / "llama3").mkdir(parents=True)
    for init in (
        folder / "models" / "__init__.py",
        folder / "models" / "llama3" / "__init__.py",
    ):
        init.write_text("raise RuntimeError('the wrong models')\n")
    return folder


def probe(folder: Path, **variables: str) -> list[str]:
    command = [sys.executable, "-c", PROBE]
    environment = {**os.environ, **variables}
    result = finished(command, cwd=folder, env=environment)
    return result.stdout.splitlines()


def test_editable_install(users_folder: Path) -> None:
    titan, models, parameters = probe(users_folder)
    assert Path(titan) == ROOT / "titan" / "__init__.py"
    assert Path(models) == ROOT / "models" / "llama3" / "__init__.py"
    assert parameters == "8030261248"


def test_wheel(users_folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a copy: building leaves files behind
    files = finished(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, code=None
    ).stdout.split()
    for name in files:
        parts = ("titan/", "models/", "train_configs/", "docs/", "pyproject.toml", "README.md")
        if name.startswith(parts):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "install", "--no-deps", "--target", site, source], check=True)
    titan, models, parameters = probe(users_folder, PYTHONPATH=str(site))
    assert Path(titan) == site / "titan" / "__init__.py"
    assert Path(models) == site / "titan" / "models" / "llama3" / "__init__.py"
    assert parameters == "8030261248"
    installed = {p.relative_to(site / "titan") for p in (site / "titan").rglob("*.py")}
    ours = {p.relative_to(ROOT / "titan") for p in (ROOT / "titan").rglob("*.py")}
    ours = {file for file in ours if "tests" not in file.parts}  # of titan/contrib
    zoo = {
        Path("models") / p.relative_to(ROOT / "models") for p in (ROOT / "models").rglob("*.py")
    }
    assert installed == ours | zoo  # pyproject.toml lists every package
    assert [file.name for file in (site / "titan" / "docs").iterdir()] == ["schema.json"]
    # The shipped jobs come along: a first run needs no checkout.
    for arguments in (["init"], ["check", "job.toml", "--world-size", "2"]):
        command = [sys.executable, "-m", "titan.cli", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        subprocess.run(command, cwd=users_folder, env=environment, check=True)
    jobs = {file.name for file in (site / "titan" / "train_configs").glob("*.toml")}
    assert jobs == {file.name for file in (ROOT / "train_configs").glob("*.toml")}
