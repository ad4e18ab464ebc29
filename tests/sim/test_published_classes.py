"""Kernels by class against a published profile: 16B on 32 GPUs, EP 32, forced balance (torchtitan issue 3434, June 2026)."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.support.jobs import ROOT
from titan.config.layout import Layout
from titan.config.load import load_config
from titan.config.schema import JobConfig
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Launch
from titan.sim.simulate import Simulation, simulate

FORCED = ROOT / "train_configs/published/N3434.toml"


def exchange_at_once(config: JobConfig, layout: Layout) -> None:
    """Compute nothing while rows travel, as in the published variant "no-overlap"."""
    from titan.parallel import expert
    from titan.parallel.collectives import AsyncAllToAll

    class AtOnce(AsyncAllToAll):
        def __init__(self, x: Any, **options: Any) -> None:
            super().__init__(x, **options)
            self._rows = [super().wait()]

        def wait(self) -> Any:
            return self._rows.pop()

    expert.AsyncAllToAll = AtOnce


def classes(simulation: Simulation) -> tuple[Counter[str], dict[str, float]]:
    """Return counts and milliseconds of rank 0's kernels by class, without what it waits for."""
    [rank] = simulation.timeline.ranks.values()
    counts, ms = Counter[str](), defaultdict[str, float](float)
    for _, start, end, event in rank.intervals:
        if isinstance(event, Launch):
            name = "grouped" if event.kernel.name == "aten::_grouped_mm" else event.kernel.kind
        elif event.kind == "all_to_all" and event.size_bytes < 1e6:
            name = "counts of rows"
        else:
            name = event.kind
        counts[name] += 1
        ms[name] += (end - start) * 1e3
    return counts, ms


def test_work_is_that_of_the_published_profile() -> None:
    simulation = simulate(
        load_config(FORCED),
        world_size=32,
        profile=load_profile("h100-sxm"),
        prepare=exchange_at_once,
    )
    counts, ms = classes(simulation)
    # Published: 130 exchanges in 773.9 ms, 2 x 286 grouped products in 285.9 ms.
    assert counts["all_to_all"] + counts["counts of rows"] == 130
    assert counts["grouped"] == 286
    assert ms["all_to_all"] == pytest.approx(773.9, rel=0.12)
    assert ms["grouped"] == pytest.approx(285.9, rel=0.12)
    assert simulation.fullest.peak_reserved_bytes / 2**30 == pytest.approx(54.01, rel=0.05)
