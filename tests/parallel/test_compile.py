"""What the compiler did is told: programs, seconds, recompilations, graph breaks; and a restart finds the cache."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from inspect import getsourcefile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.tensor import DTensor
from torch.utils import flop_counter

from tests.support.commands import finished
from tests.support.ranks import Pool
from tests.support.runs import logged_rows
from titan.contrib.small_adam.optimizer import _update_shard
from titan.models import qwen3
from titan.models.llama3 import FLAVORS, TENSOR_PLAN, build_model
from titan.models.llama3.model import Block
from titan.parallel import apply_tp, build_mesh, initialize
from titan.parallel.activation import apply_ac
from titan.parallel.compile import CompileLog, apply_compile
from titan.parallel.sac_save_list import DEFAULT_KEEP
from titan.parallel.torch_compat import set_memory_budget
from titan.run.train import set_compile_cache


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def debug_model(layers: int) -> nn.Module:
    model = build_model(dataclasses.replace(FLAVORS["tiny"], n_layers=layers))
    initialize(model, seed=0, std_of=model.init_std)
    return model


def step(model: nn.Module, tokens: int = 32) -> None:
    model(torch.arange(2 * tokens).view(2, tokens)).square().mean().backward()


@pytest.mark.parametrize("recomputed", ["", "by op", "whole"])
def test_equal_blocks_are_compiled_once(recomputed: str) -> None:
    model = debug_model(layers=4)
    log = CompileLog("4 blocks")
    if recomputed == "by op":
        apply_ac(model, keep=DEFAULT_KEEP)
    apply_compile(model, backend="aot_eager")
    if recomputed == "whole":
        apply_ac(model)
    step(model)
    assert re.fullmatch(r"compiled 4 blocks: 1 program, \d+\.\d s", log.summary())
    step(model)
    assert log.summary().startswith("compiled 4 blocks: 1 program,")
    assert list(log.warnings()) == []


def test_models_that_keep_the_same_share_programs() -> None:
    log = CompileLog("2 models")
    for _ in range(2):
        model = debug_model(layers=1)
        apply_ac(model, keep=["aten.mm"])
        apply_compile(model, backend="aot_eager")
        step(model)
    assert log.summary().startswith("compiled 2 models: 1 program,")


def test_each_kind_of_block_is_compiled() -> None:
    """Nine kinds, one more than torch's limit."""
    model = debug_model(layers=9)
    log = CompileLog("9 blocks")
    for layer in range(9):
        keep = [f"aten.mm@{n}" for n in range(layer % 5)] + ["aten.silu"] * (layer // 5)
        apply_ac(model, blocks=[layer], keep=keep, by_op=True)
    apply_compile(model, backend="aot_eager", kinds=9)
    step(model)
    assert log.summary().startswith("compiled 9 blocks: 9 programs,")


def test_a_recompilation_is_told_once_with_its_reason() -> None:
    model = debug_model(layers=2)
    log = CompileLog("2 blocks")
    apply_compile(model, backend="aot_eager")
    step(model)
    assert list(log.warnings()) == []
    step(model, tokens=48)
    (warning,) = log.warnings()
    assert warning.startswith("recompiled forward (model.py:")
    assert "size mismatch at index 1. expected 32, actual 48" in warning
    assert list(log.warnings()) == []
    assert "2 programs" in log.summary()


def test_routers_are_programs_of_their_own() -> None:
    """torch takes what it must wrap, such as a partial or a function under torch's decorator, for one function."""
    model = qwen3.build_model(dataclasses.replace(qwen3.FLAVORS["tiny_moe"], n_layers=1))
    initialize(model, seed=0, std_of=model.init_std)
    log = CompileLog("1 block")
    apply_compile(model, backend="aot_eager")
    step(model)
    assert list(log.warnings()) == []


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.relu()


def model_that_breaks() -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([Breaking(), Breaking()])
    return model


def test_a_graph_break_is_told_with_its_reason() -> None:
    model = model_that_breaks()
    log = CompileLog("2 blocks")
    apply_compile(model, backend="aot_eager")
    for block in model.get_submodule("layers").children():
        block(torch.randn(2, 4)).sum().backward()
    (warning,) = log.warnings()
    assert warning.startswith("graph break in forward (test_compile.py:")
    assert "User-inserted graph break" in warning and "\n" not in warning


def test_fullgraph_makes_a_graph_break_an_error() -> None:
    model = model_that_breaks()
    apply_compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="graph_break"):
        next(model.get_submodule("layers").children())(torch.randn(2, 4))


def _saved_by_first_block(model: Any) -> int:
    """Train a step. Return the bytes of what the first block keeps for its backward pass, without its parameters."""
    first = next(iter(model.layers.values()))
    weights = {_local(p).untyped_storage().data_ptr() for p in first.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() >= 2**10:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    first.register_forward_pre_hook(lambda *_: hooks.__enter__())
    first.register_forward_hook(lambda *_: hooks.__exit__())
    step(model)
    return sum(storage.nbytes() for storage in kept.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_bytes(ranks: int) -> dict[float, int]:
    """What the first block saves for its backward pass, by memory budget; run on each tensor-parallel rank."""
    saved: dict[float, int] = {}
    for budget in (1.0, 0.5, 0.0):
        torch.compiler.reset()
        model = debug_model(layers=2)
        if ranks > 1:
            mesh = build_mesh("cpu", tp=ranks)
            apply_tp(
                model,
                mesh=mesh["tp"],
                plan=TENSOR_PLAN,
                num_kv_heads=FLAVORS["debugmodel"].n_kv_heads,
            )
        apply_compile(
            model,
            backend="aot_eager_decomp_partition",
            memory_budget=budget,
            preserve_rng_state=ranks == 1,
        )
        saved[budget] = _saved_by_first_block(model)
    apply_compile(debug_model(layers=1))  # sets the budget back to 1
    return saved


def test_memory_budget() -> None:
    """All of what a block needs again is kept, some of it, or nothing but what came in."""
    saved = saved_bytes(1)
    block_input = 2 * 32 * 64 * 4
    rotations = 2 * 32 * 16 * 4
    assert saved[0.0] == block_input + rotations
    assert saved[0.0] < saved[0.5] < 0.7 * saved[1.0]
    assert saved[1.0] > 8 * block_input


def test_a_memory_budget_counts_grouped_heads() -> None:
    """The compiler weighs attention by its operations. torch 2.11 refused to count those of the kernels for GPUs."""
    whole, grouped = (2, 8, 64, 16), (2, 2, 64, 16)
    count, back = flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count
    try:
        set_memory_budget(0.5)
        flops = flop_counter.sdpa_flop_count(whole, grouped, grouped)
        assert flops == count(whole, whole, whole) == 2 * 2 * 2 * 8 * 64 * 64 * 16
        flops = flop_counter.sdpa_backward_flop_count(whole, whole, grouped, grouped)
        assert flops == back(whole, whole, whole, whole)
    finally:
        set_memory_budget(1.0)


def test_memory_budget_under_tensor_parallelism(pool: Pool) -> None:
    """The graph holds the DeviceMesh of its weights, whose size torch does not know."""
    block_input = 2 * 32 * 64 * 4
    for saved in pool.run(2, saved_bytes, 2):
        assert saved[0.0] < saved[0.5] <= saved[1.0] - 2 * block_input


def test_what_costs_no_speed_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scalar that becomes an input, and an update's programs for other kinds of parameters."""
    metrics = {"start_time_us": 1, "co_firstlineno": 7, "is_forward": True}

    def compiled(function: Any, **more: Any) -> Any:
        of = metrics | {"co_name": function.__name__, "co_filename": getsourcefile(function)}
        return type("Metrics", (), {"__getattr__": lambda _, key: (of | more).get(key)})()

    log = CompileLog("2 blocks")
    reason = "<class 'torch._dynamo.exc.TensorifyScalarRestartAnalysis'>"
    one = compiled(
        _update_shard, compile_id=1, restart_reasons={reason}, recompile_reason="dtype mismatch"
    )
    two = compiled(
        Block.forward,
        compile_id=2,
        restart_reasons={"a print"},
        recompile_reason="size mismatch",
    )
    monkeypatch.setattr(torch._dynamo.utils, "get_compilation_metrics", lambda: [one, two])
    assert list(log.warnings()) == [
        "graph break in forward (model.py:7): a print",
        "recompiled forward (model.py:7): size mismatch",
    ]


def test_the_cache_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As asked; else the environment's; else the user's cache folder. Others cannot write into it."""
    variable, usual = "TORCHINDUCTOR_CACHE_DIR", tmp_path / "titan" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for asked, set_, expected in (
        ("", str(tmp_path / "environment"), tmp_path / "environment"),
        ("", "", usual),
        (str(tmp_path / "programs"), "", tmp_path / "programs"),
    ):
        monkeypatch.setenv(variable, set_)
        set_compile_cache(asked)
        assert os.environ[variable] == str(expected)
        assert expected.stat().st_mode & 0o777 == 0o700
    expected.chmod(0o775)
    set_compile_cache(asked)
    assert os.environ[variable] == str(usual)
    [line] = capsys.readouterr().err.splitlines()
    assert f"{expected} is not used" in line and "chmod -R go-w" in line


def test_a_user_without_a_home_has_a_folder_of_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("titan.checks.machine.why_unwritable", lambda folder: "no permission")
    set_compile_cache("")
    assert os.environ[variable] == str(tmp_path / f"titan-compile-{os.getuid()}")


def test_the_cache_of_several_nodes_is_on_each_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not in $HOME, which is a network's disk there; and never in a folder that others can write to."""
    variable, local = "TORCHINDUCTOR_CACHE_DIR", tmp_path / f"titan-compile-{os.getuid()}"
    usual = tmp_path / "home" / "titan" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for ranks, expected in (("8", local), ("8", usual), ("16", usual)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setenv(variable, "")
        set_compile_cache("")
        assert os.environ[variable] == str(expected)
        local.chmod(0o777)


@pytest.mark.slow
def test_a_restart_takes_its_programs_from_the_cache(tmp_path: Path) -> None:
    settings = [
        "--training.steps=2",
        "--training.local_batch_size=1",
        "--training.seq_len=32",
        "--training.dataset=synthetic",
        "--lr_scheduler.warmup_steps=0",
        "--model.overrides.n_layers=2",
        "--checkpoint.enable=false",
        "--compile.enable=true",
    ]
    settings.append(f"--compile.cache_folder={tmp_path / 'programs'}")
    lines, losses = [], []
    for run in ("first", "second"):
        out = tmp_path / run
        job = ["train_configs/debug_model.toml", *settings, f"--job.dump_folder={out}"]
        result = finished(
            [sys.executable, "-m", "titan.train", *job],
            cwd=Path(__file__).parents[2],
            timeout=240,
        )
        lines.append(
            re.search(r"compiled 2 blocks, the loss and the update: .*", result.stdout)
        )
        losses.append([row["loss"] for row in logged_rows(out)])
    first, second = (line.group() if line else "" for line in lines)
    assert re.search(r": 5 programs, \d+\.\d s$", first), first
    assert re.search(r"5 from the cache$", second), second
    assert any((tmp_path / "programs").iterdir())
    assert losses[0] == losses[1]
