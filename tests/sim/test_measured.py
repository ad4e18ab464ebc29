"""`titan sim --measured RUN`: what was simulated beside what a run has measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from titan.cli import main
from titan.config.errors import ConfigError
from titan.observe.step_parts import PARTS

JOB = ["sim", "train_configs/debug_model.toml", "--training.seq_len=64", "--hardware=h100-sxm"]
JOB += ["--training.mixed_precision_param=float32"]
# Microseconds of kernels, one after the other, on a device that then idles until 100.
KERNELS = {
    "sm90_xmma_gemm_bf16": 40,
    "flash_fwd_kernel": 10,
    "vectorized_elementwise_kernel": 20,
    "Memcpy HtoD": 5,
    "ncclDevKernel_AllGather_RING_LL": 15,
}


def write_run(folder: Path, *, kind: str = "device", with_trace: bool = True) -> None:
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
    if not with_trace:
        return
    events, at = [], 0
    for name, us in KERNELS.items():
        category = "gpu_memcpy" if name.startswith("Mem") else "kernel"
        events.append(
            {"ph": "X", "cat": category, "name": name, "ts": at, "dur": us, "pid": 0, "tid": 7}
        )
        at += us
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#9", "ts": 0, "dur": 100}
    trace = folder / "traces" / "step-9"
    trace.mkdir(parents=True)
    text = json.dumps({"traceEvents": [*events, step | {"pid": 1, "tid": 1}]})
    (trace / "rank-2.json.gz").write_bytes(gzip.compress(text.encode()))


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


def test_time_by_kind_and_memory(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path)
    facts, rows = simulated(tmp_path, cache, monkeypatch)
    assert {*rows} == {"step", *PARTS.values(), "memory, reserved", "memory, active"}
    assert rows["step"]["measured"] == 0.2 and rows["step"]["predicted"] == facts["step_time_s"]
    measured_us = {name: rows[text]["measured"] * 1e6 for name, text in PARTS.items()}
    assert measured_us == pytest.approx(
        {
            "matmul": 40,
            "attention": 10,
            "elementwise": 20,
            "copies": 5,
            "optimizer": 0,
            "communication_exposed": 15,
            "host_idle": 10,
        }
    )
    # The trace is of rank 2, in the second stage.
    second = facts["per_rank"][1]
    predicted = {name: rows[text]["predicted"] for name, text in PARTS.items()}
    assert sum(predicted.values()) == pytest.approx(facts["step_time_s"])
    assert predicted["communication_exposed"] == pytest.approx(second["exposed_s"])
    computed = sum(
        predicted[part]
        for part in ("matmul", "attention", "elementwise", "copies", "optimizer")
    )
    # What is waited for on other streams are copies, too. Of these the mean over stages is known.
    waited = computed - second["compute_s"]
    assert -1e-9 < waited <= 2 * facts["time"]["copies_s"]
    # fp32 with grouped heads has the memory-efficient kernel, on copies of the heads.
    assert [part for part, seconds in predicted.items() if not seconds] == []
    # Memory is that of rank 0, whose rows these are.
    first = facts["per_rank"][0]
    reserved, active = rows["memory, reserved"], rows["memory, active"]
    assert (reserved["predicted"], active["predicted"]) == (
        first["peak_reserved_gib"],
        first["peak_active_gib"],
    )
    assert (reserved["measured"], active["measured"]) == (4.0, 3.0)
    [line] = [
        x for x in capsys.readouterr().out.splitlines() if x.startswith("  matrix products")
    ]
    assert line.split()[-3:-1] == ["0.0", "ms"]
    change = predicted["matmul"] / 40e-6 - 1
    assert line.endswith(f"{change:+.1%}")


def test_a_run_on_a_cpu_without_a_trace(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of its metrics count the memory of the process, which is not simulated."""
    write_run(tmp_path, kind="rss", with_trace=False)
    _, rows = simulated(tmp_path, cache, monkeypatch)
    assert {*rows} == {"step"}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        from titan.sim.cli import main as sim

        sim([*JOB[1:], "--world-size=1", f"--measured={tmp_path}"])
