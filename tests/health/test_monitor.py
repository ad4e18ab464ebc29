"""titan/health/watchdog.py: what status.json says of a step that hangs; tests/health/test_survival.py lets real ones hang."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from titan.health.stacks import Whereabouts
from titan.health.watchdog import Watchdog

WAITS, WORKS = (
    Whereabouts("all_reduce (a.py:3, in f)", waits=True),
    Whereabouts("read (b.py:4, in g)", waits=False),
)
ALONE = """
import sys, time
from pathlib import Path
from titan.health import watchdog
watchdog.SHARE_S = 0.1
watchdog = watchdog.Watchdog(0.5, run_dir=Path(sys.argv[1]), rank=0, world_size=1)
def busy(seconds):
    time.sleep(seconds)
watchdog.begin(1)
busy(0.1)
watchdog.end()
busy(1)  # between two steps there is no limit
watchdog.begin(2)
busy(60)
"""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            [WAITS, WORKS],
            "rank 1 is in read (b.py:4, in g); rank 0 waits in all_reduce (a.py:3, in f)",
        ),
        (
            [WAITS, None, WAITS],
            "rank 1 says nothing (stopped, or its interpreter is locked); ranks 0, 2 wait in all_reduce (a.py:3, in f)",
        ),
        (
            [WAITS, WAITS],
            "every rank waits for another; ranks 0, 1 wait in all_reduce (a.py:3, in f)",
        ),
    ],
)
def test_the_rank_to_look_at(found: list[Whereabouts | None], said: str, tmp_path: Path) -> None:
    watchdog = Watchdog(0, run_dir=tmp_path, rank=0, world_size=len(found))
    (tmp_path / "logs").mkdir()
    for rank, at in enumerate(found):
        if at is not None:
            (tmp_path / "logs" / f".hung-{rank}.json").write_text(json.dumps(asdict(at)))
    assert f"; {said}. Stacks of all threads: {tmp_path}/logs/" in watchdog._reason()


def test_a_step_over_its_time_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    process = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, timeout=30
    )
    assert process.returncode == 1
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("hung", 1, 2)
    assert status["reason"].startswith(
        "step 2 hangs: it has taken longer than 0.5 s; rank 0 is in busy. Stacks"
    )
    assert status["reason"] in process.stderr
    stacks = (tmp_path / "logs" / "rank-0.stacks.txt").read_text()
    assert "step 2 takes longer" in stacks and "in busy" in stacks


def test_nothing_is_left_of_a_run_that_ends_well(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    watchdog = Watchdog(50, run_dir=tmp_path, rank=0, world_size=1)
    watchdog.begin(1)
    watchdog.end()
    watchdog.close()
    assert not list((tmp_path / "logs").iterdir())
