"""Runs whose phases have other layouts: over each border they compute the numbers of one process."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.jobs import SMALL, with_changes
from tests.support.jobs import job as any_job
from tests.support.layouts import BOUND
from tests.support.ranks import Pool
from tests.support.runs import Run, errors, numbers, relative_error, saved_tensors
from tests.support.tables import table
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.base.signals import StopRequest
from titan.checkpoint.identity import step_to_continue
from titan.checks.rules import check_to_run
from titan.config.phases import DEGREES
from titan.config.schema import JobConfig
from titan.parallel.torch_compat import forget_mesh
from titan.run.hook import StartPoint

STEPS = 9
COURSE = [(1, "dp_shard 4"), (4, "dp_shard 2 x cp 2"), (7, "dp_shard 2 x tp 2")]
CP, TP = "context_parallel_degree", "tensor_parallel_degree"
# FSDP 4, then CP 2 x FSDP 2 at twice the length, then TP 2 x FSDP 2.
LONG = {"from_step": 4, "seq_len": 64, "local_batch_size": 2, CP: 2}
SPLIT = {"from_step": 7, CP: 1, TP: 2, "min_lr_factor": 0.1}
BASE = with_changes(
    SMALL,
    training={
        "steps": STEPS,
        "global_batch_size": 8,
        "local_batch_size": 1,
        "dataset": "stdlib",
    },
    # An element whose gradient is next to nothing must not take its rounding error as a full step.
    optimizer={"lr": 1e-3, "eps": 1e-6},
    lr_scheduler={"warmup_steps": 2, "decay_ratio": 0.0},
    checkpoint={"interval": 2, "keep_latest_k": 2},
)


def job(folder: Path | str, *phases: dict[str, Any], **changes: Any) -> JobConfig:
    return any_job(folder, base=BASE, phase=phases or (LONG, SPLIT), **changes)


def train(
    config: JobConfig, lost_at: int = 0, stopped_at: int = 0, forgets: bool = False
) -> Any:
    """Train as titan.train does. Return each trainer's mesh and first step, and how many models stay in memory.

    Args:
        config: the job.
        lost_at: the last step of the processes, which end without saving.
        stopped_at: the step in which a signal comes.
        forgets: begin behind a border as a start of the job does, which may leave parts of the state out.
    """
    check_to_run(config, world_size=dist.get_world_size())
    begin, seen, old = StartPoint(step=step_to_continue(config)), [], list[Any]()
    stop = StopRequest()
    while True:
        trainer = PoolTrainer(config, begin=begin, stop=stop)
        axes = (
            f"{axis} {n}"
            for axis, n in trainer.layout.__dict__.items()
            if axis != "accumulation"
        )
        seen.append(
            (trainer.step + 1, " x ".join(axis for axis in axes if not axis.endswith(" 1")))
        )
        while trainer.step + 1 < max(lost_at, stopped_at) and not trainer.changes_layout:
            trainer.train_one_step()
        if trainer.step + 1 == lost_at:
            trainer.train_one_step()
            trainer.close(failed=True)
            break
        if trainer.step + 1 == stopped_at:
            stop.signal_name = "SIGTERM"
        if trainer.run() is not None:
            trainer.close()
            break
        old.append(weakref.ref(trainer.train_step.parameters[0]))
        begin = trainer.leave()
        if forgets:
            begin = replace(begin, events=None)
        del trainer
        forget_mesh()
    return seen, sum(model() is not None for model in old)


def alone(folder: Path, *phases: dict[str, Any], **changes: Any) -> Path:
    """Train the same phases on one process."""
    plain = [{k: v for k, v in phase.items() if k not in DEGREES} for phase in phases]
    trainer = Trainer(job(folder, *plain, **changes))
    run_to_end(trainer)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alone(tmp_path_factory.mktemp("phases") / "whole", LONG, SPLIT)


def test_three_layouts_equal_one_process(pool: Pool, whole: Path, tmp_path: Path) -> None:
    """Three layouts equal one process. A border loads also what a start of the job leaves out, and no old model stays in memory."""
    config = job(tmp_path, checkpoint={"exclude_from_loading": ["optimizer"]})
    assert pool.run(4, train, config) == 4 * [(COURSE, 0)]
    found = errors(tmp_path, whole)
    assert max(found.values()) < BOUND, found
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows if row["event"] not in ("save", "decision")] == [
        "start",
        "end",
    ]
    texts = [row["text"] for row in rows if row["event"] == "decision"]
    assert (
        texts[0]
        == "phase 2, steps 4 to 6: 8 sequences of 64 tokens in a step, on dp_shard 2 x cp 2"
    )
    assert rows[-1]["restarts"] == rows[-1]["lost_steps"] == 0


def test_a_border_that_forgets_the_optimizer_is_seen(
    pool: Pool, whole: Path, tmp_path: Path
) -> None:
    pool.run(
        4, train, job(tmp_path, checkpoint={"exclude_from_loading": ["optimizer"]}), 0, 0, True
    )
    found = errors(tmp_path, whole)
    assert found["rows"] > 1e-3 and found["saved"] > 1e-2, found


def test_lost_in_each_phase_and_stopped_at_a_border(
    pool: Pool, whole: Path, tmp_path: Path
) -> None:
    """Also by a signal in the last step before a border. Each start begins in the layout of its next step."""
    config = job(tmp_path, checkpoint={"interval": 3})
    for lost_at, stopped_at, first in ((1, 0, 1), (5, 0, 1), (0, 6, 4), (8, 0, 7), (0, 0, 7)):
        [(seen, _), *_] = pool.run(4, train, config, lost_at, stopped_at)
        phase = (first > 3) + (first > 6)
        assert seen[0] == (first, COURSE[phase][1]), (lost_at, stopped_at)
        assert len(seen) == 1 + (lost_at == 5)  # the second start crosses a border
    found = errors(tmp_path, whole)
    assert max(found.values()) < BOUND, found


# "the same mesh again": ({TP: 2}, {TP: 1, **TWO}, {TP: 2}, {}): The groups of the first mesh are gone when one of the same shape and names comes again.
ROUTES = table(__file__, "routes")


@pytest.mark.parametrize("route", ROUTES)
def test_other_routes(route: str, pool: Pool, tmp_path: Path) -> None:
    first, *later, changes = ROUTES[route]
    phases = [{"from_step": step, **phase} for step, phase in zip((4, 7), later, strict=True)]
    whole = alone(tmp_path / "whole", *phases, **changes)
    [(seen, held), *_] = pool.run(
        4, train, job(tmp_path / "run", *phases, parallelism=first, **changes)
    )
    assert [step for step, _ in seen] == [1, 4, 7] and held == 0
    found = errors(tmp_path / "run", whole)
    assert max(found.values()) < BOUND, found


def test_other_starts(pool: Pool, whole: Path, tmp_path: Path) -> None:
    """A branch of another run at a border; and from a step before the newest, which is damaged, with other phases."""
    start = {
        "initial_load_path": str(whole / "checkpoint/step-6"),
        "initial_load_model_only": False,
    }
    branch, damaged = tmp_path / "branch", tmp_path / "damaged"
    assert pool.run(4, train, job(branch, checkpoint=start)) == 4 * [(COURSE[2:], 0)]
    shutil.copytree(whole, damaged)
    for step in (8, 9):
        shutil.rmtree(damaged / f"checkpoint/step-{step}")
    largest = max(
        (damaged / "checkpoint/step-6").iterdir(), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-100])
    swapped = job(damaged, LONG | {CP: 1, TP: 2}, SPLIT | {CP: 2, TP: 1})
    (_, long), (_, split) = COURSE[1:]
    # The launcher took the newest step for whole.
    assert pool.run(4, train, swapped) == 4 * [([(4, long), (4, split), (7, long)], 0)]
    for folder in (branch, damaged):
        rows = [row for row in numbers(whole) if folder == damaged or row[0] > 6]
        assert [row[:2] for row in numbers(folder)] == [
            pytest.approx(row[:2], rel=BOUND) for row in rows
        ]
        last = Path("checkpoint/step-9")
        ours, theirs = saved_tensors(folder / last), saved_tensors(whole / last)
        assert max(relative_error(ours[name], theirs[name]) for name in theirs) < BOUND


TABLES = """
[training]
steps = 45
local_batch_size = 1
global_batch_size = 8
[optimizer]
eps = 1e-6
[checkpoint]
interval = 4
[[phase]]
from_step = 16
seq_len = 64
LAYOUT 1
[[phase]]
from_step = 31
min_lr_factor = 0.1
LAYOUT 2
"""


def test_killed_in_each_phase(tmp_path: Path) -> None:
    """Processes of torchrun that get SIGKILL: each start begins in its phase's layout, and the others follow in its processes."""
    degrees = (
        "context_parallel_degree = 2",
        "context_parallel_degree = 1\ntensor_parallel_degree = 2",
    )
    alone, phases = tmp_path / "alone.toml", tmp_path / "phases.toml"
    alone.write_text(TABLES.replace("LAYOUT 1", "").replace("LAYOUT 2", ""))
    phases.write_text(TABLES.replace("LAYOUT 1", degrees[0]).replace("LAYOUT 2", degrees[1]))
    assert Run(tmp_path / "whole", str(alone)).end() == 0
    start = partial(Run, tmp_path / "killed", str(phases), "--nproc=4")
    for step in (9, 24, 38):
        run = start()
        run.wait_until_training(step=step)
        run.kill()
    assert start().end() == 0
    found = errors(tmp_path / "killed", tmp_path / "whole")
    assert max(found.values()) < BOUND, found
    said = (tmp_path / "messages.txt").read_text()
    meshes = [
        line.split("mesh ")[1].split(";")[0] for line in said.splitlines() if "; mesh " in line
    ]
    first, second, third = "dp_shard 4", "dp_shard 2 x cp 2", "dp_shard 2 x tp 2"
    assert meshes == [first, first, second, second, third, third]
