"""A rank that dies, or hangs, ends the job in time, and the others say in which collective they missed it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.support.runs import Run
from tests.support.tables import table

Start = Callable[..., Run]
INIT_TIMEOUT_S = (
    30  # of the first steps, and what torchrun gives a hanging rank to obey SIGTERM
)
# What sets the layout on two ranks, and where the other rank may be found waiting.
# "a collective": torch's recorder may have no entry that is under way.
LAYOUTS = table(__file__, "layouts")
QUICK = ("TP", 1), ("PP", 0)  # FSDP2 is in tests/health/test_survival.py, with a restart


def strike(start: Start, layout: str, *, victim: int, number: int, timeout_s: int) -> Run:
    """Signal a rank of a training run, and check what the other rank says."""
    settings, operations = LAYOUTS[layout]
    run = start(
        "--nproc=2",
        "--training.steps=1000000",
        "--checkpoint.enable=false",
        f"--comm.train_timeout_seconds={timeout_s}",
        f"--comm.init_timeout_seconds={INIT_TIMEOUT_S}",
        *(f"--parallelism.{setting}" for setting in settings),
    )
    run.wait_until_training(step=3)
    os.kill(run.rank(victim), number)
    assert run.end() == 1, run.said()
    assert not run.processes()
    status, survivor = run.status(), 1 - victim
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["step"] >= 3 and status["rank"] == survivor
    reason = status["reason"]
    line = r"\((titan|models)/[\w/]+\.py:\d+, in \w+\)"
    where = rf"rank {survivor} failed in step \d+ in ({operations})( of .*)? {line}: "
    assert re.match(where, reason) and "\n" not in reason, reason
    assert reason in run.said()
    assert reason in (run.folder / "logs" / f"rank-{survivor}.log").read_text()
    return run


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param(
            layout, victim, marks=[] if (layout, victim) in QUICK else pytest.mark.slow
        )
        for layout, victim in [*((layout, 1) for layout in LAYOUTS), ("FSDP2", 0), ("PP", 0)]
    ],
)
def test_a_killed_rank_ends_the_job(layout: str, victim: int, start: Start) -> None:
    run = strike(start, layout, victim=victim, number=signal.SIGKILL, timeout_s=20)
    assert re.search(rf"rank {victim} \(pid \d+\) was ended by SIGKILL", run.said())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hung_rank_ends_the_job_at_the_time_limit(layout: str, start: Start) -> None:
    run = strike(start, layout, victim=1, number=signal.SIGSTOP, timeout_s=6)
    assert run.status()["kind"] == "collective_timeout"
