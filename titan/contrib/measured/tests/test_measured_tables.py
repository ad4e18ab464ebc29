"""Tables of measured kernels: what titan ships against the rows of the package that it is condensed from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

import titan.sim
from titan.contrib.measured import package as library
from titan.sim.price.cost import Cost
from titan.sim.price.measured import Tables
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import Kernel

aiconfigurator_core = pytest.importorskip(
    "aiconfigurator_core", reason="Python 3.11 to 3.13 alone have the package"
)
FOLDER = Path(titan.sim.__file__).parent / "hardware" / "measured"
CARDS = {"a100": "a100-80g", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200", "gb300": "gb300"}  # fmt: skip


def shipped(card: str) -> Tables:
    return Tables(json.loads((FOLDER / f"{card}.json").read_text("utf-8")))


def rows(card: str, *path: str) -> list[dict[str, Any]]:
    """Return the package's own rows, read here."""
    from pyarrow import parquet

    root = Path(aiconfigurator_core.__file__).parent
    folder = root / "systems" / "data" / library.SOURCES[card].folder
    return parquet.read_table(folder.joinpath(*path)).to_pylist()


def sized(card: str) -> Cost:
    """Return the prices of a card by the shipped tables."""
    cost = Cost(load_profile(CARDS[card]))
    cost.tables = shipped(card)
    return cost


def test_all_of_them_are_small() -> None:
    files = list(FOLDER.glob("*.json"))
    assert {file.stem for file in files} == set(library.SOURCES)
    assert sum(file.stat().st_size for file in files) <= 300_000
    for file in files:
        raw = json.loads(file.read_text("utf-8"))
        assert "aiconfigurator-core 0.12" in raw["source"] and "Apache-2.0" in raw["licence"]


@pytest.mark.parametrize("card", CARDS)
def test_collectives(card: str) -> None:
    """Above 1 MiB, within 8% of what was measured, at sizes between those of the table, too."""
    source, tables = library.SOURCES[card], shipped(card)
    for row in rows(card, "comm", "nccl", source.nccl, "nccl_perf.parquet"):
        size = 2 * row["message_size"]
        if row["nccl_dtype"] == "half" and size >= 2**20:
            kind = "all_to_all" if row["op_name"] == "alltoall" else row["op_name"]
            found = tables.collective_s(kind, row["num_gpus"], size)
            assert found is not None
            assert sum(found) == pytest.approx(row["latency"] * 1e-3, rel=0.08)


@pytest.mark.parametrize("library_of", ["vllm", "trtllm"])
@pytest.mark.parametrize("card", CARDS)
def test_products(card: str, library_of: str) -> None:
    """Half of 1,000 products are within 3% of either measurement, and 95% are within 15%."""
    source, cost = library.SOURCES[card], sized(card)
    every = rows(card, "gemm", library_of, getattr(source, library_of), "gemm_perf.parquet")
    every = [row for row in every if row["gemm_dtype"] == "bfloat16"]
    ratios = []
    for row in random.Random(0).sample(every, 1000):
        m, n, k = row["m"], row["n"], row["k"]
        moved = 2 * (m * k + k * n), 2 * m * n
        kernel = Kernel(
            "aten::mm", "matmul", ((m, k), (k, n)), "bfloat16", 2 * m * n * k, *moved
        )
        burst = _at_level(cost, cost.tables.large_share if cost.tables else {})
        ratios.append(burst.kernel_s(kernel) / (row["latency"] * 1e-3))
    level = median(ratios)
    off = [abs(ratio / level - 1) for ratio in ratios]
    assert level == pytest.approx(1.0, rel=0.03)
    assert median(off) < 0.03
    assert quantiles(off, n=20)[-1] < 0.15


def _at_level(cost: Cost, share: dict[str, float]) -> Cost:
    profile: Profile = cost.profile.model_copy(update={"matmul_share": cost.profile.matmul_share | share})  # fmt: skip
    other = Cost(profile)
    other.tables = cost.tables
    return other


@pytest.mark.parametrize("card", ["a100", "h100", "h200", "b200"])
def test_causal_attention_by_length(card: str) -> None:
    """32 heads that share 8 keys: the median of batches within 10%, from 1,024 tokens on."""
    source, cost = library.SOURCES[card], sized(card)
    cost = Cost(cost.profile.with_attention(source.attention_kernel))
    by_length: dict[int, list[float]] = {}
    for row in rows(card, "attention", "vllm", source.vllm, "context_attention_perf.parquet"):
        batch, length = row["batch_size"], row["isl"]
        is_plain = row["attn_dtype"] == "bfloat16" and row["kv_cache_dtype"] != "fp8"
        sizes = (row["head_dim"], row["num_heads"], row["num_key_value_heads"])
        if not is_plain or row.get("window_size") not in (None, 0, -1) or sizes != (128, 32, 8):
            continue
        if length in (1024, 2048, 4096, 8192, 16384) and batch in (1, 2, 4, 8):
            shapes = (
                (batch, 32, length, 128),
                (batch, 8, length, 128),
                (batch, 8, length, 128),
            )
            kernel = Kernel("aten::attention", "attention", shapes, "bfloat16", causal=True)
            ratio = cost.kernel_s(kernel) / (row["latency"] * 1e-3)
            by_length.setdefault(length, []).append(ratio)
    assert len(by_length) == 5
    most, more = (shipped(card).attention_tflops(128, heads, 8192) for heads in (512, 2048))
    assert most == more  # which was not measured
    for length, ratios in by_length.items():
        assert median(ratios) == pytest.approx(1.0, rel=0.1), length


def test_uneven_routes_slow_grouped_products() -> None:
    """81% of the rate with 512 rows an expert under a power law on H100, nearly all of it with many rows or mild routes."""
    tables = shipped("h100")
    assert (
        tables.uneven_share(512, 1.01) == tables.uneven_share(512, 1.2) == pytest.approx(0.81)
    )
    assert tables.uneven_share(512, 0.0) == 1.0 and tables.uneven_share(512, 0.18) > 0.96
    assert tables.uneven_share(4096, 1.01) > 0.9
    shapes, flops = ((64, 512, 4096), (64, 4096, 2048)), 2 * 64 * 512 * 4096 * 2048
    kernel = Kernel("aten::_grouped_mm", "matmul", shapes, "bfloat16", flops, 10**8, 10**8)
    even, uneven = (Cost(load_profile("h100-sxm"), unevenness=s).kernel_s(kernel) for s in (0, 1.01))  # fmt: skip
    assert uneven / even == pytest.approx(1 / 0.81, rel=0.03)


def test_the_package_is_read_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its rows of products, kept in the cache; the same figures as the shipped ones where both have a shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    raw = library.library_tables("a100")
    assert raw is not None and library.library_tables("a100") == raw
    [kept] = (tmp_path / "titan" / "measured").iterdir()
    assert kept.name.startswith("a100-0.12.0-")
    whole, small = Tables(raw), shipped("a100")
    assert len(raw["products"]["bfloat16"][0]["axes"][0]) > 17
    for shape in ((4096, 4096, 4096), (8192, 7168, 16384)):
        assert whole.product_ratio("bfloat16", *shape) == small.product_ratio(
            "bfloat16", *shape
        )


def test_another_version_of_the_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without the expected files leaves titan's own tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(library.SOURCES, "a100", library.SOURCES["a100"]._replace(nccl="9.9"))
    with pytest.warns(UserWarning, match="has no tables of a100 as titan reads them"):
        assert library.library_tables("a100") is None


@pytest.mark.parametrize(("card", "kind"), [("h100", "gdn"), ("b200", "gdn"), ("h100", "kda")])
def test_linear_attention(card: str, kind: str) -> None:
    """Within 6% of the times that TensorRT-LLM and SGLang measured; without a table, by bytes, within 45% for many heads and tokens."""
    runner, version = ("trtllm", "1.3.0rc20") if kind == "gdn" else ("sglang", "0.5.16")
    folder = "linear_attention" if kind == "gdn" else "kda"
    cost, by_bytes = sized(card), Cost(load_profile(CARDS[card]))
    by_bytes.tables = None
    measured = 0
    for row in rows(card, folder, runner, version, f"{kind}_perf.parquet"):
        heads, tokens = row["num_v_heads"], row["seq_len"]
        if (
            not row["kernel_source"].startswith("chunk")
            or row["batch_size"] > 1
            or tokens < 2048
        ):
            continue
        shapes = [(1, tokens, row["num_k_heads"], 128), (1, tokens, heads, 128)]
        gates = (1, tokens, heads, 128) if kind == "kda" else (1, tokens, heads)
        kernel = Kernel("titan::linear_attention", "recurrence", (*shapes, gates, gates[:3]))
        if (
            heads >= 32 and card == "h100"
        ):  # B200 has a table, and its kernels do not follow its bandwidth
            assert by_bytes.kernel_s(kernel) == pytest.approx(row["latency"] * 1e-3, rel=0.45)
        assert cost.kernel_s(kernel) == pytest.approx(row["latency"] * 1e-3, rel=0.06, abs=2e-5)
        measured += 1
    assert measured > 10
