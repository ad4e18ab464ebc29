"""`titan sim --calibrate MY.toml`: measure the machine at hand, and write what it reaches as a hardware profile.

Kernels are described as the simulator knows them (titan.sim.trace.Kernel), run, timed, and compared with what the base profile says:

    achievable share    that at which cost.py's formula gives the time measured, the middle one of several shapes; so a share means the same
                        here and there: what the inner loop reaches, tiles and waves not counted
    curves              one measurement a point: attention by length, memory by bytes
    host                launches without a device to wait for
    collectives         under torchrun: bus bandwidth of large messages between the ranks of this node

Nothing is fitted to a training run. What is not measured (networks between nodes, compiled launches and kernels that transpose) stays the base profile's.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from titan.config.errors import ConfigError, Problem
from titan.hardware import recognise

from .cost import Cost
from .profiles import Profile, load_profile
from .trace import Kernel

Figures = dict[str, Any]
SecondsOf = Callable[[Kernel], float]
_REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    """How large the kernels are: a CPU would take minutes for a GPU's."""

    tokens: int
    widths: tuple[tuple[int, int], ...]  # K, N of matrix products
    lengths: tuple[int, ...]  # of attention
    heads: int
    moved: tuple[int, ...]  # bytes
    message: int  # bytes


LARGE = Sizes(
    16384,
    ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 3584), (8192, 8192)),
    (512, 1024, 2048, 4096, 8192, 16384),
    32,
    (10**5, 10**6, 10**7, 10**8, 10**9),
    2**28,
)
SMALL = Sizes(
    512, ((512, 512), (512, 1536), (1536, 512)), (128, 512), 8, (10**5, 10**6, 10**7, 10**8), 2**22
)


# ---- from seconds to figures -------------------------------------------------------------------


def fit(base: Profile, seconds_of: SecondsOf, *, sizes: Sizes, dtypes: tuple[str, ...]) -> Figures:
    """Figures of a profile whose kernels take `seconds_of` them; the rest is `base`'s."""
    figures: Figures = {"kernel_min_us": 1e6 * seconds_of(_pointwise(0))}
    figures["memory_share"] = _memory_shares(base, seconds_of, sizes, figures["kernel_min_us"])
    known = base.model_copy(
        update=figures | {"memory_share": tuple(map(tuple, figures["memory_share"]))}
    )
    figures["matmul_share"] = base.matmul_share | {
        dtype: _matmul_share(known, seconds_of, sizes, dtype) for dtype in dtypes
    }
    return figures | _attention(known, seconds_of, sizes, dtypes[0])


def _pointwise(moved: int) -> Kernel:
    return Kernel(
        "aten::add",
        "pointwise",
        dtype="float32",
        read_bytes=moved // 2,
        write_bytes=moved - moved // 2,
    )


def _memory_shares(
    base: Profile, seconds_of: SecondsOf, sizes: Sizes, least_us: float
) -> list[list[float]]:
    shares = []
    for moved in sizes.moved:
        busy = max(1e-9, seconds_of(_pointwise(moved)) - least_us * 1e-6)
        shares.append([float(moved), _share(moved / busy / (base.memory_tb_per_s * 1e12))])
    return shares


def _matmul_share(known: Profile, seconds_of: SecondsOf, sizes: Sizes, dtype: str) -> float:
    """By bisection: the formula's time falls as the share grows, but not in proportion (the floor is memory's)."""

    def share_of(kernel: Kernel) -> float:
        measured, low, high = seconds_of(kernel), 0.001, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            profile = known.model_copy(update={"matmul_share": known.matmul_share | {dtype: middle}})  # fmt: skip
            low, high = (
                (middle, high) if Cost(profile).kernel_s(kernel) > measured else (low, middle)
            )
        return high

    return _share(statistics.median(map(share_of, _products(sizes, dtype))))


def _products(sizes: Sizes, dtype: str) -> Iterator[Kernel]:
    width = {"float8": 1, "float32": 4}.get(dtype, 2)
    for k, n in sizes.widths:
        m = sizes.tokens
        yield Kernel(
            "aten::_scaled_mm" if dtype == "float8" else "aten::mm",
            "matmul",
            ((m, k), (k, n)),
            "float8_e4m3fn" if dtype == "float8" else dtype,
            2 * m * k * n,
            width * (m * k + k * n),
            (2 if dtype == "float8" else width) * m * n,
        )


def _attention(known: Profile, seconds_of: SecondsOf, sizes: Sizes, dtype: str) -> Figures:
    def rate(length: int, *, backward: bool, causal: bool) -> float:
        """TFLOP/s that make the formula's time the measured one."""
        name = "attention_backward" if backward else "attention"
        shape = (max(1, sizes.lengths[-1] // length), sizes.heads, length, 128)
        # The shapes are those of q, k, v.
        kernel = Kernel(f"aten::{name}", name, (shape,) * 3, dtype, causal=causal)
        flat = dict.fromkeys(("attention_forward_tflops", "attention_backward_tflops"), ((1, 1.0),))  # fmt: skip
        one = known.model_copy(update={**flat, "attention_causal_share": 1.0, "kernel_min_us": 0.0})
        return Cost(one).kernel_s(kernel) / max(
            1e-9, seconds_of(kernel) - known.kernel_min_us * 1e-6
        )

    figures: Figures = {}
    for key, backward in (("attention_forward_tflops", False), ("attention_backward_tflops", True)):
        figures[key] = [[float(n), rate(n, backward=backward, causal=False)] for n in sizes.lengths]
    length = sizes.lengths[-1]
    causal = rate(length, backward=False, causal=True)
    figures["attention_causal_share"] = causal / figures["attention_forward_tflops"][-1][1]
    return figures


def _share(value: float) -> float:
    return round(min(1.0, max(0.001, value)), 4)


# ---- on a device -------------------------------------------------------------------------------


class Bench:
    """Runs described kernels on the device of this process."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.on_gpu = device.type != "cpu"

    def seconds(self, kernel: Kernel) -> float:
        """Of one launch among many: the middle of several rounds."""
        work = self._work(kernel)
        return self._time(work, device_only=self.on_gpu)

    def _work(self, kernel: Kernel) -> Callable[[], Any]:
        import torch
        import torch.nn.functional as F

        def tensor(*shape: int, dtype: Any = None) -> Any:
            kind = dtype or getattr(torch, kernel.dtype)
            return torch.randn(shape, device=self.device, dtype=torch.float32).to(kind)

        if kernel.kind == "pointwise":
            x = torch.zeros(max(1, kernel.write_bytes // 4), device=self.device)
            y = torch.empty_like(x)
            return lambda: torch.add(x, 1.0, out=y)
        if kernel.kind == "matmul":
            (m, k), (_, n) = kernel.shapes
            if kernel.name == "aten::_scaled_mm":
                a, b = tensor(m, k), tensor(n, k).t()
                one = torch.ones((), device=self.device)
                return lambda: torch._scaled_mm(
                    a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                )
            a, b = tensor(m, k), tensor(n, k).t()
            return lambda: torch.mm(a, b)
        q, k, v = (
            tensor(*shape).requires_grad_(kernel.kind == "attention_backward")
            for shape in kernel.shapes
        )
        if kernel.kind == "attention":
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=kernel.causal)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=kernel.causal)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    def _time(self, work: Callable[[], Any], *, device_only: bool) -> float:
        import torch

        work()
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        # Enough launches that the clock and the first one's wait do not count, for a twentieth of a second.
        count = max(1, min(2000, int(0.05 / max(1e-7, time.perf_counter() - start))))
        if device_only and count > 50:
            work = _captured(work, count) or work
            rounds, per_round = 1, count
        else:
            rounds, per_round = count, 1
        times = []
        for _ in range(_REPEATS):
            if device_only:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(rounds):
                    work()
                end.record()
                self._wait()
                times.append(begin.elapsed_time(end) * 1e-3)
            else:
                start = time.perf_counter()
                for _ in range(rounds):
                    work()
                times.append(time.perf_counter() - start)
        return statistics.median(times) / (rounds * per_round)

    def _wait(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def launch_us(self) -> float:
        """Host time of an eager operation that the device finishes at once."""
        import torch

        x = torch.zeros(1, device=self.device)
        self._wait()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            for _ in range(500):  # fewer than the queue holds, so that the host never waits
                x.add_(1.0)
            times.append((time.perf_counter() - start) / 500)
            self._wait()
        return statistics.median(times) * 1e6

    def host_gb_per_s(self) -> float:
        """Pinned host memory to the device; on a CPU, a copy."""
        import torch

        size = 2**28 if self.on_gpu else 2**24
        there = torch.empty(size, dtype=torch.uint8, device=self.device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=self.on_gpu)
        seconds = self._time(lambda: there.copy_(here, non_blocking=True), device_only=self.on_gpu)
        return size / seconds / 1e9


def _captured(work: Callable[[], Any], count: int) -> Callable[[], Any] | None:
    """`count` runs as one CUDA graph, so that short kernels are not the host's time; None where a graph cannot be made of them."""
    import torch

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                work()
        return graph.replay
    except RuntimeError:
        return None


def measure_collectives(device: Any, size_bytes: int) -> Figures:
    """Bus bandwidths in GB/s between the ranks of the default group, all of one node; as nccl-tests defines them."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    part = torch.zeros(size_bytes // 4 // ranks, device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    other = torch.zeros_like(whole)
    ring = (ranks - 1) / ranks * whole.numel() * 4
    rank, size = dist.get_rank(), whole.numel() * 4

    def exchange() -> None:
        pair = rank ^ 1
        if pair < ranks:
            calls = [dist.P2POp(dist.isend, whole, pair), dist.P2POp(dist.irecv, other, pair)]
            for request in dist.batch_isend_irecv(calls):
                request.wait()

    ways = {
        "ring_gb_per_s": (lambda: dist.all_gather_into_tensor(whole, part), ring),
        "all_reduce_gb_per_s": (lambda: dist.all_reduce(whole), 2 * ring),
        "all_to_all_gb_per_s": (lambda: dist.all_to_all_single(other, whole), ring),
        "p2p_gb_per_s": (exchange, size),
    }
    figures = {}
    for name, (work, volume) in ways.items():
        times = []
        for _ in range(_REPEATS):
            dist.barrier()
            if device.type != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device.type != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        figures[name] = volume / float(slowest) / 1e9
    return figures


# ---- the command -------------------------------------------------------------------------------


def calibrate(path: Path, *, base_name: str | None, say: Callable[[str], None]) -> int:
    """Measure, write `path`, and tell; under torchrun rank 0 writes. Raises ConfigError for a profile that does not exist."""
    if not path.parent.is_dir():  # before a minute of measuring
        message = f"there is no folder {path.parent}"
        raise ConfigError([Problem("command line", 0, "--calibrate", message)])
    import torch
    import torch.distributed as dist

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    base = load_profile(base_name or _base_of(name, on_gpu))
    sizes = LARGE if on_gpu else SMALL
    dtypes = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16")
    if on_gpu:
        torch.cuda.set_device(device)
        if torch.cuda.get_device_capability(device) >= (8, 9):
            dtypes = (*dtypes, "float8")
    bench = Bench(device)
    figures = _of_device(device) if on_gpu else _of_host(bench)
    counted = 0

    def seconds_of(kernel: Kernel) -> float:
        nonlocal counted
        counted += 1
        say(f"kernel {counted}: {kernel.name} {kernel.shapes or kernel.read_bytes}")
        return bench.seconds(kernel)

    figures |= fit(base.model_copy(update=figures), seconds_of, sizes=sizes, dtypes=dtypes)
    figures |= {"launch_us": bench.launch_us(), "host_gb_per_s": bench.host_gb_per_s()}
    if ranks > 1:
        dist.init_process_group()
        say("collectives")
        figures |= measure_collectives(device, sizes.message) | {"gpus_per_node": ranks}
        dist.destroy_process_group()
    say("")
    if int(os.environ.get("RANK", 0)) == 0:
        note = f"measured by titan sim --calibrate on {name}, torch {torch.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}"
        path.write_text(to_toml(path.stem, base.name, figures, note=note), encoding="utf-8")
        print(table(base, load_profile(path), figures))
        print(f"\nwrote {path}; titan sim JOB.toml --world-size N --hardware {path}")
        if ranks == 1:
            print(
                "collectives are the base profile's; under torchrun, one process a device, they are measured, too"
            )
    return 0


def _base_of(name: str, on_gpu: bool) -> str:
    if not on_gpu:
        return "cpu"
    row = recognise(name)
    found = row.name if row else ""
    try:
        load_profile(found)
    except ConfigError:
        message = f"there is no profile of {name} to begin with: name the most similar one"
        raise ConfigError([Problem("command line", 0, "--hardware", message)]) from None
    return found


def _of_device(device: Any) -> Figures:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "num_sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 2),
    }


def _of_host(bench: Bench) -> Figures:
    """A CPU has no datasheet here: its peak is the best that was seen, and its bandwidth what a large copy reaches."""
    best = max(k.flops / bench.seconds(k) for k in _products(SMALL, "float32")) / 1e12
    moved = SMALL.moved[-1]
    bandwidth = moved / bench.seconds(_pointwise(moved)) / 1e12
    return {
        "peak_tflops": dict.fromkeys(("float32", "bfloat16", "float16"), best * 1.05)
        | {"float64": best / 2},
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2),
        "memory_tb_per_s": bandwidth * 1.05,
    }


def to_toml(name: str, base: str, figures: Figures, *, note: str) -> str:
    """A profile file."""
    lines = [f"name = {json.dumps(name)}", f"base = {json.dumps(base)}", ""]
    lines += [f"{key} = {_value(value)}" for key, value in figures.items()]
    lines += ["", "[sources]", *(f"{key} = {json.dumps(note)}" for key in figures)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:.5g}" if isinstance(value, float) and value < 1e5 else f"{value}"


def table(base: Profile, measured: Profile, figures: Figures) -> str:
    """What was measured beside what the base profile says."""
    rows = [("figure", "measured", base.name)]
    for key in figures:
        one, other = getattr(measured, key), getattr(base, key)
        if isinstance(one, dict):
            rows += [(f"{key} {k}", f"{one[k]:.4g}", f"{other[k]:.4g}" if k in other else "-") for k in one]  # fmt: skip
        elif isinstance(one, tuple):
            rows += [(f"{key} at {size:,.0f}", f"{value:.4g}", "") for size, value in one]
        else:
            rows.append((key, f"{one:.4g}", f"{other:.4g}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows
    )
