"""Steps that are not taken: NaN and spikes are found before they touch the weights, and what comes after is what a run computes that
never saw their samples.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.runs import logged_rows, same_tensors
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer
from titan.base.spikes import spike_score
from titan.config.schema import FaultToleranceSection
from titan.ops.recovery import NonFiniteError, Recovery, SpikeError, StepAction
from titan.ops.replicas import ReplicaError

BATCH = 4  # samples of a step, on every layout
LAYOUTS = {
    "one process": (1, {}),
    "FSDP2": (2, {"data_parallel_shard_degree": 2}),
    "TP": (2, {"tensor_parallel_degree": 2}),
    "PP": (2, {"pipeline_parallel_degree": 2}),
}


def train(
    folder: Path,
    settings: dict[str, Any],
    *,
    steps: int,
    parallelism: dict[str, int],
    fault: str = "",
    never: tuple[int, int] | None = None,
    interval: int = 100,
) -> str:
    """What it ended with, nothing if well. never: samples that the run leaves out from its beginning on."""
    os.environ["TITAN_FAULT"] = fault
    dp = parallelism.get("data_parallel_shard_degree", 1)
    dp *= parallelism.get("data_parallel_replicate_degree", 1)
    config = job(
        folder,
        training={"seq_len": 16, "local_batch_size": BATCH // dp, "steps": steps},
        parallelism=parallelism,
        lr_scheduler={"warmup_steps": 0, "decay_ratio": 0.0},
        checkpoint={"interval": interval, "async_mode": "async"},
        fault_tolerance=settings,
    )
    trainer = PoolTrainer(config)
    if never:
        trainer.loader.skip(*never)
    try:
        assert trainer.run() == 0
    except (NonFiniteError, SpikeError, ReplicaError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return ""


def _train(folder: Path, settings: dict[str, Any], options: dict[str, Any]) -> str:
    return train(folder, settings, **options)


def run(pool: Pool, world: int, folder: Path, settings: dict[str, Any], **options: Any) -> str:
    texts = pool.run(world, _train, folder, settings, options)
    assert len({text.partition(":")[0] for text in texts}) == 1, (
        texts
    )  # no rank ended otherwise
    return texts[0]


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoint" / f"step-{step}"


@pytest.mark.parametrize(
    ("layout", "fault", "settings"),
    [
        *((layout, "nan:18", {"on_nonfinite": "skip"}) for layout in LAYOUTS),
        ("FSDP2", "spike:43", {"on_spike": "skip", "spike_min_steps": 8}),
    ],
)
def test_a_skipped_step_never_was(
    fault: str, settings: dict[str, Any], layout: str, pool: Pool, tmp_path: Path
) -> None:
    world, parallelism = LAYOUTS[layout]
    at = int(fault.split(":")[1]) // BATCH + 1
    struck, clean = tmp_path / "struck", tmp_path / "clean"
    options = {"parallelism": parallelism}
    assert run(pool, world, struck, settings, steps=14, fault=fault, **options) == ""
    never = ((at - 1) * BATCH, at * BATCH)
    assert run(pool, world, clean, {}, steps=13, never=never, **options) == ""
    assert same_tensors(step_folder(clean, 13), step_folder(struck, 14))
    skipped = [row["num_skipped"] for row in logged_rows(struck)]
    assert skipped == [0] * (at - 1) + [1] * (15 - at)
    assert (logged_rows(struck)[at - 1]["loss"] is None) == fault.startswith("nan")
    said = (struck / "logs" / "rank-0.log").read_text()
    assert f"step {at}, samples {never[0]} to {never[1] - 1}: loss" in said
    assert "NO UPDATE BY THIS STEP" in said


@pytest.mark.parametrize(
    ("layout", "fault", "settings", "first"),
    [
        ("PP", "nan:43", {"on_nonfinite": "rewind"}, 8 * BATCH),
        (
            "FSDP2",
            "spike:43",
            {"on_spike": "rewind", "spike_min_steps": 8, "rewind_steps": 2},
            9 * BATCH,
        ),
    ],
)
def test_a_rewound_run_never_saw_the_samples(
    fault: str, settings: dict[str, Any], first: int, layout: str, pool: Pool, tmp_path: Path
) -> None:
    """Sample 43 is of step 11, whose samples end before 44; the checkpoint before it is of step 8."""
    world, parallelism = LAYOUTS[layout]
    struck, clean = tmp_path / "struck", tmp_path / "clean"
    options = {"parallelism": parallelism, "steps": 14, "interval": 4}
    assert run(pool, world, struck, settings, fault=fault, **options) == ""
    assert run(pool, world, clean, {}, never=(first, 11 * BATCH), **options) == ""
    assert same_tensors(step_folder(clean, 14), step_folder(struck, 14))
    assert [row["step"] for row in logged_rows(struck)] == list(range(1, 15))
    assert [row["loss"] for row in logged_rows(struck)] == [
        row["loss"] for row in logged_rows(clean)
    ]
    # The mean forgets steps that were taken back.
    assert [row["loss_mean"] for row in logged_rows(struck)] == [
        row["loss"] for row in logged_rows(clean)
    ]
    assert logged_rows(struck)[-1]["num_rewinds"] == 1
    metadata = json.loads((struck / "checkpoint" / "step-14" / "titan.json").read_text())
    assert metadata["data"]["skipped"] == [[first, 44]]
    said = (struck / "logs" / "rank-0.log").read_text()
    assert f"BACK TO STEP 8, ON WITHOUT SAMPLES {first} TO 43" in said


def test_the_ways_it_ends(pool: Pool, tmp_path: Path) -> None:
    def ends(name: str, fault: str, *, interval: int = 100, **settings: Any) -> str:
        options = {"steps": 14, "parallelism": LAYOUTS["FSDP2"][1], "fault": fault}
        return run(pool, 2, tmp_path / name, settings, interval=interval, **options)

    text = ends("stop", "nan:18")
    assert text.startswith("NonFiniteError: step 5: loss nan") and "samples 18 to 19" in text
    assert "These weights are not saved; there is no checkpoint" in text
    assert "the last checkpoint is step 4. Lower optimizer.lr" in ends(
        "saved", "nan:18", interval=4
    )
    text = ends("spike", "spike:43", on_spike="stop", spike_min_steps=8)
    assert text.startswith("SpikeError: step 11, samples 40 to 43: loss "), text
    text = ends("nowhere", "nan:18", on_nonfinite="rewind")
    assert text.endswith("there is no checkpoint to rewind to"), text
    assert ends("warned", "spike:43", on_spike="warn", spike_min_steps=8) == ""
    assert "TRAINED ON" in (tmp_path / "warned" / "logs" / "rank-0.log").read_text()


def test_spike_score_by_hand() -> None:
    before = deque(
        [2.0, 2.1, 1.9, 2.2, 1.8]
    )  # median 2, deviations 0 .1 .1 .2 .2, their median .1
    assert spike_score(2.0 + 1.4826, before) == pytest.approx(10)
    assert spike_score(2.0 - 1.4826, before) == pytest.approx(-10)
    assert spike_score(2.2, deque([2.0] * 9)) == pytest.approx(10)  # 1% of the median at least


def test_a_noisy_falling_loss_has_no_spikes() -> None:
    """Ten thousand steps of a power law with the noise of a small batch."""
    dice = np.random.default_rng(0)
    section = FaultToleranceSection(on_spike="skip")
    recovery = Recovery(section, device=torch.device("cpu"))
    for step in range(10_000):
        loss = 1.7 + 9 * (step + 10) ** -0.3 + dice.normal(0, 0.05)
        assert recovery.decide(loss, 1.0).action == StepAction.TRAIN, step
    assert recovery.decide(loss + 1.0, 1.0).action == StepAction.SKIP


def test_skips_and_rewinds_have_an_end(one_rank: None) -> None:
    for action, limit in (("skip", "max_skips"), ("rewind", "max_rewinds")):
        section = FaultToleranceSection.model_validate(
            {"on_nonfinite": action, "max_skips": 2, "max_rewinds": 2}
        )
        recovery = Recovery(section, device=torch.device("cpu"))
        nan, one = torch.tensor(math.nan), torch.tensor(1.0)
        actions = []
        for _ in range(3):
            assert not recovery.judge(one, nan)
            actions.append(recovery.decision.action.name)
        assert actions == [action.upper(), action.upper(), "STOP"]
        assert f"fault_tolerance.{limit} = 2" in recovery.decision.reason
    section = FaultToleranceSection(on_nonfinite="skip", max_skips=2)
    recovery = Recovery(section, device=torch.device("cpu"))
    for loss in (nan, nan, one, nan, nan, one):  # a good step between them: counted anew
        recovery.judge(loss, one)
        assert recovery.decision.action != StepAction.STOP
    assert recovery.num_skipped == 4


@tabled("world, parallelism, who")
def test_a_flipped_bit_in_one_replica(
    world: int, parallelism: dict[str, int], who: str, pool: Pool, tmp_path: Path
) -> None:
    settings = {"check_replicas_every_n_steps": 2}
    options = {"steps": 6, "parallelism": parallelism}
    assert run(pool, world, tmp_path / "calm", settings, **options) == ""
    fault = f"flip:{world - 1}:3"
    text = run(pool, world, tmp_path / "flipped", settings, fault=fault, **options)
    assert text.startswith("ReplicaError: replicas hold different weights: ") and who in text
    found = logged_rows(tmp_path / "flipped")
    assert len(found) <= 4  # in step 4, the next that is checked
