"""Every optimizer through the training step: sharded as on one process, resumed as if never stopped, early as late."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.jobs import degrees_of
from tests.support.ranks import Pool, RankFailed
from tests.support.steps import build_step
from tests.support.tables import tabled
from titan.checkpoint import manager as checkpoints
from titan.config.schema import CheckpointSection, JobConfig
from titan.data.packing import Batch
from titan.parallel import build_mesh
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.step.train_step import TrainStep

GLOBAL_BATCH, SEQUENCE, VOCABULARY = 4, 32, 256
Options = dict[str, Any]
Degrees = dict[str, int]

ADAMW: Options = {"name": "AdamW"}
BF16_STATES: Options = {
    "name": "AdamW",
    "state_dtype": "bfloat16",
    "implementation": "for-loop",
}
EIGHT_BIT: Options = {"name": "AdamW8bit", "implementation": "for-loop"}
MUON: Options = {"name": "Muon", "ns_dtype": "float32", "adam_lr": 5e-4}
ROUNDED: Options = {"name": "AdamW", "stochastic_rounding": True, "implementation": "for-loop"}
ROUNDED_MUON: Options = {
    "name": "Muon",
    "stochastic_rounding": True,
    "implementation": "for-loop",
}

OPTIMIZERS = [ADAMW, BF16_STATES, EIGHT_BIT, MUON]

DATA_AXES = ("dp_replicate", "dp_shard")
FSDP: Degrees = {"dp_shard": 2}
FSDP_TP: Degrees = {"dp_shard": 2, "tp": 2}


def build(degrees: Degrees, optimizer: Options, **training: Any) -> TrainStep:
    mesh = build_mesh("cpu", **degrees)
    config = JobConfig.model_validate(
        {
            "model": {
                "flavor": "tiny",
                # Nor do the matrices of three layers come out even over the ranks.
                "overrides": {"n_layers": 3, "vocab_size": VOCABULARY, "ffn_dim": 160},
            },
            "training": {
                "mixed_precision_param": "float32",
                "steps": 10,
                "local_batch_size": GLOBAL_BATCH // axis_size(mesh, *DATA_AXES),
            }
            | training,
            "lr_scheduler": {"warmup_steps": 2},
            # An element whose gradient is next to nothing must not take its rounding error as a full step.
            "optimizer": {"lr": 1e-3, "eps": 1e-6} | optimizer,
            "parallelism": degrees_of(degrees),
        }
    )
    return build_step(config, mesh)


def steps(
    of: TrainStep, first: int, last: int, *, accumulation: int = 1
) -> list[tuple[float, float]]:
    """Losses and gradient norms of some steps on batches drawn from their numbers."""
    world, rank = axis_size(of.mesh, *DATA_AXES), axis_rank(of.mesh, *DATA_AXES)
    results = []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        parts = rows.chunk(world * accumulation)[rank::world]
        report = of.train(
            [Batch(tokens_BS=p[:, :-1], labels_BS=p[:, 1:]) for p in parts], step=step
        )
        results.append((report.loss.item(), report.grad_norm.item()))
    return results


def weights(of: TrainStep) -> dict[str, Tensor]:
    return {
        canonical_name(n): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for part in of.model_parts
        for n, p in part.named_parameters()
    }


def train(
    degrees: Degrees, optimizer: Options, training: Options | None = None
) -> dict[str, Any]:
    of = build(degrees, optimizer, **(training or {}))
    return {"results": steps(of, 1, 5), "weights": weights(of)}


def ranks(degrees: Degrees) -> int:
    return math.prod(degrees.values())


def differences(
    results: list[dict[str, Any]], reference: dict[str, Any]
) -> tuple[float, float, float]:
    """Largest in any weight of any rank, the share of weights that differ by more than 1e-6, largest in any loss."""
    weights = [
        (result["weights"][name] - reference["weights"][name]).abs().flatten()
        for result in results  # pipeline stages have other weights
        for name in result["weights"]
    ]
    losses = [
        abs(ours[0] - theirs[0])
        for result in results
        for ours, theirs in zip(result["results"], reference["results"], strict=True)
    ]
    apart = torch.cat(weights)
    return apart.max().item(), (apart > 1e-6).float().mean().item(), max(losses)


def train_each(degrees: Degrees, optimizers: list[Options]) -> list[dict[str, Any]]:
    return [train(degrees, optimizer) for optimizer in optimizers]


@pytest.fixture(scope="module")
def references(pool: Pool) -> dict[str, dict[str, Any]]:
    """One process, by optimizer."""
    return dict(
        zip(map(str, OPTIMIZERS), pool.run(1, train_each, {}, OPTIMIZERS)[0], strict=True)
    )


@pytest.mark.parametrize("degrees", [FSDP, FSDP_TP], ids=str)
def test_equals_one_process(degrees: Degrees, references, pool: Pool) -> None:
    """Moments in bf16 or 8 bits differ where gradients, which agree to 1e-7, fall on either side of the middle between two levels:
    rarely, and by one level (a hundredth of one of the five updates of 1e-3). From the same gradients, all layouts
    compute the same bits: test_small_states.py."""
    by_rank = pool.run(ranks(degrees), train_each, degrees, OPTIMIZERS)
    for optimizer, *results in zip(OPTIMIZERS, *by_rank, strict=True):
        weight, differing, loss = differences(results, references[str(optimizer)])
        rounded = optimizer in (BF16_STATES, EIGHT_BIT)
        assert weight < (1e-4 if rounded else 1e-6), optimizer
        assert differing < 0.02 and loss < 1e-5, optimizer


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 4},  # more ranks than key/value heads: those matrices are whole on each
        {"dp_shard": 2, "cp": 2},
        {"dp_shard": 2, "pp": 2},
        pytest.param({"dp_shard": 4, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_muon_in_every_parallelism(degrees: Degrees, references, pool: Pool) -> None:
    weight, _, loss = differences(
        pool.run(ranks(degrees), train, degrees, MUON), references[str(MUON)]
    )
    assert weight < 1e-6 and loss < 1e-5


def train_early_and_late(
    degrees: Degrees, optimizer: Options, accumulation: int
) -> list[dict[str, Any]]:
    """Each with the most gradients that there ever were when the optimizer stepped."""
    size = GLOBAL_BATCH // (math.prod(degrees.get(a, 1) for a in DATA_AXES) * accumulation)
    runs = []
    for early in (True, False):
        of = build(
            degrees,
            optimizer | {"early_step_in_backward": early},
            max_norm=0.0,
            local_batch_size=size,
        )
        parameters = [p for part in of.model_parts for p in part.parameters()]
        live: list[int] = []

        def count(*_: Any, parameters=parameters, live=live) -> None:
            live.append(sum(p.grad is not None for p in parameters))

        of.optimizer.register_step_pre_hook(count)
        results = steps(of, 1, 5, accumulation=accumulation)
        runs.append({"results": results, "weights": weights(of), "gradients": max(live)})
    return runs


@tabled("degrees, optimizer, accumulation", ids=str)
def test_early_step_equals_the_usual_one(
    degrees: Degrees, optimizer: Options, accumulation: int, pool: Pool
) -> None:
    early, late = pool.run(
        ranks(degrees), train_early_and_late, degrees, optimizer, accumulation
    )[0]
    for name, weight in late["weights"].items():
        assert torch.equal(weight, early["weights"][name]), name
    for ours, theirs in zip(early["results"], late["results"], strict=True):
        # Losses to the bit; of the norm the squares are added in another order.
        assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], rel=1e-6)
    num_parameters = len(late["weights"])
    assert late["gradients"] == num_parameters
    # Those of the earlier micro-batches are there, or else the one that is next.
    assert early["gradients"] == (1 if accumulation == 1 else num_parameters)


def stop_and_resume(
    degrees: Degrees, optimizer: Options, training: Options, folder: str
) -> bool:
    """Whether six steps are the same bits as three, a checkpoint, and three more."""
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=Path(folder))

    def state(of: TrainStep) -> checkpoints.StateDict:
        return checkpoints.model_state(of.model_parts) | checkpoints.optimizer_state(
            of.model_parts, of.optimizer
        )

    whole = build(degrees, optimizer, **training)
    steps(whole, 1, 3)
    path = manager.save(3, state(whole), metadata={})
    expected = steps(whole, 4, 6)
    resumed = build(degrees, optimizer, **training)
    checkpoints.load(path, checkpoints.model_state(resumed.model_parts))
    checkpoints.load(
        path, checkpoints.empty_optimizer_state(path, resumed.model_parts, resumed.optimizer)
    )
    assert steps(resumed, 4, 6) == expected
    ours, theirs = state(resumed), state(whole)
    assert ours.keys() == theirs.keys() and len(ours) > len(weights(whole))
    return all(torch.equal(_local(ours[name]), _local(theirs[name])) for name in ours)


def stop_and_resume_each(
    degrees: Degrees, cases: list[tuple[Options, Options]], folder: str
) -> list[bool]:
    return [
        stop_and_resume(degrees, optimizer, training, f"{folder}/{number}")
        for number, (optimizer, training) in enumerate(cases)
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


PURE_BF16: Options = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}


@pytest.mark.parametrize("degrees", [{}, FSDP], ids=str)
def test_resumes_bit_for_bit(degrees: Degrees, pool: Pool, tmp_path: Path) -> None:
    cases = [
        (BF16_STATES, {}),
        (EIGHT_BIT, {}),
        (MUON, {}),
        (ROUNDED, PURE_BF16),
        (ROUNDED_MUON, PURE_BF16),
    ]
    for same in pool.run(ranks(degrees), stop_and_resume_each, degrees, cases, str(tmp_path)):
        assert same == [True] * len(cases)


def save(degrees: Degrees, optimizer: Options, folder: str) -> dict[str, Tensor]:
    """After two steps; returns the whole state."""
    of = build(degrees, optimizer)
    steps(of, 1, 2)
    state = checkpoints.optimizer_state(of.model_parts, of.optimizer)
    checkpoints.CheckpointManager(CheckpointSection(), run_dir=Path(folder)).save(
        2, checkpoints.model_state(of.model_parts) | state, metadata={}
    )
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def load(degrees: Degrees, optimizer: Options, path: str) -> dict[str, Tensor]:
    of = build(degrees, optimizer)
    state = checkpoints.empty_optimizer_state(Path(path), of.model_parts, of.optimizer)
    checkpoints.load(Path(path), state)
    steps(of, 3, 3)  # it can go on
    state = checkpoints.empty_optimizer_state(Path(path), of.model_parts, of.optimizer)
    checkpoints.load(Path(path), state)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


@pytest.mark.parametrize("optimizer", [EIGHT_BIT, MUON], ids=lambda o: o["name"])
def test_states_go_from_layout_to_layout_unchanged(
    optimizer: Options, pool: Pool, tmp_path: Path
) -> None:
    saved = pool.run(4, save, FSDP_TP, optimizer, str(tmp_path))[0]
    path = str(tmp_path / "checkpoint" / "step-2")
    for degrees in ({}, {"tp": 4}):
        loaded = pool.run(ranks(degrees), load, degrees, optimizer, path)[0]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("other", [ADAMW, MUON, EIGHT_BIT], ids=lambda o: o["name"])
def test_the_checkpoint_of_another_optimizer_is_refused(
    other: Options, pool: Pool, tmp_path: Path
) -> None:
    pool.run(1, save, {}, MUON if other != MUON else EIGHT_BIT, str(tmp_path))
    with pytest.raises(
        RankFailed, match=r"lacks optimizer.*saved from another model or optimizer"
    ):
        pool.run(1, load, {}, other, str(tmp_path / "checkpoint" / "step-2"))
