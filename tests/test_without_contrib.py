"""titan without titan/contrib: a wheel from a tree that has neither the folder nor its entry points, and tests of the core with it."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of each subject some, so that the full lane needs a minute for all of them.
CORE = (
    *("tests/config/test_config_load.py", "tests/config/test_config_layout.py"),
    *("tests/config/test_config_phases.py", "tests/config/test_plug_in_families.py"),
    *("tests/test_cli.py", "tests/test_plug_ins.py", "tests/test_loss.py"),
    "tests/sim/test_sim_cli.py::test_page_json_trace_and_html",
    "tests/sim/test_replay.py",
    "tests/test_trainer.py",
    "tests/test_end_to_end.py",
)


def without_contrib(pyproject: str) -> str:
    """Return the text of pyproject.toml without what names an optional part."""
    named = r'^"?[\w.]+"? = "titan\.contrib\b.*\n'
    kept = re.sub(named, "", pyproject, flags=re.MULTILINE)
    kept = re.sub(r'^"titan\.contrib[\w.]*" = .*\n', "", kept, flags=re.MULTILINE)
    return re.sub(r'"titan\.contrib[\w.]*",', "", kept)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python whose titan is the wheel; all else it shares with this one. Beside it is a checkout without the code."""
    folder = tmp_path_factory.mktemp("core")
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split():
        is_code = name.startswith(("titan/", "models/"))
        targets = [folder / "source" / name] if is_code else [folder / "checkout" / name]
        if name.startswith(("train_configs/", "docs/schema.json", "pyproject.toml", "README.md")):
            targets.append(folder / "source" / name)
        for target in targets if not name.startswith("titan/contrib/") else ():
            if (ROOT / name).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
    text = without_contrib((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "titan.contrib." not in text
    (folder / "source" / "pyproject.toml").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # A folder in a .pth file comes last, and its own .pth files, such as the one of an editable titan, are not read.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    options = ["--no-deps", "--no-build-isolation", "--target", packages, folder / "source"]
    subprocess.run([*pip, *options], check=True)
    return folder / "venv" / "bin" / "python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = python.parents[2] / "checkout"
    return subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True)


def test_commands_of_the_core(python: Path) -> None:
    probe = "import importlib.util as u, titan; print(titan.__file__, u.find_spec('titan.contrib'))"
    where, contrib = run(python, "-c", probe).stdout.split()
    assert Path(where).is_relative_to(python.parents[1]) and contrib == "None"
    shown = run(python, "-m", "titan.cli", "--help").stdout
    assert "\n  train " in shown and "\n  watch " not in shown
    job = "train_configs/debug_model.toml"
    done = run(python, "-m", "titan.cli", "check", job, "--world-size", "2")
    assert done.returncode == 0 and "TorchTitan" not in done.stdout, done.stderr
    # Keys and options of the parts are unknown.
    done = run(python, "-m", "titan.cli", "check", job, "--fault_tolerance.replica_groups=2")
    assert done.returncode == 2 and "replica_groups: unknown key" in done.stderr
    assert "--elastic: unknown option" in run(python, "-m", "titan.cli", "train", job, "--elastic").stderr  # fmt: skip
    settings = ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"]
    done = run(python, "-m", "titan.cli", "train", job, "--job.dump_folder=run", *settings)
    assert done.returncode == 0 and "step " in done.stdout, done.stderr


def test_tests_of_the_core(python: Path) -> None:
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--lane=default", *CORE)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
