"""The simulator takes every layout that crosses the techniques (scripts/crossings.py): it traces and replays each of them."""

from __future__ import annotations

import math

import pytest

from tests.parity.test_triples import LAYOUTS
from tests.support.crossings import drawn
from tests.support.layouts import job_of
from titan.checks.rules import check_to_run
from titan.sim.price.profiles import load_profile
from titan.sim.simulate import simulate


@pytest.mark.slow
@pytest.mark.parametrize("number", range(LAYOUTS))
def test_is_simulated(number: int) -> None:
    layout = drawn()[number]
    config = job_of(layout)
    check_to_run(config, world_size=layout.ranks)
    profile = load_profile("h100-sxm")
    found = simulate(
        config, world_size=layout.ranks, profile=profile, processes=1, use_cache=False
    )
    assert found.timeline.step_s > 0 and math.isfinite(found.timeline.step_s)
    assert found.fullest.needed_bytes > 0
