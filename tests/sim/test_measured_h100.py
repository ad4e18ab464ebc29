"""Steps that were measured on one H100 (measured_h100.toml), and the kernels of a traced one by class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import titan.sim
from titan.config.toml import read_toml
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Kernel

ROWS: list[dict[str, Any]] = read_toml(
    Path(__file__).with_suffix("").parent / "measured_h100.toml"
)[0]["row"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "sim_contestants.py"
TOKENS, DIM, FFN, KEYS, VOCAB = 16_384, 2048, 8192, 512, 128_256
LAYERS, CHUNKS = 16, 8


def product(m: int, k: int, n: int, *, result_bytes: int = 2, adds: bool = False) -> Kernel:
    written = result_bytes * m * n
    return Kernel(
        "aten::mm",
        "matmul",
        ((m, k), (k, n)),
        "bfloat16",
        2 * m * k * n,
        2 * (m * k + k * n) + adds * written,
        written,
    )


def linear(inputs: int, outputs: int) -> list[Kernel]:
    """Return the products of a linear layer: its result, and the gradients of its input and of its weight."""
    return [
        product(TOKENS, inputs, outputs),
        product(TOKENS, outputs, inputs),
        product(outputs, TOKENS, inputs),
    ]


def test_products_of_the_traced_step() -> None:
    """Llama 1B, 2 x 8,192 tokens, torch 2.11: 125.7 ms in the blocks, and 34.9 in the output layer, whose logits and sums are in fp32."""
    h100 = Cost(load_profile("h100-sxm"), alone=True)
    sizes = [
        (DIM, DIM),
        (DIM, KEYS),
        (DIM, KEYS),
        (DIM, DIM),
        (DIM, FFN),
        (DIM, FFN),
        (FFN, DIM),
    ]
    blocks_s = LAYERS * sum(h100.kernel_s(k) for pair in sizes for k in linear(*pair))
    chunk = TOKENS // CHUNKS
    output = [
        product(chunk, DIM, VOCAB, result_bytes=4),
        product(chunk, VOCAB, DIM),
        product(VOCAB, chunk, DIM, result_bytes=4, adds=True),
    ]
    output_s = CHUNKS * sum(map(h100.kernel_s, output))
    assert blocks_s == pytest.approx(125.7e-3, rel=0.02)
    assert output_s == pytest.approx(34.9e-3, rel=0.03)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row["by"] == "bare"],
    ids=lambda row: f"{row['by']}, {row['model']}, {row['variant']}",
)
def test_the_steps_of_others(row: dict[str, Any]) -> None:
    """bf16 within 3%. Of float8 no trace tells the rates: 1B is 7% too slow, 8B's blocks 2% too fast. Memory is within 1%."""
    settings = {key: row[key] for key in ("model", "batch", "variant")}
    simulation = titan.sim.simulate_step(
        f"{SCRIPT}:{row['by']}", world_size=1, profile="h100-sxm", **settings
    )
    bound = 0.075 if "float8" in row["variant"] else 0.03
    assert simulation.tokens_per_s_per_gpu == pytest.approx(row["tokens_per_s"], rel=bound)
    reserved_gib = simulation.fullest.peak_reserved_bytes / 2**30
    assert reserved_gib == pytest.approx(row["reserved_gib"], rel=0.01)
