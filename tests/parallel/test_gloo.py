"""gloo groups: one thread each, because torch's two free the same string twice (docs/torch.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RACE = Path(__file__).with_name("gloo_race.py")


def run_race(*arguments: str) -> int:
    return subprocess.run([sys.executable, RACE, *arguments], capture_output=True).returncode


def test_a_group_made_after_limit_gloo_has_one_thread_and_survives_a_hundred_thousand_gathers():
    assert run_race("--limited", "--gathers=100000") == 0


@pytest.mark.slow
def test_torch_still_frees_a_string_twice_in_groups_of_two_threads():
    """When this fails, torch is fixed: drop shims.limit_gloo for that version on."""
    assert any(run_race("--gathers=160000") < 0 for _ in range(10))
