"""Replica groups on machines of their own: two network namespaces with a group each, which is killed and comes back."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import why_not
from tests.support.jobs import ROOT
from titan.contrib.elastic.tests.test_elastic import needs_torchft

sys.path.append(str(ROOT / "scripts"))
import hosts_drill as drill

pytestmark = [needs_torchft, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture
def groups(tmp_path: Path) -> Any:
    made = drill.Groups(tmp_path, *drill.ENDLESS)
    yield made
    made.close()


@pytest.mark.parametrize("is_cut", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_silent_host_costs_the_seconds_that_the_lighthouse_needs(
    groups: Any, is_cut: bool
) -> None:
    """It does not cost the minute that a sum may take, and its group comes back without a restart."""
    groups.start_both()
    event = drill.silence(groups, 1, is_cut=is_cut)
    assert max(event["next_s"], event["both_s"]) < 30
    # Every step is that of one process, so whoever came back has the weights of the other.
    assert groups.replayed()["difference"] < drill.BOUND


@pytest.mark.slow
def test_of_groups_that_reach_only_the_lighthouse_the_lowest_goes_on(tmp_path: Path) -> None:
    limit = "--fault_tolerance.process_group_timeout_ms=5000"
    groups = drill.Groups(tmp_path, *drill.ENDLESS, limit)
    try:
        groups.start_both()
        drill.split(groups)
    finally:
        groups.close()


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_group_on_a_machine_of_its_own_comes_back(groups: Any, count: int) -> None:
    groups.start_both()
    assert len([*drill.kills(groups, count, random.Random(count))]) == count
    assert groups.replayed()["difference"] < drill.BOUND
