"""scripts/bench/gpu.sh with stand-ins for Python and nvidia-smi: its plan, what is cut, left out or repeated, and what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.commands import finished
from tests.support.jobs import ROOT

ONLY = "machine kernels pair-8B tests"
# A stub for Python: each call returns at once, except one test file, which ignores all signals. A row of steps.py can fail.
STUB = """#!/bin/bash
case "$*" in
  *test_cuda_memory*) trap '' TERM; while [ -d "$HANG" ]; do sleep 0.2; done ;;
  *steps.py*) echo "$@"; [ -z "$FAIL" ] ;;
  *) echo "stub: $1"; printf '%s' "$SAID" ;;
esac
"""
# One GPU.
CARD = "#!/bin/bash\necho a card\n"
FIGURES = {"machine", "kernels", "pair-8B"}
TWO_GPUS = "tests-test_two_gpus"
TESTS = {f"tests-{path.stem}" for path in ROOT.glob("tests/gpu/test_*.py")} - {TWO_GPUS}
HUNG = "tests-test_cuda_memory"


def start(
    tmp_path: Path, folder: str, limit_s: int, *options: str, hang: bool = True, **more: str
) -> subprocess.Popen[str]:
    stub, saved, programs = tmp_path / "python", tmp_path / "saved", tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    for program, text in ((stub, STUB), (programs / "nvidia-smi", CARD)):
        program.write_text(text)
        program.chmod(0o755)
    if hang:
        (tmp_path / "hang").mkdir(exist_ok=True)
    variables = {"PYTHON": stub, "HANG": tmp_path / "hang", "ONLY": ONLY, "GRACE_S": "1"}
    variables |= {"LIMIT_S": limit_s, "SAVE_TO": saved, "RESUME_FROM": saved}
    variables |= {"FAIL": "", "SAID": "", "PATH": f"{programs}:{os.environ['PATH']}"} | more
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen(
        ["bash", ROOT / "scripts/bench/gpu.sh", *options, tmp_path / folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.done")}


def begun(said: str) -> list[str]:
    return [line.split()[0] for line in said.splitlines() if line.endswith(" ...")]


def test_a_part_that_never_ends(tmp_path: Path) -> None:
    """All others are measured; it comes last in the next call, on another machine, and is then given up."""
    said, _ = start(tmp_path, "0", 40).communicate()
    assert done(tmp_path / "0") >= FIGURES and HUNG not in done(tmp_path / "0"), said
    assert f"{HUNG}: cut after" in said
    # One more call, or a few on a slow machine.
    for call in "12345":
        assert "complete" not in said
        said, _ = start(tmp_path, call, 40).communicate()
        assert begun(said)[0] == "machine" and not FIGURES & {*begun(said)[1:]}, said
        if HUNG in begun(said):
            break
    assert begun(said)[-1] == HUNG and done(tmp_path / call) == FIGURES | TESTS, said
    assert "given up, cut twice" in said and "complete: " in said
    assert "given up, cut twice" in (tmp_path / "saved/report.md").read_text()


def test_a_machine_that_is_taken_away(tmp_path: Path) -> None:
    """Finished parts are saved. The part that was running comes last in the next call."""
    first = start(tmp_path, "0", 300)
    while not (tmp_path / "0" / f"{HUNG}.log").exists():
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (tmp_path / "hang").rmdir()
    said, _ = start(tmp_path, "1", 300, hang=False).communicate()
    assert FIGURES.isdisjoint(begun(said)[1:]) and begun(said)[-1] == HUNG, said
    assert done(tmp_path / "1") == FIGURES | TESTS and "complete: " in said


def test_missing_packages_are_named_before_any_part(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    run = finished(
        ["bash", ROOT / "scripts/bench/gpu.sh", tmp_path / "out"],
        env={**os.environ, "PYTHON": str(bare)},
        code=2,
    )
    assert "missing: torchao, which rows with float8 need" in run.stdout
    *_, last = run.stdout.splitlines()
    assert {"torch,", "numpy,", "pydantic,", "tiktoken,"} <= set(last.split()), last
    assert not done(tmp_path / "out") and "..." not in run.stdout


def plan(tmp_path: Path, **more: str) -> tuple[str, dict[str, list[int]]]:
    """Return what --plan says, and of each part: least, most and expected seconds, and their sum so far."""
    call = start(tmp_path, "planned", 540, "--plan", hang=False, **{"ONLY": "", **more})
    said, _ = call.communicate()
    rows = [line.split() for line in said.splitlines() if not line.startswith("stub")]
    return said, {
        row[0]: [*map(int, row[1:])] for row in rows if row[-1].isdigit() and len(row) == 5
    }


def test_the_plan(tmp_path: Path) -> None:
    """The first call: kernels, pairs, TorchTitan, a profile, accumulation. Nothing runs."""
    (tmp_path / "before/titan").mkdir(parents=True)
    (tmp_path / "before/models").mkdir()
    said, parts = plan(tmp_path, BEFORE=str(tmp_path / "before"))
    assert list(parts)[:10] == [
        "machine",
        "kernels",
        "pair-8B",
        "pair-8B-float8",
        "pair-1B",
        "peers-8B",
        "peers-8B-float8",
        "peers-1B",
        "profile-pair-8B-float8",
        "accumulated-8B",
    ]
    assert parts["accumulated-8B"][3] <= 540
    sums = [row[3] for row in parts.values()]
    assert sums == [
        sum(row[2] for row in list(parts.values())[: n + 1]) for n in range(len(sums))
    ]
    assert all(least <= expected <= most for least, most, expected, _ in parts.values()), parts
    tests = [name for name in parts if name.startswith("tests-")]
    assert {*tests} == TESTS and tests[0] == HUNG and tests[-1].endswith("linear_attention")
    assert f"{TWO_GPUS}: left out: GPUs here: 1" in said
    assert not (tmp_path / "planned").exists()


def test_what_cannot_run_is_left_out_with_a_word(tmp_path: Path) -> None:
    lacking = ("torchtitan", "torchao", "transformers", "fla", "flash_attn_interface")
    said, parts = plan(
        tmp_path, SAID="".join(f"missing: {n}, which ... need\n" for n in lacking)
    )
    without = {"peers-8B", "curve", "hybrid", "linear", "attention-1B", "pair-8B-float8"}
    without.add("profile-pair-8B-float8")
    assert without.isdisjoint(parts), parts
    for name in without:
        assert f"{name}: left out: " in said
    assert "before: left out" in said
    # One contestant of two takes the time of one.
    _, both = plan(tmp_path)
    assert parts["accumulated-8B"][2] < both["accumulated-8B"][2]
    assert parts["pair-1B"][2] == both["pair-1B"][2]


def test_a_row_that_failed_is_repeated_by_retry(tmp_path: Path) -> None:
    only = {
        "ONLY": "machine speed-1B hybrid",
        "SAID": "missing: transformers, which hybrid needs\n",
    }
    said, _ = start(tmp_path, "0", 100, hang=False, FAIL="1", **only).communicate()
    assert "speed-1B: exit code 1" in said and "complete: " in said
    assert "hybrid: left out" in (tmp_path / "0/report.md").read_text()
    said, _ = start(tmp_path, "1", 100, hang=False, **only).communicate()
    assert begun(said) == ["machine"]
    said, _ = start(tmp_path, "2", 100, hang=False, RETRY="1", **only).communicate()
    assert begun(said) == ["machine", "speed-1B"] and "speed-1B: exit code 0" in said
    log = (tmp_path / "2/speed-1B.log").read_text()
    assert "--retry" in log and "--against titan,torchtitan,bare " in log
