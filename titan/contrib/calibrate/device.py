"""Calibration (`titan sim --calibrate MY.toml`): measurements of this machine, written as a hardware profile.

Kernels are described as the simulator knows them (titan.sim.record.trace.Kernel), run, timed, and
compared with the base profile:

    achievable share    the share at which cost.py's formula gives the measured time, the median of several shapes; so a share means
                        the same here and there: the speed of the inner loop, without the cost of tiles and waves
    curves              one measurement a point: attention by length, memory by bytes
    host                launches without a device to wait for
    collectives         under torchrun: bus bandwidth of large messages between the ranks of this node

Nothing is fitted to a training run. Figures that are not measured (networks between nodes, compiled
launches and kernels that transpose) stay the base profile's.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titan.base.hardware import recognise
from titan.config.errors import ConfigError
from titan.config.options import mistake
from titan.ops import bench
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import Kernel
from titan.sim.report.text import columns

Figures = dict[str, Any]
SecondsOf = Callable[[Kernel], float]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured kernels. A CPU would take minutes for a GPU's.

    Attributes:
        tokens: Rows of the matmuls' left operand.
        widths: K and N of the matmuls.
        lengths: Sequence lengths of attention.
        heads: Heads of attention.
        moved: Bytes that pointwise kernels move.
        message: Bytes of a collective.
    """

    tokens: int
    widths: tuple[tuple[int, int], ...]  # K, N of matmuls
    lengths: tuple[int, ...]  # of attention
    heads: int
    moved: tuple[int, ...]  # bytes
    message: int  # bytes


# Widths of Llama 3's layers: 8B, and 70B with its feed-forward layer split over 8 ranks.
LARGE = Sizes(
    16384,
    ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 3584), (8192, 8192)),
    (512, 1024, 2048, 4096, 8192, 16384),
    32,
    (10**5, 10**6, 10**7, 10**8, 10**9),
    2**28,
)
SMALL = Sizes(
    512,
    ((512, 512), (512, 1536), (1536, 512)),
    (128, 512),
    8,
    (10**5, 10**6, 10**7, 10**8),
    2**22,
)


# ---- from seconds to figures -------------------------------------------------------------------


def fit(
    base: Profile, seconds_of: SecondsOf, *, sizes: Sizes, dtypes: tuple[str, ...]
) -> Figures:
    """Return the figures of a profile on which kernels take the measured times.

    All other figures are `base`'s.

    Args:
        base: Profile to begin with.
        seconds_of: Returns the measured seconds of a kernel.
        sizes: Sizes of the kernels.
        dtypes: Data types of the matmuls. Attention is measured in the first.
    """
    # In this order: a kernel's fixed time is deducted from the memory's measurements, and both from
    # the matmuls'.
    figures: Figures = {"kernel_min_us": 1e6 * seconds_of(_pointwise(0))}
    rates = _memory_rates(seconds_of, sizes, figures["kernel_min_us"])
    # A card that moves more than its base, such as an H200 against an H100, would have its shares cut at 1.
    if (fastest := max(rate for _, rate in rates)) > base.memory_tb_per_s:
        figures["memory_tb_per_s"] = fastest * 1.05
    peak = figures.get("memory_tb_per_s", base.memory_tb_per_s)
    figures["memory_share"] = [[moved, _share(rate / peak)] for moved, rate in rates]
    known = base.model_copy(
        update=figures | {"memory_share": tuple(map(tuple, figures["memory_share"]))}
    )
    figures["matmul_share"] = base.matmul_share | {
        dtype: _matmul_share(known, seconds_of, sizes, dtype) for dtype in dtypes
    }
    return figures | _attention(known, seconds_of, sizes, dtypes[0])


def _pointwise(moved: int) -> Kernel:
    """Return a kernel that moves this number of bytes."""
    return Kernel(
        "aten::add",
        "pointwise",
        dtype="float32",
        # Half read, half written, as the function that `make_work` returns does.
        read_bytes=moved // 2,
        write_bytes=moved - moved // 2,
    )


def _memory_rates(
    seconds_of: SecondsOf, sizes: Sizes, least_us: float
) -> list[tuple[float, float]]:
    """Return TB/s by the bytes that a kernel moves."""
    rates = []
    for moved in sizes.moved:
        # Never 0, or a kernel that is too short to measure would divide by it.
        busy = max(1e-9, seconds_of(_pointwise(moved)) - least_us * 1e-6)
        rates.append((float(moved), moved / busy / 1e12))
    return rates


def _matmul_share(known: Profile, seconds_of: SecondsOf, sizes: Sizes, dtype: str) -> float:
    """Return the achievable share of matmuls, by bisection.

    The formula's time falls as the share grows, but not in proportion, since memory sets a floor.
    """

    def share_of(kernel: Kernel) -> float:
        measured, low, high = seconds_of(kernel), 0.001, 1.0
        # 40 halvings: far below the noise of a measurement.
        for _ in range(40):
            middle = (low + high) / 2
            shares = known.matmul_share | {dtype: middle}
            profile = known.model_copy(update={"matmul_share": shares})
            low, high = (
                (middle, high) if Cost(profile).kernel_s(kernel) > measured else (low, middle)
            )
        return high

    # The median, since single shapes meet a tile that fits them unusually well or badly.
    return _share(statistics.median(map(share_of, _matmuls(sizes, dtype))))


def _matmuls(sizes: Sizes, dtype: str) -> Iterator[Kernel]:
    """Yield the matmuls to measure."""
    # Bytes of an operand's element; float8's result is bf16.
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
    """Return the rates of attention by length, and the share of them that a causal mask reaches."""

    def rate(length: int, *, backward: bool, causal: bool) -> float:
        """TFLOP/s that make the formula's time the measured one."""
        name = "attention_backward" if backward else "attention"
        shape = (max(1, sizes.lengths[-1] // length), sizes.heads, length, 128)
        # The shapes are those of q, k, v.
        kernel = Kernel(f"aten::{name}", name, (shape,) * 3, dtype, causal=causal)
        rates = {known.attention_kernel: ((1, 1.0),)}
        flat = {"attention_forward_tflops": rates, "attention_backward_tflops": rates}
        # With a rate of 1 TFLOP/s the formula's seconds are the TFLOPs, so a division by the
        # measured seconds gives the rate.
        whole = {known.attention_kernel: ((1, 1.0),)}
        figures = {**flat, "attention_causal_share": whole, "kernel_min_us": 0.0}
        one = known.model_copy(update=figures)
        return Cost(one).kernel_s(kernel) / max(
            1e-9, seconds_of(kernel) - known.kernel_min_us * 1e-6
        )

    figures: Figures = {}
    for key, backward in (
        ("attention_forward_tflops", False),
        ("attention_backward_tflops", True),
    ):
        figures[key] = [
            [float(n), rate(n, backward=backward, causal=False)] for n in sizes.lengths
        ]
    figures["attention_causal_share"] = [
        [length, rate(int(length), backward=False, causal=True) / whole]
        for length, whole in figures["attention_forward_tflops"]
    ]
    return figures


def _share(value: float) -> float:
    """Return a value as a share between 0.001 and 1."""
    return round(min(1.0, max(0.001, value)), 4)


# ---- on a device -------------------------------------------------------------------------------

_BEYOND_CACHES = 2**28  # bytes, several times the L2 cache of an H100 or B200


def make_work(kernel: Kernel, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs a described kernel on a device."""

    def tensor(*shape: int) -> torch.Tensor:
        dtype = getattr(torch, kernel.dtype)
        # Random data: matmuls of zeros draw less power, and so run at higher clocks.
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    if kernel.kind == "pointwise":
        # Each call has other tensors, as far as 64 of them reach, so that caches do not serve them.
        size = max(1, kernel.write_bytes // 4)
        copies = min(64, -(-_BEYOND_CACHES // (8 * size)))
        pairs = cycle(
            [
                (torch.zeros(size, device=device), torch.empty(size, device=device))
                for _ in range(copies)
            ]
        )

        def add() -> None:
            x, y = next(pairs)
            torch.add(x, 1.0, out=y)

        return add
    if kernel.kind == "matmul":
        (m, k), (_, n) = kernel.shapes
        # Column-major, as a linear layer's transposed weight is, and as _scaled_mm demands.
        a, b = tensor(m, k), tensor(n, k).t()
        if kernel.name != "aten::_scaled_mm":
            return lambda: torch.mm(a, b)
        one = torch.ones((), device=device)
        scaled = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        return lambda: torch._scaled_mm(a, b, **scaled, use_fast_accum=True)
    q, k, v = (
        tensor(*shape).requires_grad_(kernel.kind == "attention_backward")
        for shape in kernel.shapes
    )
    if kernel.kind == "attention":
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=kernel.causal)
    # The forward pass runs once. Its graph is kept for every repetition of the backward pass.
    out = F.scaled_dot_product_attention(q, k, v, is_causal=kernel.causal)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def measure_links(device: torch.device, size_bytes: int) -> Figures:
    """Return the bandwidths between the ranks of the default group, all on one node.

    The slowest rank counts.
    """
    rates = bench.collectives_gb_per_s(
        device, size_bytes, kinds=("all-gather", "all-reduce", "all-to-all")
    )
    rates["link"] = bench.link_gb_per_s(device, size_bytes) or 0.0
    slowest = torch.tensor([*rates.values()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return dict(
        zip(
            ("ring_gb_per_s", "all_reduce_gb_per_s", "all_to_all_gb_per_s", "p2p_gb_per_s"),
            slowest.tolist(),
            strict=True,
        )
    )


# ---- the command -------------------------------------------------------------------------------


def calibrate(path: Path, *, base_name: str | None, say: Callable[[str], None]) -> int:
    """Measure this machine, write the profile to `path`, and print a table.

    Under torchrun rank 0 writes.

    Args:
        path: File of the new profile.
        base_name: Profile to begin with. None: the profile of this device.
        say: Receives lines on the progress.

    Returns:
        The command's exit code.

    Raises:
        ConfigError: There is no such profile.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    base = load_profile(base_name or base_of(name, on_gpu))
    sizes = LARGE if on_gpu else SMALL
    # The first dtype is the one that attention is measured in.
    dtypes = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16")
    if on_gpu:
        torch.cuda.set_device(device)
        # Ada and Hopper are the first with units for float8.
        if torch.cuda.get_device_capability(device) >= (8, 9):
            dtypes = (*dtypes, "float8")
    counted = 0

    def seconds_of(kernel: Kernel) -> float:
        nonlocal counted
        counted += 1
        say(f"kernel {counted}: {kernel.name} {kernel.shapes or kernel.read_bytes}")
        return bench.seconds(make_work(kernel, device), device)

    # The device's own statements come first: the fits below are shares of them.
    figures = _of_device(device) if on_gpu else _of_host(seconds_of)
    figures |= fit(base.model_copy(update=figures), seconds_of, sizes=sizes, dtypes=dtypes)
    copied = 2**28 if on_gpu else 2**24
    from_host = bench.copy(device, copied, source=torch.device("cpu"))
    figures["host_tiny_us"] = bench.tiny_s(torch.device("cpu")) * 1e6
    if on_gpu:  # the rest of an eager operation is its launch
        figures["launch_us"] = max(0.0, bench.tiny_s(device) * 1e6 - figures["host_tiny_us"])
    figures["host_gb_per_s"] = copied / bench.seconds(from_host, device) / 1e9
    # After the kernels: ranks measure alone, with no other work on the device.
    if ranks > 1:
        dist.init_process_group()
        say("collectives")
        figures |= measure_links(device, sizes.message) | {"gpus_per_node": ranks}
        dist.destroy_process_group()
    say("")
    if int(os.environ.get("RANK", 0)) == 0:
        path.write_text(
            to_toml(
                path.stem,
                base.name,
                figures,
                note=f"measured by titan sim --calibrate on {name}, torch {torch.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}",
            ),
            encoding="utf-8",
        )
        print(table(base, load_profile(path), figures))
        print(f"\nwrote {path}; titan sim JOB.toml --world-size N --hardware {path}")
        if ranks == 1:
            print(
                "collectives are the base profile's; under torchrun, one process a device, they are measured, too"
            )
    return 0


def base_of(name: str, on_gpu: bool) -> str:
    """Return the name of the profile to begin with."""
    if not on_gpu:
        return "cpu"
    row = recognise(name)
    name_of_profile = row.name if row else ""
    try:
        load_profile(name_of_profile)
    except ConfigError:
        raise mistake(
            "--hardware",
            f"there is no profile of {name} to begin with: name the most similar one",
        ) from None
    return name_of_profile


def _of_device(device: torch.device) -> Figures:
    """Return the figures that a GPU states about itself."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "num_sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 2),
    }


def _of_host(seconds_of: SecondsOf) -> Figures:
    """Return the peaks of a CPU, which has no datasheet here: the best matmul, and the bandwidth of a large copy."""
    best = max(k.flops / seconds_of(k) for k in _matmuls(SMALL, "float32")) / 1e12
    moved = SMALL.moved[-1]
    bandwidth = moved / seconds_of(_pointwise(moved)) / 1e12
    return {
        # 5 % above the best measurement, so that shares stay below 1.
        "peak_tflops": dict.fromkeys(("float32", "bfloat16", "float16"), best * 1.05)
        | {"float64": best / 2},
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2
        ),
        "memory_tb_per_s": bandwidth * 1.05,
    }


def to_toml(name: str, base: str, figures: Figures, *, note: str) -> str:
    """Return the text of a profile file."""
    lines = [f"name = {json.dumps(name)}", f"base = {json.dumps(base)}", ""]
    lines += [f"{key} = {_value(value)}" for key, value in figures.items()]
    lines += ["", "[sources]", *(f"{key} = {json.dumps(note)}" for key in figures)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a figure in TOML's syntax."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.5g}" if isinstance(value, float) and value < 1e5 else f"{value}"


def table(base: Profile, measured: Profile, figures: Figures) -> str:
    """Return a table of the measured figures and the base profile's."""
    rows = [("figure", "measured", base.name)]
    for key in figures:
        one, other = getattr(measured, key), getattr(base, key)
        if key in ("attention_forward_tflops", "attention_backward_tflops"):
            one = one[measured.attention_kernel]
        if isinstance(one, dict):
            rows += [
                (f"{key} {k}", _cell(one[k]), _cell(other[k]) if k in other else "-")
                for k in one
            ]
        elif isinstance(one, tuple):
            rows += [(f"{key} at {size:,.0f}", f"{value:.4g}", "") for size, value in one]
        else:
            rows.append((key, _cell(one), _cell(other)))
    return "\n".join(columns(rows, left=(0,)))


def _cell(value: float | tuple[tuple[float, float], ...]) -> str:
    """Return a figure, or the points of a curve."""
    if isinstance(value, tuple):
        return " ".join(f"{y:.4g}@{x:.3g}" for x, y in value)
    return f"{value:.4g}"
