"""Ranks' own times: who is slow, and who only waits; spikes; what a run writes of both."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.ops import ranks
from titan.ops.ranks import ForwardClock, PhaseClock, Stragglers, TimesLog
from titan.run.run_events import Spikes

SLOW_RANK, SLEEP_S = 1, 0.1
CPU = torch.device("cpu")


def train(folder: Path, compiled: bool) -> None:
    """24 steps on three ranks, of which one sleeps in a block's forward pass."""
    config = job(
        folder,
        model={"overrides": {"n_layers": 2}},
        training={"steps": 24},
        metrics={"log_freq": 4},
        checkpoint={"enable": False},
        compile={"enable": compiled, "backend": "eager"},
    )
    trainer = PoolTrainer(config)
    if dist.get_rank() == SLOW_RANK:
        block = trainer.train_step.model_parts[0].get_submodule("layers.1.feed_forward")
        forward = block.forward

        @torch.compiler.disable
        def sleepy(x: torch.Tensor) -> torch.Tensor:
            time.sleep(SLEEP_S)
            return forward(x)

        block.forward = sleepy
    trainer.run()
    trainer.close()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_slow_rank_is_named_and_those_that_wait_are_not(
    tmp_path: Path, pool: Pool, compiled: bool
) -> None:
    pool.run(3, train, tmp_path, compiled)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 4, 8, 12, 16, 20, 24]
    for row in rows[1:]:
        assert row["slowest_rank"] == SLOW_RANK
        assert row["slowest_rank_s"] > SLEEP_S > row["median_rank_s"] > 0
        assert row["step_s"] > SLEEP_S and 0 < row["goodput"] < 1
    events = [
        e for e in read_json_lines(tmp_path / "events.jsonl") if e["event"] == "straggler"
    ]
    [event] = events  # told once
    assert (event["rank"], event["host"]) == (SLOW_RANK, os.uname().nodename)
    for rank in range(3):
        times = read_json_lines(tmp_path / "logs" / f"rank-{rank}.times.jsonl")
        assert [t["step"] for t in times] == [row["step"] for row in rows]
        last = times[-1]
        assert (last["own_s"] > SLEEP_S) == (rank == SLOW_RANK)
        assert last["step_s"] > SLEEP_S > last["data_wait_s"]  # all wait for the slow one
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert f"rank {SLOW_RANK} on {os.uname().nodename} is slow" in log


def test_stragglers_are_told_once_and_recover() -> None:
    stragglers = Stragglers(log_freq=4)
    fair, slow = [0.1, 0.1, 0.11, 0.1], [0.1, 0.1, 0.11, 0.2]
    standings = [
        stragglers.add(times, step_s=0.5) for times in [fair] * 3 + [slow] * 8 + [fair] * 5
    ]
    assert (standings[0].slowest_rank, standings[0].slowest_s, standings[0].median_s) == (
        2,
        0.11,
        0.1,
    )
    assert [n for n, standing in enumerate(standings) if standing.new] == [
        5
    ]  # 3 of 5 rows are slow
    assert standings[5].new == (3,)
    assert [n for n, standing in enumerate(standings) if standing.gone] == [13]


def test_one_slow_step_and_small_differences_make_no_straggler() -> None:
    stragglers = Stragglers(log_freq=4)
    for times in ([0.1, 0.1], [0.1, 9.0], [0.1, 0.1], [0.1, 0.1], [0.1, 0.1], [0.1, 0.1]):
        assert not stragglers.add(times, step_s=0.5).new
    stragglers = Stragglers(log_freq=4)
    for _ in range(10):  # three times as slow, but one millisecond of half a second
        assert not stragglers.add([0.0005, 0.0005, 0.0015], step_s=0.5).new


def test_the_forward_clock_counts_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += 2.0
            return x

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    block = Block()
    clock = ForwardClock([block], device=CPU)
    for _ in range(4):
        block(torch.zeros(1))
        now[0] += 100.0  # between the calls
    block.eval()
    block(torch.zeros(1))
    assert clock.take(2)["own"] == 4.0  # two calls in each of two steps
    assert clock.take(1)["own"] == 0.0


def test_phases_of_a_device_count_once_it_has_finished_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        now, reached = 0, 0

        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = Event.now

        def query(self) -> bool:
            return self.at <= Event.reached

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch, "Event", Event)
    clock = PhaseClock(device=torch.device("cuda"))
    clock.mark("forward")  # of an evaluation before the first step
    for step in range(3):
        clock.begin()
        for phase, seconds in (("forward", 1), ("backward", 2 + step), ("forward", 1)):
            Event.now += seconds
            clock.mark(phase)
        Event.now += 5
        clock.end("update")
        Event.now += 100
    # The host is at the end of the third step, the device in the second.
    Event.reached = 109 + 6
    assert clock.take(3) == {"forward": 2.0, "backward": 2.0, "update": 5.0}
    Event.reached = Event.now
    clock.begin()  # the third step is complete with the beginning of the next
    assert clock.take(3) == {"forward": 2.0, "backward": 3.5, "update": 5.0}


def test_times_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_MAX_BYTES", 300)
    monkeypatch.setattr(ranks, "_FLUSH_S", 0.0)
    log = TimesLog(tmp_path, rank=3, host="node7")
    for step in range(1, 21):
        log.write(step=step, step_s=1.0, data_wait_s=0.5)
    log.flush()
    kept = read_json_lines(tmp_path / "logs" / "rank-3.times.previous.jsonl") + read_json_lines(
        log.path
    )
    assert [row["step"] for row in kept] == list(range(kept[0]["step"], 21)) and len(kept) < 12
    assert kept[-1]["host"] == "node7" and abs(kept[-1]["unix_s"] - time.time()) < 60


def test_spikes_are_kept_until_the_next_logged_step() -> None:
    spikes = Spikes(window=16, min_steps=8)
    for n in range(8):
        assert spikes.add(4.0 + 0.1 * (n % 2), 1.0) == (None, None)
    loss_z, norm_z = spikes.add(5.0, 1.02)
    # losses: median 4.05, every one 0.05 off it; norms: all equal, so that 1 % of the median is sigma
    assert loss_z == pytest.approx(0.95 / (1.4826 * 0.05))
    assert norm_z == pytest.approx(2.0)
    spikes.add(4.0, float("nan"))
    assert spikes.take() == {"loss_z": round(0.95 / (1.4826 * 0.05), 2), "grad_norm_z": 2.0}
    assert spikes.take() == {"loss_z": None, "grad_norm_z": None}
