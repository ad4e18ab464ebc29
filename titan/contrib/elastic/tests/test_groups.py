"""Replica groups over a slow link, against hand formulas: what they send, how long steps wait, and the same job as HSDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.traces import job
from titan.contrib.elastic.cost import group_facts
from titan.sim.price.profiles import load_profile
from titan.sim.report.text import page
from titan.sim.simulate import Facts, Simulation, facts, simulate

H100 = load_profile("h100-sxm")
SIZES = {"dim": 2048, "ffn_dim": 8192, "vocab_size": 32_000, "n_layers": 4}
PER_GB_S = 8 / 0.9  # at 1 Gbit/s, of which the profile reaches nic_share
HELD_GB = job(model={"overrides": SIZES}).model.sizes.num_params * 4 / 2 / 1e9


@pytest.fixture(scope="module")
def group() -> Simulation:
    return simulate(job(model={"overrides": SIZES}), world_size=2, profile=H100)


def cost(
    group: Simulation, *, link: float | None = 1, latency_us: float = 0, **section: Any
) -> Facts:
    settings = {"replica_groups": 2, "enable": True} | section
    simulator = {"group_link_gbit_per_s": link, "group_link_latency_us": latency_us}
    config = job(model={"overrides": SIZES}, fault_tolerance=settings, simulator=simulator)
    return group_facts(replace(group, config=config), profile=H100)["groups"]


def test_a_step_waits_for_what_it_sends(group: Simulation) -> None:
    for count, share in ((2, 1), (3, 4 / 3)):
        found = cost(group, replica_groups=count)
        assert found["sent_bytes"] == pytest.approx(share * HELD_GB * 1e9)
        assert found["exposed_s"] == pytest.approx(share * HELD_GB * PER_GB_S, rel=1e-3)
        step_s = group.timeline.step_s + found["exposed_s"]
        assert found["tokens_per_s"] == pytest.approx(count * group.tokens_per_step / step_s)


def test_each_sum_goes_there_and_back(group: Simulation) -> None:
    near, far = (cost(group, latency_us=us)["exposed_s"] for us in (0, 50_000))
    # A bucket ends above 2**24 elements: the embedding, three of each two blocks, the output. And two numbers.
    assert far - near == pytest.approx((8 + 2) * 0.1, rel=1e-3)


def test_hsdp_sends_the_same_over_the_same_link(group: Simulation) -> None:
    slow, fast = cost(group, link=0.01), cost(group, link=None)
    assert slow["hsdp"]["step_time_s"] == pytest.approx(HELD_GB * PER_GB_S * 100, rel=1e-2)
    assert fast["hsdp"]["step_time_s"] < fast["step_time_s"]
    speed = 2 * group.tokens_per_step / fast["hsdp"]["step_time_s"]
    assert fast["hsdp"]["tokens_per_s"] == pytest.approx(speed)
    # A pipeline's replicas are no runs of ranks.
    assert cost(replace(group, layout=replace(group.layout, pp=2)))["hsdp"] is None


def test_the_page_says_it(group: Simulation) -> None:
    found = cost(group, link=10, latency_us=5)
    text = page(facts(group) | {"groups": found})
    assert "2 of these, joined by 10 Gbit/s a rank and 5 us\n" in text
    assert text.count(f"{found['tokens_per_s']:,.0f} tokens/s in all") == 1
    assert "of these" not in page(facts(group)) and group_facts(group) == {}
