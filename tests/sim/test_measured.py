"""`titan sim --measured RUN`: what was simulated beside what a run has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titan.cli import main
from titan.config.errors import ConfigError

JOB = ["sim", "train_configs/debug_model.toml", "--training.seq_len=64", "--hardware=h100-sxm"]
JOB += ["--training.mixed_precision_param=float32"]


def write_run(folder: Path, *, kind: str = "device") -> None:
    """Write what `compare` reads of a run."""
    rows = [
        {
            "step": n,
            "loss": 1.0,
            "step_s": s,
            "memory_gib": gib,
            "memory_active_gib": gib - 1,
            "memory_kind": kind,
        }
        # The first half compiles and warms up.
        for n, (s, gib) in enumerate(
            [(9.0, 9.0), (5.0, 9.0), (0.2, 3.0), (0.1, 4.0), (0.3, 2.0)]
        )
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def simulated(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """Return the facts, and the rows of the comparison by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    out = cache / "facts.json"
    parallel = ["--world-size=4", "--parallelism.pipeline_parallel_degree=2"]
    assert main([*JOB, *parallel, f"--measured={folder}", f"--json={out}"]) == 0
    facts = json.loads(out.read_text())
    return facts, {row["name"]: row for row in facts["measured"]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_time_and_memory(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path)
    facts, rows = simulated(tmp_path, cache, monkeypatch)
    assert {*rows} == {"step", "memory, reserved", "memory, active"}
    assert rows["step"]["measured"] == 0.2 and rows["step"]["predicted"] == facts["step_time_s"]
    # Memory is that of rank 0, whose rows these are.
    first = facts["per_rank"][0]
    reserved, active = rows["memory, reserved"], rows["memory, active"]
    assert (reserved["predicted"], active["predicted"]) == (
        first["peak_reserved_gib"],
        first["peak_active_gib"],
    )
    assert (reserved["measured"], active["measured"]) == (4.0, 3.0)
    change = facts["step_time_s"] / 0.2 - 1
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("  step  ")]
    assert lines[-1].endswith(f"{change:+.1%}")


def test_a_run_on_a_cpu(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of its metrics count the memory of the process, which is not simulated."""
    write_run(tmp_path, kind="rss")
    _, rows = simulated(tmp_path, cache, monkeypatch)
    assert {*rows} == {"step"}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        from titan.sim.cli import main as sim

        sim([*JOB[1:], "--world-size=1", f"--measured={tmp_path}"])
