"""Traces made by hand, and figures of a trace as tests check them: calls by part, and milliseconds by module."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from titan.observe.step_parts import COMMUNICATION, HOST, PARTS
from titan.tools.trace import BACKWARD, RECOMPUTED, TracedSteps

MAIN, AUTOGRAD = 1, 2


class Trace:
    """Builds a trace the way Kineto writes one."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def host(
        self, kind: str, name: str, begin: float, end: float, *, thread: int = MAIN
    ) -> None:
        self._add(kind, name, begin, end, pid=9, tid=thread)

    def op(
        self, name: str, begin: float, end: float, *, thread: int = MAIN, **more: Any
    ) -> None:
        """An operator; of the main thread, its number is where it begins."""
        number = {"Sequence number": begin} if thread == MAIN else {}
        self._add("cpu_op", name, begin, end, pid=9, tid=thread, args=number | more)

    def range(self, name: str, begin: float, end: float, *, thread: int = MAIN) -> None:
        self.host("user_annotation", name, begin, end, thread=thread)

    def node(self, name: str, begin: float, end: float, *, made_at: float | None) -> None:
        """A backward node; made_at: where the operator on the main thread that made it begins."""
        number = {} if made_at is None else {"Sequence number": made_at}
        name_of_node = f"autograd::engine::evaluate_function: {name}"
        self.op(name_of_node, begin, end, thread=AUTOGRAD, **number)
        self.op(name, begin + 1, end - 1, thread=AUTOGRAD)

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
    """A step of a GPU, whose figures can be added up on paper; `late` delays the copy that ends it.

    What the streams do, in microseconds; the step ends with the last kernel, at 980:

        stream 7    100 gather 110 product 210 flash 260 cast 270 .. 300 product 400 softmax 420 product 620 add 630
                    recomputed product 730 product 830 .. 900 adamw 960
        stream 20   all-gather 200 to 300, reduce-scatter 760 to 880
        stream 8    copy 940 to 980
    """
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
    t.op("c10d::_allgather_base_", 52, 55, **{"Process Group Description": "mesh_dp_shard"})
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
        details = event.get("args", {})
        for key in details.keys() & {"correlation", "Sequence number"}:
            details[key] += 100 * start
    return t


def parts_s(timeline: TracedSteps) -> dict[str, float]:
    """Return the seconds of a step by part."""
    found = dict.fromkeys(PARTS, 0.0)
    for each in timeline.exclusive:
        found[each.part] += (each.end - each.begin) / timeline.num_steps / 1e9
    return found


def step_ms(timeline: TracedSteps) -> float:
    """Return the mean milliseconds of a step."""
    ranges = timeline.exclusive
    return (ranges[-1].end - ranges[0].begin) / timeline.num_steps / 1e6


def calls(timeline: TracedSteps) -> dict[str, float]:
    """Return the kernels or operators of a step, by part. A step of a collective is not a separate call."""
    once = {each.event: each for each in timeline.exclusive}
    outer = [
        each
        for each in once.values()
        if each.name != each.event.name  # a kernel
        or not each.event.parent
        or COMMUNICATION not in each.event.parent.within
    ]
    counts = Counter(each.part for each in outer)
    return {part: count / timeline.num_steps for part, count in counts.items()}


def modules_ms(timeline: TracedSteps) -> dict[str, Any]:
    """Return the milliseconds of a step in which a module's work ran, by module and phase."""
    found: dict[str, Any] = {}
    for each in timeline.exclusive:
        if each.part != HOST:
            phases = [p for p in (RECOMPUTED, BACKWARD) if p in each.event.within]
            phase = phases[0] if phases else "forward"
            ms = (each.end - each.begin) / 1e6 / timeline.num_steps
            found.setdefault(each.event.module, Counter())[phase] += ms
    return found


def adds_up(timeline: TracedSteps) -> bool:
    """Return whether the parts and the ranges without gaps make the step."""
    ends = [each.end for each in timeline.exclusive]
    begins = [each.begin for each in timeline.exclusive]
    is_whole = begins[1:] == ends[:-1]
    return is_whole and abs(sum(parts_s(timeline).values()) * 1e3 - step_ms(timeline)) < 1e-6
