"""The twin of a run: what it predicts and measures, and the parts that it names when a run drifts; none in clean runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.slow_parts import train_with
from titan.contrib.twin.drift import DriftWatch, RowTimes, SlowLink
from titan.contrib.twin.hook import Prediction

RANKS = 4
NOTHING = RowTimes(
    step_s=1.0,
    own_s=[0.3] * RANKS,
    data_s=[0.0] * RANKS,
    host_s=[0.01] * RANKS,
    retries=[0] * RANKS,
)


def with_rank(values: Any, rank: int, value: float) -> list[float]:
    return [value if n == rank else v for n, v in enumerate(values)]


def watch(
    rows: list[RowTimes],
    *,
    noise: float = 0.0,
    shares_cores: bool = True,
    links: float = 1.0,
    link_cost_s: float = 0.5,
) -> DriftWatch:
    """Return the watch after 17 clean rows and these. links: what the link of ranks 1 and 2 takes whenever links are measured."""
    draw, watched = random.Random(1), DriftWatch(log_freq=4, shares_cores=shares_cores)
    for row in [NOTHING] * 17 + rows:
        factor = 1 + noise * draw.random()
        own_s = [s * (1 + noise * draw.random()) for s in row.own_s]
        watched.add(replace(row, step_s=row.step_s * factor, own_s=own_s))
        if watched.suspects_link:
            pairs = {(0, 1): 1.0, (1, 2): links, (2, 3): 1.1}
            watched.measured_links(
                [
                    SlowLink(axis="dp_shard", ranks=p, ratio=r, cost_s=link_cost_s)
                    for p, r in pairs.items()
                ]
            )
    return watched


SLOW_ROWS = {
    "rank": replace(NOTHING, step_s=1.9, own_s=with_rank(NOTHING.own_s, 2, 0.6)),
    "data": replace(NOTHING, step_s=1.3, data_s=with_rank(NOTHING.data_s, 2, 0.3)),
    "host": replace(NOTHING, step_s=1.3, host_s=with_rank(NOTHING.host_s, 2, 0.31)),
    "allocator": replace(NOTHING, step_s=1.3, retries=with_rank(NOTHING.retries, 2, 3)),
}


@pytest.mark.parametrize("shares_cores", [True, False], ids=["CPU", "GPU"])
@pytest.mark.parametrize("part", SLOW_ROWS)
def test_a_slow_part_is_named_with_its_rank(part: str, shares_cores: bool) -> None:
    drift = watch([SLOW_ROWS[part]] * 5, noise=0.1, shares_cores=shares_cores).current
    assert drift is not None and (drift.part, drift.ranks) == (part, (2,))
    # One row is noise, and what has ended is forgotten.
    assert watch([SLOW_ROWS[part], NOTHING, NOTHING], noise=0.1).current is None
    assert watch([SLOW_ROWS[part]] * 5 + [NOTHING] * 6, noise=0.1).current is None


def test_what_a_drift_costs() -> None:
    costs = {part: watch([row] * 5).current for part, row in SLOW_ROWS.items()}
    assert {part: d and d.cost_s for part, d in costs.items()} == pytest.approx(
        {"rank": 0.3, "data": 0.3, "host": 0.3, "allocator": 0.3}
    )
    assert {part: d and d.ratio for part, d in costs.items()} == pytest.approx(
        {"rank": 1.9, "data": 1.3, "host": 1.3, "allocator": 1.3}
    )
    # Where each rank has a device, the forward passes stand for the whole of a slow rank's step.
    of_device = watch([SLOW_ROWS["rank"]] * 5, shares_cores=False).current
    assert of_device is not None and of_device.cost_s == pytest.approx(0.9)


def test_a_link_is_named_if_it_is_slow_whenever_it_is_measured() -> None:
    unexplained = [replace(NOTHING, step_s=1.6)] * 8
    drift = watch(unexplained, noise=0.1, links=2.0).current
    assert drift is not None and (drift.part, drift.ranks) == ("link", (1, 2))
    assert "between ranks 1 and 2 (dp_shard) takes 2.0 times" in drift.text
    # All links as fast as they were, or nearly nothing is sent: no alarm, but they are still looked at.
    for watched in (
        watch(unexplained, noise=0.1, links=1.2),
        watch(unexplained, noise=0.1, links=9.0, link_cost_s=0.01),
    ):
        assert watched.current is None and watched.suspects_link


def test_slow_saves_count_over_the_steps_between_them() -> None:
    def rows(save_s: float) -> list[RowTimes]:
        return [replace(NOTHING, save_s=save_s, num_steps=4), replace(NOTHING, num_steps=4)] * 3

    drift = watch(rows(0.5) + rows(3.0)).current
    assert drift is not None and drift.part == "checkpoint"
    assert drift.cost_s == pytest.approx(2.5 / 8)
    assert watch(rows(0.5) + rows(0.9)).current is None  # 50 ms a step
    # Beside other programs, steps and saves take longer alike.
    loaded = [replace(row, step_s=4.0, own_s=[1.2] * RANKS) for row in rows(2.5)]
    assert watch(rows(0.5) + loaded * 2).current is None


def test_a_rank_that_was_slow_from_the_start_is_compared_with_the_others() -> None:
    slow = replace(NOTHING, own_s=with_rank(NOTHING.own_s, 1, 0.6))
    watched = DriftWatch(log_freq=4, shares_cores=True)
    uneven = DriftWatch(log_freq=4, shares_cores=True, same_work=False)
    for _ in range(12):
        watched.add(slow)
        uneven.add(slow)
    drift = watched.current
    assert drift is not None and (drift.part, drift.ranks) == ("rank", (1,))
    assert uneven.current is None  # a stage of a pipeline may have more to do


def test_ranks_that_slow_down_together_are_other_programs_or_the_devices() -> None:
    together = replace(NOTHING, step_s=2.0, own_s=[0.6] * RANKS, host_s=[0.3] * RANKS)
    assert watch([together] * 8).current is None
    drift = watch([together] * 8, shares_cores=False).current
    assert drift is not None and (drift.part, drift.ranks) == ("devices", ())


def test_noise_is_no_drift() -> None:
    draw = random.Random(3)
    for _ in range(20):
        # Each fifth figure is far off, as beside other programs.
        rows = [
            replace(
                NOTHING,
                step_s=draw.choice([1.0, 1.0, 1.1, 1.2, 3.0]),
                own_s=[0.3 * draw.choice([1.0, 1.0, 1.1, 1.1, 3.0]) for _ in range(RANKS)],
                host_s=[draw.choice([0.01, 0.01, 0.02, 0.02, 0.4]) for _ in range(RANKS)],
                data_s=[draw.choice([0.0, 0.0, 0.0, 0.0, 0.3]) for _ in range(RANKS)],
            )
            for _ in range(60)
        ]
        watched = DriftWatch(log_freq=2, shares_cores=True)
        assert not [drift for row in rows if (drift := watched.add(row))]


def test_a_run_that_got_faster_is_held_against_its_new_speed() -> None:
    fast = replace(NOTHING, step_s=0.5)
    watched = watch([fast] * 10)
    assert watched.expected_s == 0.5
    slow = replace(fast, step_s=0.7, data_s=with_rank(NOTHING.data_s, 0, 0.2))
    drifts = [watched.add(slow) for _ in range(5)]
    assert drifts[-1] is not None and drifts[-1].part == "data"


def test_a_job_that_cannot_be_simulated_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = job(tmp_path, simulator={"twin_hardware": "abacus"})
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.toml").write_text("")
    trainer: Any = SimpleNamespace(
        config=config,
        run_dir=tmp_path,
        world_size=2,
        hardware=None,
        device=SimpleNamespace(type="cpu"),
    )
    prediction = Prediction(trainer)
    prediction.start()
    assert prediction.process is not None
    prediction.process.wait()
    assert prediction.poll() == {} and not prediction.is_running
    assert "the job is not simulated: hardware: no profile 'abacus'" in caplog.text


# ---- real runs on gloo -----------------------------------------------------------------------------


def drifts(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    events = read_json_lines(folder / "events.jsonl")
    return [(e["part"], tuple(e["ranks"])) for e in events if e["event"] == "drift"]


def test_a_slow_rank_beside_its_prediction(tmp_path: Path, pool: Pool) -> None:
    slow = {"first": 28, "ranks": (1,), "seconds": 0.2}
    pool.run(2, train_with, tmp_path, "rank", slow, {"steps": 52}, True)
    assert set(drifts(tmp_path)) == {("rank", (1,))}
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    last = rows[-1]
    assert last["drift/part"] == "rank" and last["drift/ratio"] > 1
    assert last["drift/text"].startswith("rank 1 computes ")
    # The phases add up to the step, without the data and the time between steps.
    measured = sum(
        last[f"measured/{name}_s"] for name in ("forward", "backward", "update", "host")
    )
    assert 0.5 * last["step_s"] < measured < 1.05 * last["step_s"]
    # Scaled to the first steps, since a CPU's profile is an order of magnitude.
    settled = next(row for row in rows if "drift/ratio" in row)
    predicted = [last[f"predicted/{name}_s"] for name in ("forward", "backward", "update")]
    assert sum(predicted) == pytest.approx(last["predicted/step_s"], rel=0.05)
    assert (
        last["predicted/step_s"] <= settled["predicted/step_s"] and last["predicted/scale"] > 0
    )
    assert last["predicted/memory_gib"] >= last["predicted/memory_active_gib"] > 0


SLEEPS: dict[str, tuple[int, tuple[int, ...], float]] = {
    "rank": (4, (2,), 0.3),
    "link": (4, (1, 2), 0.1),
    "data": (2, (1,), 0.3),
    "allocator": (3, (1,), 0.0),
    "host": (3, (2,), 0.3),
    "checkpoint": (2, (0, 1), 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", SLEEPS)
def test_an_injected_drift_is_named(tmp_path: Path, pool: Pool, part: str) -> None:
    world, ranks, seconds = SLEEPS[part]
    settings: dict[str, Any] = {"steps": 120}
    if part == "checkpoint":
        settings["checkpoint"] = {"interval": 8, "keep_latest_k": 2}
    slow = {"first": 60, "ranks": ranks, "seconds": seconds}
    pool.run(world, train_with, tmp_path, part, slow, settings)
    assert set(drifts(tmp_path)) == {(part, () if part == "checkpoint" else ranks)}


@pytest.mark.slow
@pytest.mark.parametrize("run", range(10))
def test_no_drift_in_a_clean_run(tmp_path: Path, pool: Pool, run: int) -> None:
    settings = {"steps": 240, "checkpoint": {"interval": 16, "keep_latest_k": 2}}
    pool.run(2 + run % 3, train_with, tmp_path, "", {}, settings)
    assert drifts(tmp_path) == []
