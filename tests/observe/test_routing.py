"""The busiest rank of an exchange against sums by hand, against counting tokens one by one, and against what was published."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.observe.test_estimate import job, layout
from titan.config.errors import ConfigError
from titan.models.qwen3.config import FLAVORS as QWEN3
from titan.sim.routing import busiest_rank, zipf
from titan.sim.section import SimulatorSection


def busiest(
    num_experts: int, ep: int, *, forced: bool = False, seq_len: int = 4096, **simulator: Any
) -> float:
    base = job(mode="none", mixed_precision_param="bfloat16")
    updates = {
        "parallelism": base.parallelism.model_copy(update={"expert_parallel_degree": ep}),
        "debug": base.debug.model_copy(update={"moe_force_load_balance": forced}),
        "training": base.training.model_copy(
            update={"seq_len": seq_len, "local_batch_size": 1}
        ),
        "simulator": SimulatorSection(**simulator),
    }
    model = replace(QWEN3["30B-A3B"], num_experts=num_experts, top_k=2)
    return busiest_rank(base.model_copy(update=updates), model, layout(dp_shard=ep))


def test_one_expert_a_rank_gets_its_own_share() -> None:
    assert busiest(64, 64, routing="zipf:0.3") == pytest.approx(64 * zipf(0.3, 64)[0], rel=0.02)


def test_chance_puts_experts_on_ranks() -> None:
    """Four of eight experts on each of two ranks: the mean over all 70 ways to choose them."""
    shares = zipf(0.8, 8)
    sums = [sum(chosen) for chosen in itertools.combinations(shares, 4)]
    expected = 2 * mean(max(one, 1 - one) for one in sums)
    assert busiest(8, 2, routing="zipf:0.8") == pytest.approx(expected, rel=0.03)


def test_few_tokens_are_uneven_by_chance() -> None:
    """Even shares of 8 ranks x 64 tokens x 2 experts, counted row by row."""
    rng = random.Random(1)
    draws = [[rng.randrange(8) for _ in range(8 * 64 * 2)] for _ in range(300)]
    counted = mean(max(map(rows.count, range(8))) for rows in draws) / 128
    assert counted > 1.1
    assert busiest(8, 8, routing="zipf:0", seq_len=64) == pytest.approx(counted, rel=0.02)


def test_the_default_is_what_was_published() -> None:
    """A learned router of 256 experts on 64 ranks: 1.338 times the mean, mean over layers (marin issue 7668)."""
    assert busiest(256, 64) == pytest.approx(1.338, rel=0.02)


def test_counts_of_a_run(tmp_path: Path) -> None:
    """Experts stay where they are: ranks have (0, 1) and (2, 3), and get 60 and 80 of 100 rows in the two layers."""
    file = tmp_path / "experts.json"
    loads = [[40, 20, 30, 10], [10, 10, 40, 40]]
    file.write_text(json.dumps({"step": 5, "layers": [0, 1], "loads": loads}))
    assert busiest(4, 2, routing=str(file)) == pytest.approx(2 * (0.6 + 0.8) / 2, abs=0.01)
    with pytest.raises(ConfigError, match="counts 4 experts, the model has 8; name a run's"):
        busiest(8, 2, routing=str(file))
    with pytest.raises(ConfigError, match=r"simulator.routing.*no\.json: cannot be read"):
        busiest(8, 2, routing=str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    "layer", ["[3, -1]", "[1, NaN]", "[1, Infinity]", '[1, "1"]', "[0, 0]", "[1]", "[" * 9999]
)
def test_wrong_counts_are_refused(tmp_path: Path, layer: str) -> None:
    file = tmp_path / "experts.json"
    file.write_text(f'{{"loads": [[1, 1], {layer}]}}')
    with pytest.raises(ConfigError, match=r"name a run.s experts\.json"):
        busiest(2, 2, routing=str(file))


def test_more_ranks_than_experts_have_the_most() -> None:
    """A search asks before the check of the layout refuses it."""
    assert busiest(4, 8) == 2


def test_what_needs_no_distribution() -> None:
    assert busiest(64, 1) == busiest(64, 8, routing="even") == busiest(64, 8, forced=True) == 1
    # What is stated wins, up to all rows of each token.
    assert busiest(64, 8, expert_imbalance=1.7, forced=True) == 1.7
    assert busiest(4, 4, expert_imbalance=3) == busiest(4, 4, routing="zipf:9") == 2
    with pytest.raises(ValueError, match='expected "even", "zipf:s"'):
        SimulatorSection(routing="zipf")
