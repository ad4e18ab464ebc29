"""titan without one of its rings: a wheel of a tree that has neither the folder nor its entry points, and the core with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import finished

ROOT = Path(__file__).parents[1]
# A command of each ring.
RINGS = {
    "sim": "sim",
    "numerics": "diff",
    "ops": "doctor",
    "huggingface": "convert",
    "tools": "plot",
    "contrib": "watch",
}
# Of each subject some, so that the full lane needs a minute for all of them.
CORE = (
    "tests/config/test_config_load.py",
    "tests/config/test_config_layout.py",
    "tests/config/test_config_phases.py",
    "tests/config/test_plug_in_families.py",
    "tests/test_cli.py",
    "tests/test_plug_ins.py",
    "tests/test_loss.py",
    "tests/sim/test_sim_cli.py::test_page_json_trace_and_html",
    "tests/sim/test_replay.py",
    "tests/test_trainer.py",
    "tests/test_end_to_end.py",
    # They are of jobs and keys that an optional part brings.
    "-k",
    "not (demo or flux or fineweb or replica or page_gives_a_long)",
)
JOB = "train_configs/debug_model.toml"


def without(ring: str, pyproject: str) -> str:
    """Return the text of pyproject.toml without what names a module of a ring."""
    rows = rf'^"?[\w.]+"? = "titan\.{ring}\b.*\n|^"titan\.{ring}\b[\w.]*" = .*\n'
    return re.sub(rf'"titan\.{ring}\b[\w.]*",', "", re.sub(rows, "", pyproject, flags=re.M))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Python that has all packages but titan, and a checkout without titan's code."""
    folder = tmp_path_factory.mktemp("rings")
    for name in tracked():
        if not name.startswith(("titan/", "models/")):
            copy(name, folder / "checkout")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # The .pth files in this folder, such as the one of an editable titan, are not read.
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(folders))
    return folder


def tracked() -> list[str]:
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    return finished(listed, cwd=ROOT).stdout.split()


def copy(name: str, folder: Path) -> None:
    if (ROOT / name).is_file():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def install(ring: str, shared: Path) -> None:
    """Make a wheel without a ring, and put it where the shared Python looks first. pip would do so in three times the time."""
    source = shared / f"{ring}_source"
    shutil.rmtree(shared / ring, ignore_errors=True)
    shutil.rmtree(source, ignore_errors=True)
    parts = ("titan/", "models/", "train_configs/", "docs/schema.json", "README.md")
    for name in tracked():
        if name.startswith(parts) and not name.startswith(f"titan/{ring}/"):
            copy(name, source)
    text = without(ring, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f'"titan.{ring}' not in text
    (source / "pyproject.toml").write_text(text, encoding="utf-8")
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    [wheel] = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(shared / ring)
    [packages] = (shared / "venv" / "lib").glob("python*/site-packages")
    (packages / "a_ring.pth").write_text(f"{shared / ring}\n")  # read before shared.pth


def run(shared: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [shared / "venv" / "bin" / "python", *arguments]
    return finished(command, cwd=shared / "checkout", code=None)


@pytest.mark.parametrize("ring", RINGS)
def test_commands_of_the_core(ring: str, shared: Path) -> None:
    install(ring, shared)

    def titan(*arguments: str) -> tuple[int, str, str]:
        done = run(shared, "-m", "titan.cli", *arguments)
        return done.returncode, done.stdout, done.stderr

    probe = (
        f"import importlib.util as u, titan; print(titan.__file__, u.find_spec('titan.{ring}'))"
    )
    where, found = run(shared, "-c", probe).stdout.split()
    assert Path(where).is_relative_to(shared / ring) and found == "None"
    shown, command = titan("--help")[1], RINGS[ring]
    assert "\n  train " in shown and f"\n  {command} " not in shown
    code, _, error = titan(command, JOB)
    assert (
        code == 2 and error.count("\n") == 1 and f"titan/{ring}" * (ring != "contrib") in error
    )
    code, text, error = titan("check", JOB, "--world-size", "2")
    config = titan("config", JOB)
    if ring == "tools":
        assert code == config[0] == 2 and f"titan/{ring}" in config[2], error
    else:
        assert code == 0 and "layout   2 ranks" in text, error
        assert ("memory " in text) == (ring != "sim")
        assert config[0] == 0 and "[training]" in config[1], config[2]
        wrong = titan("check", JOB, "--training.seq_len=-1")
        assert wrong[0] == 2 and "training.seq_len: must be at least 1" in wrong[2]
    settings = ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"]
    code, text, error = titan("train", JOB, f"--job.dump_folder={ring}", *settings)
    assert code == 0 and "step " in text, error
    if ring == "contrib":  # keys and options of its parts are unknown
        assert (
            "replica_groups: unknown key"
            in titan("config", JOB, "--fault_tolerance.replica_groups=2")[2]
        )
        assert "--elastic: unknown option" in titan("train", JOB, "--elastic")[2]


def test_tests_of_the_core(shared: Path) -> None:
    install("contrib", shared)
    done = run(shared, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--lane=default", *CORE)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
