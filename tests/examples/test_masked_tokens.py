"""The task of examples/masked_tokens: found by its entry points, trained, resumed on another layout and simulated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.commands import finished
from tests.support.jobs import degrees_of, job
from tests.support.metadata import forget, write_metadata
from tests.support.ranks import Pool
from tests.support.runs import logged_rows
from tests.support.tables import table
from titan.checks.rules import check
from titan.losses.loss import IGNORED
from titan.tasks import task_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "masked_tokens"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what pip would leave of the package's metadata, on the path of this process and of its children."""
    write_metadata(FOLDER, tmp_path)
    for folder in (tmp_path, FOLDER):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, FOLDER, ROOT))))
    forget()
    yield tmp_path
    forget()


def masked(**sections: Any) -> Any:
    sections = {"training": {"seq_len": 64, "local_batch_size": 4}, **sections}
    return job(model={"name": "encoder", "flavor": "tiny"}, **sections)


def two_steps(degrees: dict[str, int], settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps on the task's first 8 samples."""
    from tests.support.steps import build_step
    from titan.parallel import axis_rank, build_mesh

    forget()  # read before this process's path had the package
    world = degrees.get("dp_shard", 1)
    config = masked(
        training={
            "mixed_precision_param": "float32",
            "local_batch_size": 4 // world,
            "seq_len": 64,
        },
        lr_scheduler={"warmup_steps": 1},
        parallelism=degrees_of(degrees) | settings,
    )
    mesh = build_mesh("cpu", **degrees)
    train_step = build_step(config, mesh)
    loader = train_step.task.loader(rank=axis_rank(mesh, "dp_shard"), world=world)
    reports = [train_step.train(loader.next_step(), step=step) for step in (1, 2)]
    loader.close()
    return [(report.loss.item(), report.grad_norm.item()) for report in reports]


LAYOUTS = table(__file__, "layouts")


def test_two_steps_are_the_same_on_every_layout(pool: Pool, installed: Path) -> None:
    (alone,) = pool.run(1, two_steps, {}, {})
    assert 7 < alone[1][0] < alone[0][0] < 9  # log(2048) = 7.6
    for degrees, settings in LAYOUTS:
        for found in pool.run(2, two_steps, degrees, settings):
            for step, expected in zip(found, alone, strict=True):
                assert step == pytest.approx(expected, rel=1e-5), (degrees, settings)


def test_a_batch_has_masks_of_its_samples(installed: Path) -> None:
    task = task_of(masked(task={"options": {"share": 0.25}}))
    [batch] = task.loader(rank=0, world=1).next_step()
    is_masked = batch.labels_BS != IGNORED
    assert 0.15 < is_masked.float().mean() < 0.35
    assert (batch.tokens_BS[is_masked] == 263).all() and not (
        batch.tokens_BS[~is_masked] == 263
    ).any()
    # The second rank of two has the second half of the same samples.
    halves = task_of(
        masked(
            task={"options": {"share": 0.25}}, training={"seq_len": 64, "local_batch_size": 2}
        )
    )
    [half] = halves.loader(rank=1, world=2).next_step()
    assert torch.equal(half.labels_BS, batch.labels_BS[2:]) and half.first_sample == 2
    # Padding, -1 in a row, is never masked.
    rows = np.full((1, 65), -1)
    rows[0, :10] = 65
    padded: Any = task.collate(task.dataset("train", rank=0, world=1))(rows, first_sample=0)
    assert (padded.labels_BS[0, 10:] == IGNORED).all() and (
        padded.labels_BS[0, :10] == 65
    ).any()


def test_options_are_checked(installed: Path) -> None:
    assert not check(masked())
    for section, key, message in table(__file__, "options_are_checked"):
        [problem] = check(masked(task=section))
        assert problem.key == key and message in problem.message, problem
    # Another family's model is trained on it by name.
    named = {"name": "masked_tokens", "options": {"share": 0.5}}
    config = job(model={"name": "llama3", "flavor": "tiny"}, task=named)
    assert not check(config) and type(task_of(config)).__name__ == "MaskedTokens"


def run(command: str, *settings: str, ranks: int = 1, cwd: Path) -> str:
    words = [
        sys.executable,
        *f"-m titan.cli {command} {ROOT}/train_configs/debug_model.toml".split(),
    ]
    if ranks > 1:
        words[1:3] = f"-m torch.distributed.run --nproc-per-node={ranks} -m titan.train".split()
        words.remove(command)
    words += ["--model.name=encoder", "--model.flavor=tiny", "--training.seq_len=64", *settings]
    words += ["--training.local_batch_size=2", "--training.global_batch_size=8"]
    words += [
        "--validation.enable=true",
        "--validation.freq=4",
        "--data.validation_fraction=0.01",
    ]
    words += ["--validation.steps=2", "--lr_scheduler.warmup_steps=1"]
    done = finished(words, cwd=cwd)
    return done.stdout


def test_a_run_is_resumed_on_another_layout_and_simulated(installed: Path) -> None:
    def rows(folder: str) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in logged_rows(installed / folder)}

    save = ("--checkpoint.enable=true", "--checkpoint.interval=4", "--metrics.log_freq=1")
    run("train", "--training.steps=6", *save, "--job.dump_folder=a", cwd=installed)
    run(
        "train",
        "--training.steps=4",
        "--lr_scheduler.total_steps=6",
        *save,
        "--job.dump_folder=b",
        cwd=installed,
    )
    tp = ("--parallelism.tensor_parallel_degree=2",)
    run(
        "train", "--training.steps=6", *save, *tp, "--job.dump_folder=b", ranks=2, cwd=installed
    )
    whole, resumed = rows("a"), rows("b")
    for step in range(1, 7):
        assert resumed[step]["loss"] == pytest.approx(whole[step]["loss"], rel=1e-5)
    assert whole[4]["validation_loss"] and "bits_per_byte" not in whole[4]
    page = run("sim", "--world-size", "2", "--hardware", "h100-sxm", cwd=installed)
    assert "tokens/s" in page
