"""Write the tables of measured kernels that titan ships, titan/sim/hardware/measured/CARD.json, from aiconfigurator-core (NVIDIA, Apache-2.0).

    pip install "aiconfigurator-core==0.12.0"
    python scripts/measured_tables.py [CARD ...] [--folder FOLDER]

The files have fewer rows of products than the package, as letters: at most 300 kB in all.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from math import log, log2
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from titan.base.hardware import by_name
from titan.sim.price.measured import (
    ALIGNED,
    LETTERS,
    POWER_LAW,
    SPAN_S,
    STEP,
    ZERO,
)

PACKAGE = "aiconfigurator-core"
LEFT_OUT = 51200
"""Columns or length of a sum that the shipped files do not have."""
FOLDER = Path(__file__).parents[1] / "titan" / "sim" / "hardware" / "measured"
LARGE_FLOPS = 1e12
"""FLOPs from which a product counts as large: its share of the peak is a card's level."""


class CardSource(NamedTuple):
    """Where a card's tables are in the package, and which of several measurements is taken.

    Attributes:
        folder: folder of the card.
        device: row of titan/base/hardware.toml, whose peaks the roofline has.
        vllm: version of vLLM, whose products in 16 bits (torch's linear layer) and attention were measured.
        trtllm: version of TensorRT-LLM, whose products in 16 and in 8 bits (cuBLAS, as torch's) and experts were measured.
        nccl: version of NCCL.
        attention_kernel: kernel that vLLM ran, as `Profile.attention_kernel` calls it.
    """

    folder: str
    device: str
    vllm: str = "0.24.0"
    trtllm: str = "1.3.0rc20"
    nccl: str = "2.29.2"
    attention_kernel: str = "cudnn"


SOURCES = {
    "a100": CardSource("a100_sxm", "a100-80g", "0.14.0", "1.0.0", "2.27.3", "flash2"),
    "h100": CardSource("h100_sxm", "h100-sxm", attention_kernel="flash3"),
    "h200": CardSource("h200_sxm", "h200-sxm", attention_kernel="flash3"),
    "b200": CardSource("b200_sxm", "b200"),
    "b300": CardSource("b300_sxm", "b300"),
    "gb200": CardSource("gb200", "gb200"),
    "gb300": CardSource("gb300", "gb300"),
}
_NARROW = 32
"""Fewest columns of a measured product."""


def read(card: str) -> dict[str, Any]:
    """Return a card's tables from the installed package, with all rows of products.

    Args:
        card: key of `SOURCES`.

    Raises:
        PackageNotFoundError: The package is not installed.
    """
    found = find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise PackageNotFoundError(PACKAGE)
    source = SOURCES[card]
    folder = Path(found.origin).parent / "systems" / "data" / source.folder
    shares: dict[str, float] = {}
    products = {
        dtype: [_letters(points, aligned=aligned) for aligned in (True, False)]
        for dtype, points in _products(folder, source, shares).items()
    }
    parts = f"vLLM {source.vllm}, TensorRT-LLM {source.trtllm}, NCCL {source.nccl}"
    return {
        "source": f"{PACKAGE} {version(PACKAGE)}, {source.folder}: {parts}",
        "licence": "Apache-2.0; measured by NVIDIA",
        "attention_kernel": source.attention_kernel,
        "large_share": shares,
        "collectives": _collectives(folder / "comm" / "nccl" / source.nccl),
        "attention": _attention(folder / "attention" / "vllm" / source.vllm),
        "recurrence": _recurrence(folder, source),
        "products": products,
        "uneven": _uneven(folder / "moe" / "trtllm" / source.trtllm),
    }


def thinned(dtype: str, part: dict[str, Any], *, is_odd: bool = False) -> dict[str, Any]:
    """Return products without the rows that their neighbours tell: 8 bits need aligned ones, and fewer of them."""

    def is_kept(m: int) -> bool:
        if dtype == "float8":
            return not is_odd and (m % 256 == 0 or m in (1, 16, 64, 128))
        return m >= 32 or m in (1, 4, 9, 16, 17)

    points = product(*part["axes"])
    letters = {
        point: letter
        for point, letter in zip(points, part["values"], strict=True)
        if point and is_kept(point[0]) and LEFT_OUT not in point[1:]
    }
    axes = [sorted({*sizes}) for sizes in zip(*letters, strict=True)]
    return {"axes": axes, "values": "".join(letters.values())}


def _rows(file: Path, *columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield some columns of a table, row by row. Older tables of attention lack a window, which is None then."""
    from pyarrow import parquet

    table = parquet.read_table(file)
    if "window_size" not in table.column_names:
        table = table.append_column("window_size", [[None] * len(table)])
    yield from zip(*(table[name].to_pylist() for name in columns), strict=True)


def _table(points: Mapping[Any, float]) -> dict[str, Any]:
    """Return measured points as a table (measured.Grid), by their sizes."""
    axes = [sorted({*sizes}) for sizes in zip(*points, strict=True)]
    return {"axes": axes, "values": [points.get(point, 0.0) for point in product(*axes)]}


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def roofline_s(
    dtype: str, rows: int, columns: int, summed: int, *, flops_per_s: float, bytes_per_s: float
) -> float:
    """Return the seconds of a product that reaches these rates."""
    width = 1 if dtype == "float8" else 2
    moved = width * summed * (rows + columns) + 2 * rows * columns
    return max(2 * rows * columns * summed / flops_per_s, moved / bytes_per_s) + SPAN_S


def _products(
    folder: Path, source: CardSource, shares: dict[str, float]
) -> dict[str, dict[tuple[int, int, int], float]]:
    """Return the logarithm of each product's time over its roofline's, by dtype, and put the large ones' share of the peak into `shares`."""
    device = by_name(source.device)
    found: dict[str, dict[tuple[int, int, int], float]] = defaultdict(dict)
    large: dict[str, list[float]] = defaultdict(list)
    beside = folder / "gemm" / "trtllm" / source.trtllm
    rows = [("bfloat16", row) for row in _mean(folder / "gemm" / "vllm" / source.vllm, beside)]
    if "float8" in device.peak_flops:
        rows += [("float8", row) for row in _without_casts(beside)]
    for dtype, (m, n, k, ms) in rows:
        peak = device.peak_flops[dtype]
        base = roofline_s(dtype, m, n, k, flops_per_s=peak, bytes_per_s=device.memory_bandwidth)
        found[dtype][m, n, k] = log(ms * 1e-3 / base)
        if 2 * m * n * k >= LARGE_FLOPS and m % ALIGNED == 0:
            large[dtype].append(2 * m * n * k / (ms * 1e-3) / peak)
    shares |= {dtype: round(median(values), 4) for dtype, values in large.items()}
    return found


def _gemm(folder: Path, kind: str) -> Iterator[tuple[int, int, int, float]]:
    """Yield rows, columns, length of the sums and milliseconds of products in a dtype, as the package calls it."""
    columns = ("gemm_dtype", "m", "n", "k", "latency")
    for dtype, m, n, k, ms in _rows(folder / "gemm_perf.parquet", *columns):
        if dtype == kind and ms > 0:
            yield m, n, k, ms


def _mean(*folders: Path) -> Iterator[tuple[int, int, int, float]]:
    """Yield products in 16 bits, each with the geometric mean of its measured times.

    Both run cuBLAS, at different times and clocks: of single shapes, one in twenty differs by a tenth or more.
    """
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for folder in folders:
        for m, n, k, ms in _gemm(folder, "bfloat16"):
            found[m, n, k].append(ms)
    for (m, n, k), times in found.items():
        yield m, n, k, geometric_mean(times)


def _without_casts(folder: Path) -> Iterator[tuple[int, int, int, float]]:
    """Yield products in 8 bits, less the cast of their inputs that was measured with them.

    The cast is what the narrowest product of the same input takes longer in 8 bits than in 16.
    """
    long = {(m, k): ms for m, n, k, ms in _gemm(folder, "bfloat16") if n == _NARROW}
    short = [*_gemm(folder, "fp8")]
    casts = {
        (m, k): max(0.0, ms - long.get((m, k), ms)) for m, n, k, ms in short if n == _NARROW
    }
    for m, n, k, ms in short:
        if n > _NARROW:
            yield m, n, k, max(ms - casts.get((m, k), 0.0), ms / 2)


def _letters(points: dict[tuple[int, int, int], float], *, aligned: bool) -> dict[str, Any]:
    """Return the products of a dtype whose rows are aligned, or all others, as a table of letters."""
    own = {
        p: v for p, v in points.items() if (p[0] % ALIGNED == 0 or p[0] < ALIGNED) == aligned
    }
    axes = _table(own)["axes"]
    return {"axes": axes, "values": "".join(_letter(own.get(p)) for p in product(*axes))}


def _letter(value: float | None) -> str:
    """Return the letter of a ratio's logarithm; a space if there is none."""
    if value is None:
        return " "
    return LETTERS[min(max(round(value / STEP) + ZERO, 0), len(LETTERS) - 1)]


def _collectives(folder: Path) -> dict[str, Any]:
    """Return the microseconds of collectives, by kind, number of ranks and bytes."""
    found: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
    columns = ("nccl_dtype", "op_name", "num_gpus", "message_size", "latency")
    for dtype, op, ranks, elements, ms in _rows(folder / "nccl_perf.parquet", *columns):
        if dtype == "half":
            kind = "all_to_all" if op == "alltoall" else op
            found[kind][ranks, 2 * elements] = _rounded(ms * 1e3, 4)
    return {kind: _table(points) for kind, points in sorted(found.items())}


def _attention(folder: Path) -> dict[str, Any]:
    """Return the rates of causal attention by head dimension, heads and length.

    Only groups of four heads count, as most models have, and sequences of at least 16 heads where there are as many: what vLLM
    writes into its cache, and does for each sequence, is little then.
    """
    columns = (
        "attn_dtype",
        "kv_cache_dtype",
        "window_size",
        "head_dim",
        "batch_size",
        "isl",
        "num_heads",
        "num_key_value_heads",
        "latency",
    )
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    rows = _rows(folder / "context_attention_perf.parquet", *columns)
    for dtype, kv_dtype, window, dim, batch, length, heads, groups, ms in rows:
        if dtype != "bfloat16" or kv_dtype == "fp8" or window not in (None, 0, -1) or ms <= 0:
            continue
        if heads != 4 * groups or heads < min(16, batch * heads) or length < 128:
            continue
        if dim in (64, 128, 256) and (batch * heads).bit_count() == 1:  # a power of two
            flops = 4 * batch * heads * dim * length * (length + 1) / 2
            found[dim, batch * heads, length].append(flops / (ms * 1e-3) / 1e12)
    return _table({point: _rounded(median(rates), 3) for point, rates in found.items()})


def _recurrence(folder: Path, source: CardSource) -> dict[str, Any]:
    """Return the microseconds of linear attention's forward pass, by kind, heads in the batch and length.

    They are those of flash-linear-attention's kernels, which TensorRT-LLM and SGLang run. Of Mamba 2, only the convolution was measured.
    """
    files = {
        "gdn": [folder / "linear_attention" / "trtllm" / source.trtllm / "gdn_perf.parquet"],
        "kda": sorted(folder.glob("kda/sglang/*/kda_perf.parquet"))[-1:],
    }
    columns = ("kernel_source", "batch_size", "seq_len", "num_v_heads", "head_v_dim", "latency")
    tables = {}
    for kind, file in ((kind, file) for kind, of_kind in files.items() for file in of_kind):
        if not file.exists():
            continue
        found: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for kernel, batch, length, heads, size, ms in _rows(file, *columns):
            if kernel.startswith("chunk_") and size == 128 and length >= 128 and ms > 0:
                found[batch * heads, length].append(ms * 1e3)
        # Only numbers of heads that were measured at all lengths: long sequences had small batches.
        num_lengths = Counter(heads for heads, _ in found)
        most = max(num_lengths.values())
        tables[kind] = _table(
            {p: _rounded(median(us), 4) for p, us in found.items() if num_lengths[p[0]] == most}
        )
    return tables


def _uneven(folder: Path) -> list[tuple[int, float]]:
    """Return how fast experts run on a power law's routes, over even ones, by the mean rows of an expert.

    The law's exponent is `POWER_LAW`. All experts are on one card, so that every route has the same rows in all.
    """
    columns = (
        "moe_dtype",
        "kernel_source",
        "moe_ep_size",
        "moe_tp_size",
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "distribution",
        "latency",
    )
    laws: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
    for dtype, kernel, ep, tp, *sizes, law, ms in _rows(folder / "moe_perf.parquet", *columns):
        if (dtype, kernel, ep, tp) == ("bfloat16", "moe_torch_flow_cutlass", 1, 1):
            laws[law][tuple(sizes)] = ms
    shares: dict[int, list[float]] = defaultdict(list)
    for sizes, ms in laws["balanced"].items():
        tokens, _, _, top_k, experts = sizes
        rows = tokens * top_k / experts
        if rows >= 32 and sizes in laws[f"power_law_{POWER_LAW}"]:
            shares[2 ** round(log2(rows))].append(ms / laws[f"power_law_{POWER_LAW}"][sizes])
    return [(rows, round(min(1.0, median(found)), 2)) for rows, found in sorted(shares.items())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the tables of measured kernels that titan ships."
    )
    parser.add_argument("cards", nargs="*", metavar="CARD", help="cards; all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args()
    for card in options.cards or SOURCES:
        file = options.folder / f"{card}.json"
        raw = read(card)
        for dtype, (aligned, odd) in raw["products"].items():
            raw["products"][dtype] = [thinned(dtype, aligned), thinned(dtype, odd, is_odd=True)]
        text = json.dumps(raw, indent=None, separators=(",", ":"))
        file.write_text(text + "\n", "utf-8")
        print(f"{file.name}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
