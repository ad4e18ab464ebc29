"""`titan profile` on a GPU trace made by hand, whose figures can be added up on paper; and its errors.

What the streams do, in microseconds; the step ends with the last kernel, at 980:

    stream 7    100 gather 110 product 210 flash 260 cast 270 .. 300 product 400 softmax 420 product 620 add 630
                recomputed product 730 product 830 .. 900 adamw 960
    stream 20   all-gather 200 to 300, reduce-scatter 760 to 880
    stream 8    copy 940 to 980
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell, command
from tests.support.tables import table, tabled
from titan.tools.trace import analyse
from titan.tools.trace_files import find_traces
from titan.tools.trace_kinds import kind_of_kernel, kind_of_operator, surroundings

main = command("profile")

MAIN, AUTOGRAD = 1, 2


class Trace:
    """Builds a trace the way Kineto writes one."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = self.flow = 0

    def host(
        self, kind: str, name: str, begin: float, end: float, *, thread: int = MAIN
    ) -> None:
        self._add(kind, name, begin, end, pid=9, tid=thread)

    def op(self, name: str, begin: float, end: float, *, thread: int = MAIN) -> None:
        self.host("cpu_op", name, begin, end, thread=thread)

    def range(self, name: str, begin: float, end: float, *, thread: int = MAIN) -> None:
        self.host("user_annotation", name, begin, end, thread=thread)

    def node(self, name: str, begin: float, end: float, *, made_at: float | None) -> None:
        """A backward node; made_at: where the operator on the main thread that made it begins."""
        self.op(f"autograd::engine::evaluate_function: {name}", begin, end, thread=AUTOGRAD)
        self.op(name, begin + 1, end - 1, thread=AUTOGRAD)
        if made_at is not None:
            self.flow += 1
            flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": self.flow, "pid": 9}
            self.events.append(flow | {"ph": "s", "tid": MAIN, "ts": made_at})
            self.events.append(flow | {"ph": "f", "tid": AUTOGRAD, "ts": begin + 1, "bp": "e"})

    def launch(
        self,
        at: float,
        kernel: str,
        begin: float,
        end: float,
        *,
        stream: int = 7,
        thread: int = MAIN,
    ) -> None:
        """A kernel, launched at `at` from the host."""
        self.correlation += 1
        link = {"correlation": self.correlation}
        copies = kernel.startswith("Memcpy")
        runtime = "cudaMemcpyAsync" if copies else "cudaLaunchKernel"
        self._add("cuda_runtime", runtime, at, at + 0.5, pid=9, tid=thread, args=link)
        kind = "gpu_memcpy" if copies else "kernel"
        self._add(kind, kernel, begin, end, pid=0, tid=stream, args=link)

    def _add(self, kind: str, name: str, begin: float, end: float, **more: Any) -> None:
        event = {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}
        self.events.append(event | more)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            json.dump({"schemaVersion": 1, "traceEvents": self.events}, file)
        return path


def step_trace(start: float = 0, *, late: float = 0) -> Trace:
    """The step of the module's docstring; `late` delays the copy that ends it."""
    t = Trace()
    t.range("ProfilerStep#9", 0, 970)
    t.range("titan: tok_embeddings", 5, 15)
    t.op("aten::embedding", 6, 14)
    t.launch(7, "void at::native::indexSelectLargeIndex<c10::BFloat16>", 100, 110)
    t.range("titan: layers.0", 20, 80)
    t.range("titan: layers.0.attention", 22, 50)
    t.op("aten::mm", 23, 28)
    t.launch(24, "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", 110, 210)
    t.op("aten::_scaled_dot_product_flash_attention", 30, 40)
    t.launch(31, "void pytorch_flash::flash_fwd_kernel<...>", 210, 260)
    t.op("aten::_to_copy", 41, 45)
    t.op("aten::copy_", 42, 44)
    t.launch(43, "at::native::direct_copy_kernel_cuda", 260, 270)
    t.op("c10d::_allgather_base_", 52, 55)
    t.launch(53, "ncclDevKernel_AllGather_RING_LL(...)", 200, 300, stream=20)
    t.range("titan: layers.0.feed_forward", 60, 78)
    t.op("aten::mm", 61, 70)
    t.launch(62, "cutlass_80_tensorop_bf16_s16816gemm", 300, 400)
    t.range("titan: loss", 90, 95)
    t.op("aten::log_softmax", 91, 94)
    t.launch(92, "cunn_SoftMaxForward", 400, 420)
    t.node("MmBackward0", 200, 220, made_at=61)
    t.op("aten::mm", 202, 218, thread=AUTOGRAD)
    t.launch(203, "nvjet_hsh_128x256", 420, 620, thread=AUTOGRAD)
    t.node("torch::autograd::AccumulateGrad", 225, 230, made_at=None)
    t.launch(227, "vectorized_elementwise_kernel<CUDAFunctor_add>", 620, 630, thread=AUTOGRAD)
    t.node("MmBackward0", 240, 270, made_at=23)
    t.range("titan: layers.0.attention", 245, 255, thread=AUTOGRAD)
    t.op("aten::mm", 246, 254, thread=AUTOGRAD)
    t.launch(247, "nvjet_hsh_256x128", 630, 730, thread=AUTOGRAD)
    t.op("aten::mm", 256, 268, thread=AUTOGRAD)
    t.launch(257, "nvjet_hsh_256x128", 730, 830, thread=AUTOGRAD)
    t.node("RegisterPostBackwardFunctionBackward", 272, 276, made_at=None)
    t.launch(274, "ncclDevKernel_ReduceScatter_Sum_f32", 760, 880, stream=20, thread=AUTOGRAD)
    t.range("Optimizer.step#AdamW.step", 300, 320)
    t.op("aten::_fused_adamw_", 301, 319)
    t.launch(302, "multi_tensor_apply_kernel<FusedAdamMathFunctor>", 900, 960)
    t.launch(400, "Memcpy DtoH (Device -> Pageable)", 940, 980 + late, stream=8)
    for event in t.events:
        event["ts"] += start
        if "correlation" in event.get("args", {}):
            event["args"] = {"correlation": event["args"]["correlation"] + 100 * start}
        if "id" in event:
            event["id"] += 100 * start
    return t


# "elementwise": 10 + 10 + 20 + 10: gather, cast, softmax, addition
# "optimizer": 40 + 20 / 2: 20 us of it beside the copy
PARTS_US: dict[str, float] = table(__file__, "parts_us")
# {: forward, recompute, backward, total
# "layers.0": (30, 0, 0, 30): waiting for the all-gather
# "layers.0.attention": (160, 100, 100 + 50, 410): 50: waiting for the reduce-scatter
# "(elsewhere)": (0, 0, 0, 120 + 30): idle, and the copy
MODULES_US = table(__file__, "modules_us")


def microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value * 1e6 for name, value in seconds.items()}


@pytest.mark.parametrize("starts", [[0], [0, 5000]])
def test_every_figure_of_a_gpu_step(starts: list[int]) -> None:
    steps = [step_trace(start) for start in starts]
    report = analyse([event for step in steps for event in step.events])
    # Between two steps the device is idle; the mean holds half of that.
    pause = (starts[-1] - 980) / 2 if len(starts) == 2 else 0
    assert report.device == "gpu" and report.num_steps == len(starts)
    assert report.step_s * 1e6 == pytest.approx(980 + pause)
    assert microseconds(report.parts_s) == pytest.approx(
        PARTS_US | {"host_idle": 120 + pause}, abs=1e-6
    )
    assert report.communication_hidden_s * 1e6 == pytest.approx((270 - 200) + (830 - 760))
    assert report.calls == {
        "matmul": 5,
        "attention": 1,
        "elementwise": 4,
        "copies": 1,
        "optimizer": 1,
        "communication_exposed": 2,
    }
    for name, (forward, recompute, backward, total) in MODULES_US.items():
        expected: dict[str, float] = {
            "forward": forward,
            "recompute": recompute,
            "backward": backward,
        }
        expected["total"] = total + (pause if name == "(elsewhere)" else 0)
        assert microseconds(report.modules_s[name]) == pytest.approx(expected, abs=1e-6), name
    assert list(report.modules_s) == list(MODULES_US)  # the order of the forward pass
    totals = [row["total"] for row in report.modules_s.values()]
    assert sum(report.parts_s.values()) == pytest.approx(report.step_s)
    assert sum(totals) == pytest.approx(report.step_s)


def test_a_kernel_whose_launch_was_not_recorded_still_counts() -> None:
    trace = step_trace()
    events = [e for e in trace.events if e["cat"] != "cuda_runtime"]
    report = analyse(events)
    assert report.parts_s["matmul"] * 1e6 == pytest.approx(600)
    assert report.parts_s["optimizer"] == 0  # known by its range alone
    assert report.modules_s["(elsewhere)"]["total"] == pytest.approx(report.step_s)


def test_cpu_waiting_for_gloo_is_exposed_communication() -> None:
    """gloo works on a thread of its own; the main thread computes for 30 us of that, and waits for 20."""
    t = Trace()
    t.range("ProfilerStep#3", 0, 100)
    t.range("titan: layers.0", 10, 90)
    t.range("FSDP::all_gather (layers.0)", 40, 70)
    t.op("aten::mm", 20, 40)
    t.op("aten::view", 70, 75)
    t.op("aten::mul", 75, 85)
    t.range("gloo:all_gather", 30, 60, thread=3)
    t.op("aten::copy_", 35, 36, thread=3)  # part of gloo's work
    t.range("gloo:all_reduce", 76, 82, thread=4)
    report = analyse(t.events)
    assert report.device == "cpu"
    assert microseconds(report.parts_s) == pytest.approx(
        {
            "matmul": 20,
            "attention": 0,
            "elementwise": 10,
            "copies": 0,
            "optimizer": 0,
            "communication_exposed": 20,
            "host_idle": 50,
        },
        abs=1e-6,
    )
    assert report.communication_hidden_s * 1e6 == pytest.approx(10 + 6)
    assert report.calls["communication_exposed"] == 2 and report.calls["copies"] == 0
    assert report.modules_s["layers.0"]["total"] * 1e6 == pytest.approx(80)
    assert report.modules_s["(elsewhere)"]["total"] * 1e6 == pytest.approx(20)


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


def test_the_page_and_the_spread_over_ranks(tmp_path: Path, shell: Shell) -> None:
    for step in (10, 20):
        step_trace().write(tmp_path / f"run/traces/step-{step}/rank-0.json.gz")
    step_trace(late=500).write(tmp_path / "run/traces/step-20/rank-1.json.gz")
    lines = shell(f"profile {tmp_path}/run").out.splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert lines[0].endswith("step-20/rank-0.json.gz")
    assert lines[1] == "1 step, 0.98 ms; kernels on the GPU's streams"
    cells = [line.split() for line in lines]
    assert ["matrix", "products", "0.60", "61.2%", "5"] in cells
    assert ["communication,", "exposed", "0.08", "8.2%", "2"] in cells
    assert ["layers.*.attention", "(1)", "0.16", "0.10", "0.15", "0.41", "41.8%"] in cells
    spans = "step 0.98-1.48, exposed 0.08-0.08, idle 0.12-0.12"
    assert lines[-1] == f"2 of 2 ranks, ms: {spans}; waits least: rank-0"
    answer = json.loads(shell(f"profile {tmp_path}/run --json --rank 1").out)
    assert answer["step_s"] == pytest.approx(1480e-6)
    assert answer["ranks"]["rank-0"]["step_s"] == pytest.approx(980e-6)
    assert answer["modules_s"]["layers.0.attention"]["recompute"] == pytest.approx(100e-6)


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
    assert "no trace of rank 3 at step 10; there are 0" in error("run", "--rank", "3")


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
