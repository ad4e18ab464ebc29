"""Turns of two micro-batches: the order by time stamps on gloo, in a plain training loop, and what is refused."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import Pool
from titan.base.untrusted import InputError
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.schema import JobConfig, ParallelismSection
from titan.contrib.expert_overlap.overlap import take_turns
from titan.parallel import (
    Overlap,
    apply_ep,
    build_mesh,
    build_sparse_mesh,
    submesh,
)
from titan.parallel.collectives import turns
from titan.step.parallelize import overlap_of

DIM, ROWS = 32, 64
START, WAIT = "all_to_all_single", "wait_tensor"


class Experts(nn.Module):
    """Two experts, of which a rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, DIM, DIM) / DIM**0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([x @ w for x, w in zip(parts, self.weight, strict=True)])


class Block(nn.Module):
    """A product for all tokens, and then half of them to each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(DIM, DIM), Experts()
        self.dispatcher: Any = None

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.tensor([len(x) // 2, len(x) // 2])
        return x + self.dispatcher(self.dense(x).tanh(), counts, self.experts)


class Model(nn.Module):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


class Stamps(TorchDispatchMode):
    """Note when operations end, and which micro-batch runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[float, int | None, str, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1
        self.rows.append((time.perf_counter(), turns.number, func._opname, backward))
        return result


def train(paired: bool, recomputes: bool) -> tuple[list[Any], list[Tensor]]:
    """Run two micro-batches on one of two ranks, in a plain training loop with torch's FSDP2."""
    torch.manual_seed(0)
    mesh = build_mesh("cpu", dp_shard=2)
    ep = submesh(build_sparse_mesh(mesh, ep=2), "ep")
    model = Model(recomputes=recomputes)
    assert ep is not None
    apply_ep(model, mesh=ep, moe_type=Block)
    own = {p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh["dp_shard"], ignored_params=own)
    overlap = Overlap(model)
    batches = [torch.randn(ROWS, DIM) for _ in range(2)]
    losses = [partial(lambda x: model(x).square().sum(), x) for x in batches]
    with Stamps() as stamps:
        if paired:
            results = overlap.forward(losses)
            overlap.backward(results)
        else:
            for loss in losses:
                loss().backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return stamps.rows, [g.to_local() if hasattr(g, "to_local") else g for g in gradients]


@pytest.mark.parametrize("recomputes", [False, True])
def test_one_computes_while_the_other_travels(recomputes: bool, pool: Pool) -> None:
    alone = pool.run(2, train, False, recomputes)
    for (rows, gradients), (_, expected) in zip(
        pool.run(2, train, True, recomputes), alone, strict=True
    ):
        assert all(map(torch.equal, gradients, expected))
        assert rows == sorted(rows, key=lambda row: row[0])  # one at a time
        hidden = {0: 0, 1: 0}
        for number in hidden:
            begun = None
            for at, (_, turn, name, _) in enumerate(rows):
                if turn == number and name == START:
                    begun = at
                elif turn == number and name == WAIT and begun is not None:
                    others = [n for _, t, n, _ in rows[begun:at] if t == 1 - number]
                    hidden[number] += "mm" in others or "addmm" in others
                    begun = None
        # Of three blocks, tokens and results, forward and backward, and tokens once more. At the ends nobody is beside them.
        exchanges = 3 * (2 * 2 + recomputes)
        assert min(hidden.values()) >= exchanges - 2


def test_an_error_of_either_ends_both() -> None:
    def other() -> None:
        assert turns.hand_over is not None
        for _ in range(3):
            turns.hand_over()

    def fails() -> None:
        assert turns.hand_over is not None
        turns.hand_over()
        raise ZeroDivisionError

    for pair in ((other, fails), (fails, other), (fails, fails)):
        with pytest.raises(ZeroDivisionError):
            take_turns(*pair)
    assert turns.number is None
    assert take_turns(lambda: 1, lambda: 2) == (1, 2)  # the thread goes on


class Turn(TorchDispatchMode):
    """Note the micro-batches that enter and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int | None] = []

    def __enter__(self) -> Any:
        self.numbers.append(turns.number)
        return super().__enter__()

    def __exit__(self, *row: Any) -> None:
        self.numbers.append(turns.number)
        super().__exit__(*row)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_both_run_under_the_modes_of_the_caller() -> None:
    packed: list[int | None] = []
    mode, default = Turn(), torch.get_default_device()

    def run() -> Any:
        assert turns.hand_over is not None
        turns.hand_over()
        x = torch.ones(2, 2, requires_grad=True)
        result = x @ x
        return result.dtype, x.device, result.requires_grad, torch.is_autocast_cache_enabled()

    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(turns.number) or x, lambda x: x
    )
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with hooks, autocast:
        one, two = take_turns(run, run)
    assert one == two == (torch.bfloat16, torch.device("cpu"), True, False)
    assert packed.count(0) == packed.count(1) > 0
    with torch.no_grad(), torch.device("meta"), mode:
        one, two = take_turns(run, run)
    assert one == two == (torch.float32, torch.device("meta"), False, True)
    # The second one enters the mode in its turn, not beside the first.
    assert mode.numbers == [None, 1, 1, None] and torch.get_default_device() == default


def test_what_a_model_must_not_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"'1' draws random numbers"):
        Overlap(model)
    with pytest.raises(InputError, match=r"^parallelism.expert_overlap: module '1' draws"):
        overlap_of(model, ParallelismSection(expert_overlap=True))


def shard_a_part() -> str:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0], mesh=build_mesh("cpu", dp_shard=2)["dp_shard"])
    with pytest.raises(ValueError) as error:
        Overlap(model)
    return str(error.value)


def test_the_model_itself_is_sharded(pool: Pool) -> None:
    assert "shard the model itself" in pool.run(2, shard_a_part)[0]


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"parallelism": {"expert_parallel_degree": 1}}, "expert_overlap", "needs expert_parallel_degree = 2"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "expert_overlap", "DualPipeV"),
        ({"optimizer": {"early_step_in_backward": True}, "training": {"max_norm": 0}}, "expert_overlap", "early_step"),
        ({"training": {"global_batch_size": -1}}, "expert_overlap", "training.global_batch_size = 16"),
        # The key that a later phase sets is at fault, and not the job's own.
        ({"phase": [{"from_step": 9, "global_batch_size": 8}]}, "global_batch_size", "4 x 2 data-parallel ranks = 8), and parallelism.expert_overlap needs two; use 16"),
        ({"parallelism": {"expert_overlap": False}}, "expert_overlap_reduce_once", "needs expert_overlap = true"),
    ],
)  # fmt: skip
def test_rules_say_what_would_do(changes: dict[str, Any], key: str, message: str) -> None:
    parallel = {"expert_parallel_degree": 2, "expert_overlap": True, "expert_overlap_reduce_once": True}  # fmt: skip
    sections: dict[str, Any] = {
        "model": {"name": "qwen3", "flavor": "tiny_moe"},
        "training": {"local_batch_size": 4, "global_batch_size": 32, "seq_len": 64},
        "parallelism": parallel,
    }
    for section, values in changes.items():
        sections[section] = (
            sections.get(section, {}) | values if isinstance(values, dict) else values
        )
    with pytest.raises(ConfigError) as error:
        check_to_run(JobConfig.model_validate(sections), world_size=2)
    found = {problem.key.partition(".")[2]: problem.message for problem in error.value.problems}
    assert message in found[key]
