"""A checkpoint saved under one layout goes on under any other: the same tensors to the bit, the same loss curve."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.commands import Shell
from tests.support.jobs import degrees_of
from tests.support.jobs import job as any_job
from tests.support.ranks import Pool
from tests.support.runs import logged_rows, saved_tensors
from tests.support.steps import build_step
from tests.support.tables import table
from tests.support.trainers import PoolTrainer
from titan.checkpoint import manager as checkpoints
from titan.checks.rules import check_to_run, resolve_layout
from titan.config.schema import JobConfig
from titan.parallel import build_mesh
from titan.parallel.mesh import axis_rank, axis_size
from titan.step.train_step import TrainStep

GLOBAL_BATCH, SEQUENCE, VOCABULARY = 8, 32, 512
Degrees = dict[str, int]
LAYOUTS: dict[str, Degrees] = table(__file__, "layouts")
SLOW = ("HSDP", "FSDP2 on 4", "PP x TP")  # to load into; the default run saves under all ten
LEGS: list[Degrees] = [{"dp_shard": 4}, {"tp": 2, "pp": 2}, {"cp": 2, "dp_shard": 2}, {}]
MTP_LEGS: list[Degrees] = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {}]
LEG_STEPS = 3
STEPS = LEG_STEPS * len(LEGS)


def job(
    degrees: Degrees,
    *,
    folder: Path,
    steps: int,
    seed: int = 0,
    blocks: int = 4,
    modules: int = 0,
) -> JobConfig:
    """The debug model, smaller, with the same global batch under every layout. modules: of multi-token prediction."""
    dp = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    return any_job(
        folder,
        model={
            "overrides": {
                "n_layers": blocks,
                "vocab_size": VOCABULARY,
                "num_mtp_modules": modules,
            }
        },
        training={"local_batch_size": GLOBAL_BATCH // dp, "steps": steps},
        # An element whose gradient is next to nothing must not take its rounding error as a full step.
        optimizer={"lr": 1e-3, "eps": 1e-6},
        lr_scheduler={"warmup_steps": 2, "total_steps": STEPS},
        parallelism=degrees_of(degrees),
        checkpoint={"interval": LEG_STEPS},
        debug={"seed": seed},
    )


# ---- the loss curve --------------------------------------------------------------------------------


# By the number of a sample: the step that trained on it, and its tokens.
Seen = dict[int, tuple[int, tuple[int, ...]]]


def run_leg(degrees: Degrees, folder: Path, steps: int, modules: int) -> tuple[int, int, Seen]:
    """Train up to `steps` from the run folder's newest checkpoint; the first step, samples read by the end, and what this rank saw."""
    config = job(degrees, folder=folder, steps=steps, modules=modules)
    check_to_run(config, world_size=dist.get_world_size())
    trainer = PoolTrainer(config)
    first = trainer.step + 1
    train_step, seen = trainer.train_step.train, Seen()

    def watched(batches: Any, *, step: int, accept: Any = None) -> Any:
        for batch in batches:
            for row, tokens in enumerate(batch.tokens_BS.tolist()):
                assert (
                    seen.setdefault(batch.first_sample + row, (step, tuple(tokens)))[0] == step
                )
        return train_step(batches, step=step, accept=accept)

    trainer.train_step.train = watched
    assert trainer.loader.state_dict()["position"] == (first - 1) * GLOBAL_BATCH
    assert trainer.run() == 0
    position = trainer.loader.state_dict()["position"]
    trainer.close()
    return first, position, seen


@pytest.mark.parametrize(
    ("legs", "modules"), [(LEGS, 0), (MTP_LEGS, 2)], ids=["next token", "MTP"]
)
def test_the_loss_curve_goes_on_under_other_layouts(
    legs: list[Degrees], modules: int, pool: Pool, tmp_path: Path, shell: Shell
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    [(first, position, in_order)] = pool.run(1, run_leg, {}, whole, STEPS, modules)
    assert (first, position) == (1, STEPS * GLOBAL_BATCH)
    assert {n: step for n, (step, _) in in_order.items()} == {
        number: number // GLOBAL_BATCH + 1 for number in range(STEPS * GLOBAL_BATCH)
    }
    assert len({tokens for _, tokens in in_order.values()}) == STEPS * GLOBAL_BATCH
    seen = Seen()
    for number, degrees in enumerate(legs):
        end = (number + 1) * LEG_STEPS
        result = pool.run(prod(degrees.values()), run_leg, degrees, parts, end, modules)
        assert {leg[:2] for leg in result} == {(end - LEG_STEPS + 1, end * GLOBAL_BATCH)}
        for leg in result:
            assert not [n for n, was in leg[2].items() if seen.setdefault(n, was) != was]
    assert seen == in_order  # the same samples in the same steps, none twice, none left out
    expected, found = logged_rows(whole), logged_rows(parts)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert [row["lr"] for row in found] == [row["lr"] for row in expected]
    for key in ("loss", "grad_norm", *(["mtp_loss"] if modules else [])):
        assert [row[key] for row in found] == pytest.approx(
            [r[key] for r in expected], rel=1e-5
        )
    losses = [row["loss"] for row in expected]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.04  # these were not twelve idle steps
    states = [
        saved_tensors(folder / "checkpoint" / f"step-{STEPS}") for folder in (whole, parts)
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        difference = torch.linalg.vector_norm(states[1][name] - value)
        assert difference <= 1e-5 * torch.linalg.vector_norm(value), name
    # Their exports have the same names and shapes.
    exports: list[dict[str, torch.Size]] = []
    for folder in (whole, parts):
        out = folder / "exported"
        shell(f"convert to-hf {folder} {out}")
        files = map(load_file, out.glob("*.safetensors"))
        exports.append({name: tensor.shape for file in files for name, tensor in file.items()})
    assert exports[0] == exports[1]
    assert sum(name.endswith("eh_proj.weight") for name in exports[0]) == modules


# ---- every layout into every other -----------------------------------------------------------------


def build(degrees: Degrees, folder: Path, *, seed: int) -> TrainStep:
    config = job(degrees, folder=folder, steps=STEPS, seed=seed, blocks=2)
    layout = resolve_layout(config, dist.get_world_size())
    mesh = build_mesh("cpu", **layout.degrees)
    return build_step(config, mesh)


def train_a_step(train_step: TrainStep) -> None:
    world = axis_size(train_step.mesh, "dp_replicate", "dp_shard")
    rank = axis_rank(train_step.mesh, "dp_replicate", "dp_shard")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    mine = rows.chunk(world)[rank]
    batch: Any = SimpleNamespace(
        tokens_BS=mine[:, :-1], labels_BS=mine[:, 1:], positions_BS=None, document_ids_BS=None
    )
    train_step.train([batch], step=1)


def whole_state(state: checkpoints.StateDict) -> checkpoints.StateDict:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.items()
    }


def save_under(degrees: Degrees, folder: Path) -> checkpoints.StateDict:
    """Train a step and save; returns what was in memory, gathered (of this rank's pipeline stage)."""
    train_step = build(degrees, folder, seed=0)
    train_a_step(train_step)
    state = checkpoints.model_state(train_step.model_parts)
    state |= checkpoints.optimizer_state(train_step.model_parts, train_step.optimizer)
    section = job(degrees, folder=folder, steps=STEPS).checkpoint
    checkpoints.CheckpointManager(section, run_dir=folder).save(1, state, metadata={})
    return whole_state(state)


def load_under(degrees: Degrees, folders: list[Path]) -> list[set[str]]:
    """Load each folder's checkpoint into other weights and compare with what was saved; the names compared."""
    compared = []
    train_step = build(degrees, folders[0], seed=1)
    for folder in folders:
        saved: dict[str, Tensor] = torch.load(folder / "expected.pt")
        path = folder / "checkpoint" / "step-1"
        train_step.optimizer.state.clear()
        with torch.no_grad():
            for part in train_step.model_parts:
                for parameter in part.parameters():
                    parameter.fill_(float("nan"))
        checkpoints.load(path, checkpoints.model_state(train_step.model_parts))
        empty = checkpoints.empty_optimizer_state(
            path, train_step.model_parts, train_step.optimizer
        )
        checkpoints.load(path, empty)
        state = checkpoints.model_state(train_step.model_parts)
        state |= checkpoints.optimizer_state(train_step.model_parts, train_step.optimizer)
        loaded = whole_state(state)
        different = [n for n, value in loaded.items() if not torch.equal(value, saved[n])]
        assert not different, f"{folder.name}: {different}"
        compared.append(set(loaded))
    train_a_step(train_step)  # what was loaded can be trained
    return compared


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, set[str]]:
    """A run folder for each layout, with a checkpoint and `expected.pt`, and the names of its tensors."""
    folders: dict[Path, set[str]] = {}
    for name, degrees in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        state: checkpoints.StateDict = {}
        for result in pool.run(prod(degrees.values()), save_under, degrees, folder):
            for key, value in result.items():
                assert torch.equal(state.setdefault(key, value), value)  # ranks agree
        torch.save(state, folder / "expected.pt")
        folders[folder] = set(state)
    return folders


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_any_layout_loads_into_any_other(layout: str, saved, pool: Pool) -> None:
    degrees = LAYOUTS[layout]
    results = pool.run(prod(degrees.values()), load_under, degrees, list(saved))
    for number, names in enumerate(saved.values()):
        assert any(name.endswith(".exp_avg_sq") for name in names)
        assert set().union(*(result[number] for result in results)) == names
