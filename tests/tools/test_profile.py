"""`titan profile` on a GPU trace made by hand, whose figures can be added up on paper; and its errors."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import Shell, command
from tests.support.profiler_traces import (
    Trace,
    adds_up,
    calls,
    modules_ms,
    parts_s,
    step_ms,
    step_trace,
)
from tests.support.tables import table, tabled
from titan.tools.trace import analyse
from titan.tools.trace_files import find_traces
from titan.tools.trace_kinds import kind_of_kernel, kind_of_operator, surroundings

main = command("profile")


# The copy is beside AdamW for 20 us, which began first; 80 us of the transfers have no work beside them.
PARTS_US: dict[str, float] = table(__file__, "parts_us")
# Forward, recomputed and backward. layers.0 waits 30 us for the all-gather, its attention 50 for the reduce-scatter.
MODULES_US: dict[str, list[float]] = table(__file__, "modules_us")


def microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value * 1e6 for name, value in seconds.items()}


@pytest.mark.parametrize("starts", [[0], [0, 5000]])
def test_every_figure_of_a_gpu_step(starts: list[int]) -> None:
    steps = [step_trace(start) for start in starts]
    report = analyse([event for step in steps for event in step.events])
    # Between two steps the device is idle; the mean holds half of that.
    pause = (starts[-1] - 980) / 2 if len(starts) == 2 else 0
    assert report.num_steps == len(starts) and adds_up(report)
    assert step_ms(report) * 1e3 == pytest.approx(980 + pause)
    assert microseconds(parts_s(report)) == pytest.approx(
        PARTS_US | {"host_idle": 120 + pause}, abs=1e-6
    )
    counts = {**calls(report)}
    counts.pop("host_idle")
    assert counts == {
        "matmul": 5,
        "attention": 1,
        "elementwise": 4,
        "copies": 1,
        "optimizer": 1,
        "communication_exposed": 2,
    }
    modules = modules_ms(report)
    for name, expected in MODULES_US.items():
        phases = [modules[name][p] * 1e3 for p in ("forward", "recomputed", "backward")]
        assert phases == pytest.approx(expected, abs=1e-6), name


def test_a_kernel_whose_launch_was_not_recorded_still_counts() -> None:
    trace = step_trace()
    events = [e for e in trace.events if e["cat"] != "cuda_runtime"]
    report = analyse(events)
    assert parts_s(report)["matmul"] * 1e6 == pytest.approx(600)
    assert parts_s(report)["optimizer"] == 0  # known by its range alone


def test_cpu_waiting_for_gloo_is_exposed_communication() -> None:
    """gloo works on a thread of its own; the main thread computes for 30 us of that, and waits for 20."""
    t = Trace()
    t.range("ProfilerStep#3", 0, 100)
    t.range("titan: layers.0", 10, 90)
    t.range("FSDP::all_gather (layers.0)", 40, 70)
    t.op("aten::mm", 20, 40)
    t.op("aten::view", 70, 75)
    t.op("aten::mul", 75, 85)
    t.op("aten::view", 83, 84)
    t.range("gloo:all_gather", 30, 60, thread=3)
    t.op("aten::copy_", 35, 36, thread=3)  # part of gloo's work
    t.range("gloo:all_reduce", 76, 82, thread=4)
    report = analyse(t.events)
    assert microseconds(parts_s(report)) == pytest.approx(
        {
            "matmul": 20,
            "attention": 0,
            "elementwise": 9,
            "copies": 0,
            "optimizer": 0,
            "communication_exposed": 20,
            "host_idle": 51,
        },
        abs=1e-6,
    )
    assert "copies" not in calls(report)


@tabled("kernel, kind")
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of_kernel(kernel, frozenset()) == kind


def test_what_surrounds_a_kernel_or_an_operator_counts() -> None:
    for name in ("nvjet_hsh_256x128", "vectorized_elementwise_kernel"):
        assert kind_of_kernel(name, {"optimizer"}) == "optimizer"  # Muon multiplies matrices
        assert kind_of_kernel(name, {"attention"}) == "attention"  # attention made of products
    assert kind_of_kernel("Memcpy HtoD (Pinned -> Device)", {"cast"}) == "copies"
    assert kind_of_kernel("ncclDevKernel_AllReduce", {"optimizer"}) == "communication_exposed"
    # A module's name says nothing about what an operator in it does.
    assert surroundings("titan: layers.0.attention", is_operator=False) == ""
    for name, around, kind in table(__file__, "kinds_of_operators"):
        within = {around} - {""}
        assert kind_of_operator(name, within, is_operator=True) == kind, name


def test_which_trace(tmp_path: Path) -> None:
    for name in ("step-9/rank-0", "step-10/rank-1", "step-10/rank-0", "step-10/rank-12"):
        step_trace().write(tmp_path / f"folder/{name}.json.gz")

    def found(run: Path, step: int | None = None, rank: int | None = None) -> list[str]:
        paths = find_traces(run, step=step, rank=rank)
        return [f"{path.parent.name}/{path.name.split('.')[0]}" for path in paths]

    newest = ["step-10/rank-0", "step-10/rank-1", "step-10/rank-12"]
    assert found(tmp_path) == found(tmp_path / "folder") == newest
    assert found(tmp_path, rank=12) == ["step-10/rank-12", "step-10/rank-0", "step-10/rank-1"]
    assert found(tmp_path, step=9) == ["step-9/rank-0"]
    assert found(tmp_path / "folder/step-10/rank-1.json.gz") == ["step-10/rank-1"]


def test_errors_are_one_line(tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.toml").touch()
    step_trace().write(tmp_path / "run/traces/step-10/rank-0.json.gz")

    def error(*arguments: str) -> str:
        text = shell.refuse(f"profile {tmp_path / arguments[0]}", *arguments[1:])
        assert text.count("\n") == 1
        return text

    assert f"runs near it: {tmp_path / 'empty'}" in error("emtpy")
    assert "profiling.enable_profiling = true" in error("empty")
    assert "no trace of step 11; there are 10" in error("run", "--step", "11")
    assert "no trace of rank 3; there are 0" in error("run", "--rank", "3")


EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}


WHOLE = json.dumps({"traceEvents": [EVENT] * 1000}).encode()


DAMAGED = {
    "junk.json.gz": os.urandom(3000),
    "cut.json.gz": gzip.compress(WHOLE)[:-200],
    "cut.json": WHOLE[:-200],
    "nothing.json.gz": b"",
    "plain.json.gz": b"{}",
    "zeros.json.gz": gzip.compress(bytes(3 * 10**7), 1),
    "bomb.json.gz": gzip.compress(b'{"traceEvents": [' + b"{}," * 5 * 10**6, 1),
    "deep.json": b'{"traceEvents": [' + b"[" * 10**6,
    "text.json": b'{"traceEvents": ["' + b"x" * 10**7,
    "types.json": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": [], "pid": 1, "tid": 1, "ts": 1}]}',
    "huge.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1e999}]}',
    "empty.json": b'{"traceEvents": []}',
    "escape.json": b"\x1b]52;c;aGk=\x07",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_trace_is_one_line(name: str, tmp_path: Path, shell: Shell) -> None:
    (path := tmp_path / name).write_bytes(DAMAGED[name])
    begin = time.process_time()
    error = shell.refuse(f"profile {path}")
    assert error.startswith(f"{path}: not a whole trace") and error.count("\n") == 1
    assert error.rstrip("\n").isprintable() and time.process_time() - begin < 20


def test_a_large_trace_is_read_event_by_event(tmp_path: Path) -> None:
    """What is read of an event is kept, not the event: these took 600 MB."""
    path = tmp_path / "large.json"
    more = {"cat": "python_function", "name": "f", "args": {"stack": ["x" * 20] * 20}}
    line, real = json.dumps(EVENT | more), json.dumps(EVENT)
    path.write_text('{"traceEvents": [' + f"{line}," * 80_000 + real + "]}")
    code = (
        "import sys; from titan.tools.profile import main\n"
        "used = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        "before = used(); assert main([sys.argv[1]]) == 0; print(used() - before)\n"
    )
    done = subprocess.check_output([sys.executable, "-c", code, str(path)], text=True)
    assert float(done.splitlines()[-1]) < 50


def test_a_trace_of_too_many_events_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr("titan.tools.trace.MAX_EVENTS", 500)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [EVENT] * 1000}))
    assert "record fewer steps: profiling.profiler_active" in shell.refuse(f"profile {path}")
