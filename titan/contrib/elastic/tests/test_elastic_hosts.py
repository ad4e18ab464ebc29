"""Replica groups on machines of their own: two network namespaces with a group each, which is killed and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.drills import hosts as drill
from tests.support.hosts import why_not
from titan.contrib.elastic.tests.test_elastic import needs_torchft

pytestmark = [needs_torchft, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture
def groups(tmp_path: Path) -> Any:
    made = drill.Groups(tmp_path, *drill.ENDLESS)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["cut", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_silent_host_costs_the_seconds_that_the_lighthouse_needs(
    groups: Any, how: str
) -> None:
    """It does not cost the minute that a sum may take, and its group comes back without a restart."""
    groups.start_both()
    [event] = drill.silence(groups, 1, how)
    assert max(event["next_s"], event["both_s"]) < 30
    # Every step is that of one process, so whoever came back has the weights of the other.
    assert groups.replayed()["difference"] < drill.BOUND


@pytest.mark.slow
def test_of_groups_that_reach_only_the_lighthouse_the_lowest_goes_on(tmp_path: Path) -> None:
    limit = "--fault_tolerance.process_group_timeout_ms=5000"
    groups = drill.Groups(tmp_path, *drill.ENDLESS, limit)
    try:
        groups.start_both()
        next(drill.split(groups, 1, "link"))
    finally:
        groups.close()


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_group_on_a_machine_of_its_own_comes_back(groups: Any, count: int) -> None:
    groups.start_both()
    for number in range(count // 2):
        assert len([*drill.kill(groups, number % 2, 2)]) == 2
    assert groups.replayed()["difference"] < drill.BOUND
