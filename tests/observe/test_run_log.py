"""Where a run's wall time went, by hand-computed numbers, over crashes, rewinds and a change of what is kept."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from tests.support.metrics import Clock
from titan.base.run_folder import RunFolder
from titan.base.run_writer import run_files
from titan.observe.run_log import PARTS, EventLog, goodput


def begin(folder: Path, clock: Clock, *, step: int, started: float) -> EventLog:
    return EventLog(folder, rank=0, step=step, started_unix_s=started, clock=clock)


def beat(folder: Path, *, step: int, unix_s: float) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / "rank-0.times.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "unix_s": unix_s}) + "\n")


def parts(events: EventLog) -> dict[str, float]:
    return {part: round(s, 3) for part, s in events.seconds.items() if s}


def test_one_start(tmp_path: Path) -> None:
    clock = Clock(1007)
    events = begin(tmp_path, clock, step=0, started=1000)  # 7 s of imports and building
    clock.now_s = 1010
    events.begin_steps()
    clock.now_s = 1030  # 20 s for the first step, 1 s of it data
    events.warm({"data": 1.0})
    clock.now_s = 1130  # 100 s, of which 4 data, 10 validation, 6 checkpoint
    spent = {"data": 5.0, "validation": 10.0, "checkpoint": 6.0}
    assert events.share(spent) == pytest.approx(80 / 130)
    events.write("save", step=50, spent=spent)
    clock.now_s = 1140
    events.end("done", step=60, spent=spent, exit_code=0)
    expected = {"setup": 10, "compile": 19, "data_wait": 5, "trained": 90, "validation": 10}
    assert parts(events) == expected | {"checkpoint": 6}
    assert "goodput 64.3% of 140 s" in events.summary()
    rows = RunFolder(tmp_path).events()
    assert [(r["event"], r["step"]) for r in rows] == [("start", 0), ("save", 50), ("end", 60)]
    assert rows[-1]["state"] == "done" and sum(rows[-1]["seconds"].values()) == 140


def crashed(folder: Path) -> Clock:
    """60 s of training to the save at step 30, 40 s more to step 50, then kill -9."""
    clock = Clock(1010)
    events = begin(folder, clock, step=0, started=1000)
    events.begin_steps()
    clock.now_s = 1020
    events.warm({})
    clock.now_s = 1080
    events.write("save", step=30, spent={})
    beat(folder, step=50, unix_s=1120)
    return clock


def test_steps_after_the_checkpoint_of_a_killed_run_are_lost(tmp_path: Path) -> None:
    clock = crashed(tmp_path)
    clock.now_s = 1200
    again = begin(tmp_path, clock, step=30, started=1150)
    assert (again.restarts, again.lost_steps) == (1, 20)
    again.begin_steps()
    assert parts(again) == {"setup": 60, "compile": 10, "trained": 60, "lost": 40, "down": 30}
    clock.now_s = 1210
    again.warm({})
    clock.now_s = 1300
    assert again.share({}) == pytest.approx((60 + 90) / 300)
    # Killed again before anything was saved: the 90 s and the first step go, too.
    beat(tmp_path, step=45, unix_s=1300)
    clock.now_s = 1310
    third = begin(tmp_path, clock, step=30, started=1310)
    assert (third.restarts, third.lost_steps) == (2, 35)
    assert third.seconds["trained"] == 60 and sum(third.seconds.values()) == 310


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    clock = crashed(tmp_path)
    clock.now_s = 1130
    again = begin(tmp_path, clock, step=0, started=1130)
    assert (again.lost_steps, again.seconds["trained"], again.seconds["lost"]) == (50, 0, 100)
    assert goodput(again.seconds) == 0


def test_a_rewind_loses_the_steps_since_the_save(tmp_path: Path) -> None:
    clock = Clock(1000)
    events = begin(tmp_path, clock, step=0, started=1000)
    events.begin_steps()
    events.warm({})
    clock.now_s = 1100
    events.write("save", step=10, spent={"data": 10.0})
    clock.now_s = 1130
    events.rewind(16, to=10, spent={"data": 12.0})
    assert parts(events) == {"trained": 90, "data_wait": 10, "lost": 30}
    assert events.lost_steps == 6
    clock.now_s = 1140
    assert events.share({"data": 4.0}) == pytest.approx(
        96 / 140
    )  # a new step timer begins at zero


def test_a_step_that_is_repeated_is_lost_and_waiting_for_groups_is_a_part(
    tmp_path: Path,
) -> None:
    clock = Clock(1000)
    events = begin(tmp_path, clock, step=0, started=1000)
    events.begin_steps()
    events.warm({})
    clock.now_s = 1100
    events.share({"quorum": 20.0})
    events.repeat(5.0)
    assert parts(events) == {"trained": 75, "quorum": 20, "lost": 5}
    assert events.lost_steps == 1


def test_a_graceful_stop_loses_nothing_and_its_pause_counts_as_down(tmp_path: Path) -> None:
    clock = Clock(1000)
    events = begin(tmp_path, clock, step=0, started=1000)
    events.begin_steps()
    events.warm({})
    clock.now_s = 1060
    events.write("save", step=10, spent={})
    events.end("stopped", step=10)
    clock.now_s = 1100
    again = begin(tmp_path, clock, step=10, started=1100)
    assert parts(again) == {"trained": 60, "down": 40}
    assert (again.restarts, again.lost_steps) == (1, 0)


def test_another_run_in_the_folder_of_a_finished_one(tmp_path: Path) -> None:
    begin(tmp_path, Clock(), step=0, started=1000).end("done", step=5)
    fresh = begin(tmp_path, Clock(2000), step=0, started=2000)
    assert fresh.restarts == 0 and sum(fresh.seconds.values()) == 0
    assert [r["event"] for r in RunFolder(tmp_path).events()] == ["start"]
    assert len((tmp_path / "events.previous.jsonl").read_text().splitlines()) == 2


def test_odd_rows_do_no_harm(tmp_path: Path) -> None:
    odd = [
        '"step": null',
        '"step": 1, "seconds": "x"',
        '"step": 1, "restarts": 1e999',
        '"a": ' + "[" * 9999,
    ]
    for n, row in enumerate(odd, start=1):
        events = begin(tmp_path, Clock(), step=0, started=1000)
        assert (events.restarts, set(events.seconds)) == (n - 1, set(PARTS))
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(f'{{"event": "end", "unix_s": 1, {row}}}')  # also torn: it has no end
        beat(tmp_path, step=-1, unix_s=math.nan)
        run_files(tmp_path).report()
    assert len(RunFolder(tmp_path).events()) == len(odd)


def test_only_rank_0_writes(tmp_path: Path) -> None:
    EventLog(tmp_path, rank=1, step=0).end("done", step=3)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_clock_that_is_set_counts_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventLog(tmp_path, rank=0, step=0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3e7)
    events.begin_steps()
    assert sum(events.seconds.values()) < 1e6
