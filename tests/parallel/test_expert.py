"""Experts across layouts: forced balance, checkpoints, initial weights, and a module that is not titan's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.jobs import SMALL, degrees_of, job, with_changes
from tests.support.operations import Watch
from tests.support.ranks import Pool
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer
from titan.checkpoint.manager import optimizer_state
from titan.config.schema import JobConfig
from titan.models.common.dispatch import dispatch
from titan.ops.replicas import ReplicaError, require_equal_replicas
from titan.parallel import apply_ep, build_mesh, build_sparse_mesh
from titan.parallel.expert import RoundRobin
from titan.parallel.mesh import submesh

MOE = with_changes(
    SMALL,
    model={
        "name": "qwen3",
        "flavor": "tiny_moe",
        "overrides": {"n_layers": 2, "load_balance_coeff": 1e-2, "global_balance_coeff": 1e-2},
    },
    training={"global_batch_size": 8},
    checkpoint={"enable": False},
    debug={"seed": 3},
)


def sections(layout: dict[str, int], **changes: dict[str, Any]) -> dict[str, Any]:
    """The small job under a layout, whose global batch is the same everywhere."""
    parallelism = {**degrees_of({"dp": 1} | layout), **changes.pop("parallelism", {})}
    return with_changes(MOE, parallelism=parallelism, **changes)


def run(folder: Path, base: dict[str, Any]) -> dict[str, Any]:
    """Train on one rank of the pool; the whole model's tensors, the losses and the loads."""
    trainer = PoolTrainer(job(folder, base=base))
    losses = []
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
        losses.append(trainer.result.loss)
    for hook in trainer.hooks:
        hook.close()
    names = {}
    for part in trainer.train_step.model_parts:
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            names[name] = whole.detach().clone()
    return {"losses": losses, "tensors": names}


def ranks(layout: dict[str, int]) -> int:
    return int(np.prod([n for axis, n in layout.items() if axis != "ep"]))


# ---- routes ------------------------------------------------------------------------------------


class Seen:
    """Count how often each expert was chosen."""

    def __init__(self) -> None:
        self.counts = torch.zeros(8, dtype=torch.int64)

    def get(self, moe: Any, tokens: Tensor) -> None: ...

    def put(self, moe: Any, ids_TK: Tensor) -> None:
        self.counts += ids_TK.flatten().bincount(minlength=8)


def chosen(folder: Path, base: dict[str, Any]) -> list[int]:
    """Train a step on one rank of the pool. Return how often each expert was chosen."""
    trainer, seen = PoolTrainer(job(folder, base=base)), Seen()
    for moe in trainer.train_step.balance.moes.values():
        moe.route_sources.append(seen)
    trainer.train_one_step()
    for hook in trainer.hooks:
        hook.close()
    return seen.counts.tolist()


def test_forced_balance_gives_all_experts_equal_loads(pool: Pool, tmp_path: Path) -> None:
    for layout in ({}, {"dp": 2, "ep": 2}, {"cp": 2, "tp": 2, "ep": 4}):
        base = sections(layout, debug={"moe_force_load_balance": True})
        counts = pool.run(ranks(layout), chosen, tmp_path / "-".join(layout), base)
        # 8 samples, 32 tokens, 2 layers, 2 experts of a token, over 8 experts
        assert np.sum(counts, axis=0).tolist() == [8 * 32 * 2 * 2 // 8] * 8


@tabled("experts, k")
def test_forced_balance_spreads_a_token_over_the_ranks(experts: int, k: int) -> None:
    """Copies on one rank would travel once each and meet there, which no even router does."""
    one_rank: Any = SimpleNamespace(mesh_dim_names=())
    routes = RoundRobin(one_rank, balanced=False)
    moe = SimpleNamespace(config=SimpleNamespace(top_k=k, num_experts=experts))
    ids_TK = routes.get(moe, torch.empty(2, experts, 1))
    assert ids_TK is not None and ids_TK.shape == (2 * experts, k)
    assert ids_TK.flatten().bincount(minlength=experts).tolist() == [2 * k] * experts
    for ranks in (n for n in range(1, experts + 1) if experts % n == 0):
        owners_TK = ids_TK // (experts // ranks)
        most = max(int(owners_T.bincount().max()) for owners_T in owners_TK)
        assert most <= (1 if ranks >= k else -(-k // ranks) + 1), ranks


# ---- checkpoints and weights -------------------------------------------------------------------


def test_initial_weights_do_not_depend_on_the_degree(pool: Pool, tmp_path: Path) -> None:
    [one] = pool.run(1, legs, tmp_path / "one", sections({}), 0)
    for layout in ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4}):
        results = pool.run(ranks(layout), legs, tmp_path / "many", sections(layout), 0)
        for name, tensor in one["before"].items():
            assert torch.equal(results[0]["before"][name], tensor), (layout, name)


def legs(folder: Path, base: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train to a step of the schedule, resuming what is there, as after a kill."""
    trainer = PoolTrainer(job(folder, base=base))
    before = _state(trainer)
    while trainer.step < steps:
        trainer.train_one_step()
    after = _state(trainer)
    for hook in trainer.hooks:
        hook.close()
    return {"before": before, "after": after, "step": trainer.step}


def _state(trainer: PoolTrainer) -> dict[str, Tensor]:
    state = {}
    for part in trainer.train_step.model_parts:
        for name, tensor in part.state_dict().items():
            state[name] = (
                tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
            )
        moments = optimizer_state([part], trainer.train_step.optimizer)
        for name, tensor in moments.items() if trainer.step else ():
            state[name] = (
                tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
            )
    return state


@pytest.mark.parametrize("model", [("qwen3", "tiny_moe"), ("gpt_oss", "tiny")], ids=" ".join)
def test_a_run_goes_on_under_other_degrees(
    model: tuple[str, str], pool: Pool, tmp_path: Path
) -> None:
    """EP 4, then EP 2 x TP 2, then one process: each resumes what the one before had, to the bit."""
    last: dict[str, Tensor] = {}
    changes = {
        "model": {**MOE["model"], "name": model[0], "flavor": model[1]},
        "training": {**MOE["training"], "steps": 6},
        "checkpoint": {"enable": True, "interval": 2},
    }
    for number, layout in enumerate([{"dp": 4, "ep": 4}, {"dp": 2, "tp": 2, "ep": 2}, {}], 1):
        base = sections(layout, **changes)
        results = pool.run(ranks(layout), legs, tmp_path, base, 2 * number)
        for name, tensor in last.items():
            assert torch.equal(results[0]["before"][name], tensor), name
        last = results[0]["after"]
        assert any(name.endswith("last_loads") and last[name].sum() for name in last)
        assert any(name.endswith("moe.bias") and last[name].count_nonzero() for name in last)
        # Weights, and two moments of each.
        moments = [name for name in last if name.endswith(("exp_avg", "exp_avg_sq"))]
        assert len(moments) == 2 * len([name for name in last if name.endswith("exp_avg")]) > 40


# ---- alone -------------------------------------------------------------------------------------


class Doublers(nn.Module):
    """Anyone's experts: each multiplies its rows by one number."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, num + 1))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows * self.scale.repeat_interleave(counts)[:, None]


class Mixture(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.experts = Doublers(num)
        self.dispatcher: Any = None


# Which of 8 experts are hot in a step on R ranks. Two of them get three quarters of the tokens. The names are those of
# NVIDIA/Megatron-LM#7488.
HOT: dict[str, Callable[[int, int], Sequence[int]]] = {
    "W0 balanced": lambda step, ranks: (),
    "W1 hot experts": lambda step, ranks: (1, 2, 3),
    "W2 hot rank": lambda step, ranks: range(8 // ranks),
    "W3 spread hot experts": lambda step, ranks: range(0, 8, 8 // ranks),
    "W4 ragged sources": lambda step, ranks: (0, 7),
    "W5 experts without tokens": lambda step, ranks: range(8 // ranks),
    "W6 rotating hot experts": lambda step, ranks: ((2 * step) % 8, (2 * step + 1) % 8),
    "W7 burst": lambda step, ranks: (6, 7) if step == 1 else (),
}


def routed(name: str, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers (T, 1) as tokens, and two different experts of each (T, 2)."""
    hot = HOT[name](step, ranks)
    length = 16 * rank if "ragged" in name else 16
    experts = []
    for token in range(length):
        few = hot if hot and (token % 4 or "without" in name) else range(8)
        experts.append([few[(token + step + k) % len(few)] for k in (0, 1)])
    numbers = torch.arange(1.0, length + 1)[:, None] + 100 * rank
    return numbers, torch.tensor(experts, dtype=torch.int64).reshape(-1, 2)


def use_alone(ranks: int, name: str) -> list[Any]:
    import torch.distributed as dist

    mesh = build_sparse_mesh(build_mesh("cpu", dp_shard=ranks), ep=ranks)
    ep = submesh(mesh, "ep")
    assert ep is not None
    mixture = Mixture(8)
    apply_ep(mixture, mesh=ep, moe_type=Mixture)
    found = []
    for step in range(3):
        x_TD, ids_TK = routed(name, step, dist.get_rank(), ranks)
        x_TD.requires_grad_()
        run = partial(mixture.dispatcher, experts=mixture.experts)
        y_TD = dispatch(x_TD, ids_TK, 8, run).sum(1)
        mixture.experts.scale.grad = None
        y_TD.sum().backward()
        gradient: Any = mixture.experts.scale.grad
        found.append([y_TD.detach(), x_TD.grad, gradient.full_tensor()])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", HOT)
def test_imbalance_is_computed_exactly(name: str, ranks: int, pool: Pool) -> None:
    """Experts that multiply by 1 to 8, and whole numbers as tokens: outputs and gradients are equal bits."""
    results = pool.run(ranks, use_alone, ranks, name)
    for step in range(3):
        sums = torch.zeros(8)
        for rank, found in enumerate(results):
            x_TD, ids_TK = routed(name, step, rank, ranks)
            sums.index_add_(0, ids_TK.flatten(), x_TD.expand(-1, 2).flatten())
            factors_TD = (ids_TK + 1.0).sum(1, keepdim=True)
            assert torch.equal(found[step][0], factors_TD * x_TD)
            assert torch.equal(found[step][1], factors_TD)
        assert all(torch.equal(found[step][2], sums) for found in results)


def order(into: list[str]) -> Watch:
    """Write down the operations of an exchange and of what runs meanwhile."""
    names = "all_to_all_single", "wait_tensor", "sin", "cos"
    return Watch(lambda func, *_: into.extend({func._opname}.intersection(names)))


def run_meanwhile(_: int) -> tuple[list[str], list[str], list[float]]:
    mesh = build_sparse_mesh(build_mesh("cpu", dp_shard=2), ep=2)
    ep = submesh(mesh, "ep")
    assert ep is not None
    mixture = Mixture(2)
    apply_ep(mixture, mesh=ep, moe_type=Mixture)
    rows = torch.ones(4, 1, requires_grad=True)
    forward, backward = list[str](), list[str]()
    shared: list[Tensor] = []
    counts = torch.tensor([3, 1])
    with order(forward):
        out = mixture.dispatcher(
            rows * 1, counts, mixture.experts, lambda: shared.append(rows.sin())
        )
    with order(backward):
        (out + shared[0]).sum().backward()
    assert rows.grad is not None
    return forward, backward, rows.grad.flatten().tolist()


def test_what_an_exchange_calls_runs_while_results_and_their_gradients_travel(
    pool: Pool,
) -> None:
    start, wait = "all_to_all_single", "wait_tensor"
    for forward, backward, gradient in pool.run(2, run_meanwhile, 0):
        counts = [start, wait]
        assert forward == [*counts, start, wait, start, "sin", wait]
        assert backward == [start, "cos", wait, start, wait]
        expected = [scale + math.cos(1) for scale in (1, 1, 1, 2)]
        assert gradient == pytest.approx(expected)


def test_chunks_of_experts_need_experts() -> None:
    from titan.checks.rules import check_to_run
    from titan.config.errors import ConfigError

    config = JobConfig.model_validate({"moe": {"expert_chunk_rows": 8}})
    with pytest.raises(ConfigError, match=r"moe\.expert_chunk_rows"):
        check_to_run(config, world_size=1)


# ---- 8 bits ------------------------------------------------------------------------------------


def train_in(converter: str, layout: dict[str, int], folder: Path) -> dict[str, Any]:
    section, name = converter.removeprefix("quantize.").split(".")
    base = sections(
        layout,
        model={
            **MOE["model"],
            "converters": [converter] if name != "none" else [],
            "overrides": {"n_layers": 2, "init_std": 0.2},
        },
        quantize={section: {name: {"emulate": True}}} if name != "none" else {},
    )
    return run(folder, base)


@pytest.mark.parametrize("kind", ["float8", pytest.param("mx", marks=pytest.mark.slow)])
def test_eight_bits_are_near_and_the_same_on_every_layout(
    kind: str, pool: Pool, tmp_path: Path
) -> None:
    [plain] = pool.run(1, train_in, "quantize.grouped_mm.none", {}, tmp_path / "plain")
    results = {}
    for layout in ({}, {"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}):
        converter = f"quantize.grouped_mm.{kind}"
        folder = tmp_path / "-".join(layout)
        results[str(layout)] = pool.run(ranks(layout), train_in, converter, layout, folder)[0]
    one = results.pop("{}")
    # It is 8 bits that was used, and they are not far off.
    assert 1e-4 < abs(one["losses"][1] / plain["losses"][1] - 1) < 1e-2
    for other in results.values():
        # Which rows share a scale, or a block of 32, in the product for a weight's gradient follows the layout; the rest does not.
        assert other["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
        assert other["losses"][1] == pytest.approx(one["losses"][1], rel=1e-3)


# ---- compiled ----------------------------------------------------------------------------------


def train_compiled(
    folder: Path, base: dict[str, Any]
) -> tuple[list[float], list[int], list[str]]:
    """The losses, the rows that the experts of this rank got in each call, and what the compiler complains about."""
    trainer = PoolTrainer(job(folder, base=base))
    rows: list[int] = []
    for moe in trainer.train_step.balance.moes.values():
        moe.experts.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    losses = []
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
        losses.append(trainer.result.loss)
    log = trainer.train_step.compile_log
    return losses, rows, [] if log is None else list(log.warnings())


def test_one_program_takes_any_number_of_rows(pool: Pool, tmp_path: Path) -> None:
    bf16 = {"training": {**MOE["training"], "steps": 4, "mixed_precision_param": "bfloat16"}}
    compiled = {"compile": {"enable": True, "backend": "aot_eager"}}
    layout = {"dp": 2, "ep": 2}
    eager = pool.run(2, train_compiled, tmp_path / "eager", sections(layout, **bf16))
    base = sections(layout, **bf16, **compiled)
    for rank, (losses, rows, complaints) in enumerate(
        pool.run(2, train_compiled, tmp_path / "compiled", base)
    ):
        assert complaints == []
        assert len(set(rows)) > 3
        assert losses == pytest.approx(eager[rank][0], rel=1e-3)


# ---- replicas ----------------------------------------------------------------------------------


def differ_in_an_expert(folder: Path, base: dict[str, Any]) -> str:
    """Train with the replicas compared in each step; then change an expert of one replica."""
    trainer = PoolTrainer(job(folder, base=base))
    trainer.train_one_step()
    if trainer.rank == 3:
        weight: Any = trainer.train_step.model_parts[0].get_parameter("layers.1.moe.experts.w2")
        weight.detach().to_local()[0, 0, 0] += 1e-3
    try:
        require_equal_replicas(trainer.train_step.model_parts)
    except ReplicaError as error:
        return str(error)
    return ""


def test_replicas_of_experts_are_compared(pool: Pool, tmp_path: Path) -> None:
    base = sections(
        {"dp": 2, "ep": 2},
        parallelism={"data_parallel_replicate_degree": 2},
        fault_tolerance={"check_replicas_every_n_steps": 1},
    )
    messages = pool.run(4, differ_in_an_expert, tmp_path, base)
    assert all("layers.1.moe.experts.w2" in message for message in messages), messages


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_chunks_change_nothing(recompute: str, pool: Pool, tmp_path: Path) -> None:
    # Adam divides a gradient by its size. One of 2e-10, where others are 4e-4, is rounding, and would make a whole step.
    layout = {"dp": 2, "ep": 2}
    changes = {"activation_checkpoint": {"mode": recompute}, "optimizer": {"eps": 1e-5}}
    [whole, _] = pool.run(2, run, tmp_path / "whole", sections(layout, **changes))
    base = sections(layout, moe={"expert_chunk_rows": 16}, **changes)
    [chunked, _] = pool.run(2, run, tmp_path / "chunked", base)
    assert chunked["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    for name, tensor in whole["tensors"].items():
        torch.testing.assert_close(chunked["tensors"][name], tensor, rtol=1e-5, atol=1e-6)
