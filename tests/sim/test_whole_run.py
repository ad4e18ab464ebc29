"""A whole run: the formulas against runs that are simulated failure by failure, and against real runs that are killed."""

from __future__ import annotations

import json
import random
import time
from math import log1p
from pathlib import Path
from statistics import mean, median

import pytest

from tests.support.jobs import job
from tests.support.runs import Run, logged_rows, saved_tensors
from tests.support.tables import tabled
from tests.support.trainers import Trainer
from titan.cli import main
from titan.models.llama3 import build_model
from titan.sim.price.profiles import load_profile
from titan.sim.report.interval import (
    daly_interval_s,
    expected_interval_s,
    num_spares,
    young_interval_s,
)
from titan.sim.report.whole_run import save_times_s, state_bytes
from titan.sim.simulate import simulate

MTBF_S, RESTART_S = 3600.0, 300.0


def run_with_failures(
    draw: random.Random, *, intervals: int, work_s: float, save_s: float, write_s: float
) -> float:
    """Return the seconds of one run, followed from failure to failure."""
    now_s, durable, done = 0.0, 0, 0
    fails_at_s = draw.expovariate(1 / MTBF_S)
    saves: list[tuple[float, int]] = []  # when a save counts, and how many intervals it holds

    def fail() -> None:
        nonlocal now_s, done, durable, fails_at_s
        durable = max([durable, *(held for at_s, held in saves if at_s <= fails_at_s)])
        saves.clear()
        # Restarts are hit, too: each failure begins the restart again.
        while True:
            now_s = fails_at_s
            fails_at_s = now_s + draw.expovariate(1 / MTBF_S)
            if now_s + RESTART_S < fails_at_s:
                break
        now_s, done = now_s + RESTART_S, durable

    while done < intervals:
        end_s = now_s + work_s + save_s
        if end_s > fails_at_s:
            fail()
            continue
        now_s, done = end_s, done + 1
        saves.append((now_s + write_s, done))
    return now_s


@tabled(
    "work_s, save_s, write_s",
    ids=["blocking", "beside training", "as often as can be", "seldom"],
)
def test_the_mean_of_200_runs_is_the_expected_one(
    work_s: float, save_s: float, write_s: float
) -> None:
    draw, intervals = random.Random(20), round(600_000 / work_s)
    times = {"work_s": work_s, "save_s": save_s, "write_s": write_s}
    runs = [run_with_failures(draw, intervals=intervals, **times) for _ in range(200)]
    expected = expected_interval_s(mtbf_s=MTBF_S, restart_s=RESTART_S, **times) * intervals
    # The same for goodput, which is the work over this time.
    assert mean(runs) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("save_s", [1.0, 60.0, 900.0])
def test_dalys_interval_is_the_best_of_the_model(save_s: float) -> None:
    def slowdown(work_s: float) -> float:
        how = {"mtbf_s": MTBF_S, "save_s": save_s, "restart_s": RESTART_S}
        return expected_interval_s(work_s, **how) / work_s

    best = min(slowdown(work_s) for work_s in range(10, 6000, 5))
    daly = slowdown(daly_interval_s(save_s, MTBF_S))
    assert daly == pytest.approx(best, rel=1e-4)
    assert daly <= slowdown(young_interval_s(save_s, MTBF_S))
    # Saves that take longer than the job lives: Daly gives up on more than the time between failures.
    assert daly_interval_s(3 * MTBF_S, MTBF_S) == MTBF_S


def test_spares_by_the_table_of_poissons_distribution() -> None:
    # P(at most 3) = .981 and P(at most 4) = .9963 for a mean of 1; .9863 of 17 and .9928 of 18 for 10.
    assert [num_spares(m, probability=0.99) for m in (0.0, 1.0, 10.0)] == [0, 4, 18]
    # Where a normal distribution takes over, one node more is not 2 of 500.
    both = [num_spares(m, probability=0.99) for m in (499.9, 500.1)]
    assert both[1] - both[0] in (-1, 0, 1) and 545 < both[0] < 560


def test_the_state_is_as_large_as_the_checkpoint_on_disk(tmp_path: Path) -> None:
    config = job(tmp_path, model={"overrides": {"n_layers": 4}}, training={"steps": 1})
    trainer = Trainer(config)
    trainer.run()
    trainer.close()
    tensors = saved_tensors(tmp_path / "checkpoint" / "step-1").values()
    on_disk = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    simulation = simulate(config, world_size=1, profile=load_profile("cpu"), use_cache=False)
    # The allocator rounds up to 512 bytes, which shows in a model as small as this: each parameter's count of steps has 4.
    assert state_bytes(simulation) == pytest.approx(on_disk, rel=0.005)


def test_what_training_waits_for_in_each_mode(tmp_path: Path) -> None:
    profile, nodes = load_profile("h100-sxm"), 1
    found = {}
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        config = job(tmp_path, checkpoint={"async_mode": mode})
        simulation = simulate(config, world_size=2, profile=profile)
        found[mode] = save_times_s(simulation, 3e9, nodes=nodes)
    # 1 GB/s to the disk; 1.5 GB from each rank, through pageable memory, or pinned and beside the next step.
    assert found["disabled"] == (3.0, 0.0)
    assert found["async"] == (pytest.approx(1.5 / 1.4), 3.0)
    blocked_s, beside_s = found["async_with_pinned_mem"]
    # The host starts a copy for each weight and its three states. A small model's step hides little of a copy of 1.5 GB.
    model = build_model(config.model.sizes)
    starts_s = 4 * len([*model.parameters()]) * (10 * profile.host_tiny_us + 2.5) * 1e-6
    copy_s = 1.5 / profile.host_gb_per_s
    assert blocked_s == pytest.approx(
        starts_s + copy_s - simulation.timeline.step_s, rel=0.02, abs=1e-4
    )
    assert blocked_s + beside_s == pytest.approx(starts_s + copy_s + 3.0, abs=1e-4)


def sim(*arguments: str) -> int:
    return main(["sim", "train_configs/debug_model.toml", "--training.seq_len=64", *arguments])


def test_the_page_and_phases_that_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay, file = tmp_path / "long.toml", tmp_path / "run.json"
    overlay.write_text('[training]\nsteps = 2000\n[checkpoint]\nasync_mode = "async"\n')
    base = tmp_path / "base.toml"  # not an option, which would win over the overlay
    base.write_text("[training]\nsteps = 1000\n")
    validation = ["--validation.enable=true", "--data.validation_fraction=0.01"]
    code = sim(
        str(base),
        *validation,
        "--world-size",
        "2",
        "--hardware",
        "h100-sxm",
        "--run",
        "--phase",
        str(overlay),
        "--json",
        str(file),
        "--simulator.run.gpu_hour_price=2",
        "--simulator.run.mtbf_gpu_hours=0.1",
    )
    printed = capsys.readouterr().out
    assert code == 0
    for text in ("the whole run: ", "phase 2: ", "MWh in the GPUs, cost ", "to spare", "Daly "):
        assert text in printed
    run = json.loads(file.read_text())["run"]
    first, second = run["phases"]
    assert run["steps"] == 3000 and run["goodput"] < 1
    for name in ("days", "gpu_hours", "cost", "failures", "tokens", "energy_mwh"):
        assert run[name] == pytest.approx(first[name] + second[name])
    for phase in run["phases"]:
        assert sum(phase["days_by_part"].values()) == pytest.approx(phase["days"])
        assert phase["cost"] == pytest.approx(phase["gpu_hours"] * 2)
        assert phase["energy_mwh"] == pytest.approx(phase["gpu_hours"] * 700e-6)
        assert phase["failures"] == pytest.approx(phase["gpu_hours"] / 0.1)
        assert phase["days_by_part"]["validation"] > 0
        best = phase["checkpoint"]["best_goodput"]
        assert phase["goodput"] <= best * 1.0001 and phase["nodes"] == 1
    # The second writes beside training what the first waits for.
    assert first["checkpoint"]["beside_s"] == 0 < second["checkpoint"]["beside_s"]
    assert first["checkpoint"]["blocked_s"] > second["checkpoint"]["blocked_s"] > 0
    assert sim("--world-size", "1", "--hardware", "h100-sxm", "--phase", str(overlay)) == 2


@pytest.mark.slow
def test_a_run_that_is_killed_has_the_expected_goodput(tmp_path: Path) -> None:
    """Kill two ranks at drawn times, and again while they start; compare with the model on what the run itself measured."""
    interval, mtbf_s, kills = 30, 45.0, 8
    # One time from each eighth of the distribution, in random order: the mean is exact with a few draws.
    quantiles = [(k + 0.5) / kills for k in range(kills)]
    lives = _exponential(quantiles, mtbf_s)
    random.Random(7).shuffle(lives)
    folder, settings = tmp_path / "run", ["--nproc", "2", "--checkpoint.keep_latest_k=2"]
    settings += [f"--checkpoint.interval={interval}"]
    settings += ["--training.local_batch_size=16", "--training.seq_len=128"]
    # Four minutes of training on any machine, which five or more of these lives cover.
    probe = Run(tmp_path / "probe", *settings, "--training.steps=20")
    assert probe.process.wait() == 0, probe.said()
    steps = round(240 / median(row["step_s"] for row in logged_rows(tmp_path / "probe")[1:]))
    settings.append(f"--training.steps={steps}")
    restarts_s, step_s, save_s = [], [], []
    began_s = 0.0
    for start in range(100):
        started_s, life_s = time.time(), lives[start % kills]
        run = Run(folder, *settings)
        # The first start is no restart: its life begins with training.
        if start == 0:
            run.wait_until_training(step=1)
            began_s = logged_rows(folder)[0]["unix_s"]
            life_s += began_s - started_s
        while run.process.poll() is None and time.time() < started_s + life_s:
            time.sleep(0.05)
        is_done = run.process.poll() is not None
        if not is_done:
            run.kill()
        rows = [row for row in logged_rows(folder) if row["unix_s"] > started_s]
        if start and rows:
            restarts_s.append(rows[0]["unix_s"] - rows[0]["step_s"] - started_s)
        step_s += [row["step_s"] for row in rows[1:]]
        save_s += [row["checkpoint_s"] for row in rows if row["checkpoint_s"] > 0]
        if is_done:
            break
    assert run.process.returncode == 0, run.said()
    took_s = logged_rows(folder)[-1]["unix_s"] - began_s
    work_s = median(step_s) * interval
    predicted_s = expected_interval_s(
        work_s, mtbf_s=mtbf_s, save_s=mean(save_s), restart_s=mean(restarts_s)
    )
    goodput, measured = work_s / predicted_s, steps * median(step_s) / took_s
    print(
        f"{len(lives)} lives, {start} restarts of {mean(restarts_s):.1f} s, steps of {median(step_s):.3f} s, "
        f"saves of {mean(save_s):.2f} s: goodput {measured:.3f}, expected {goodput:.3f}"
    )
    assert start >= 4
    assert measured == pytest.approx(goodput, rel=0.1)


def _exponential(quantiles: list[float], mean_s: float) -> list[float]:
    """Return the times of these quantiles, scaled to the mean."""
    times = [-log1p(-q) for q in quantiles]
    return [t * mean_s / mean(times) for t in times]
