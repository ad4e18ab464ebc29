"""Traces recorded by the trainer, read back: the figures are those of the model, and recording changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.commands import Shell, command
from tests.support.jobs import SMALL, job, with_changes
from tests.support.metrics import read_json_lines
from tests.support.profiler_traces import adds_up, calls, modules_ms, parts_s
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.schema import JobConfig, ProfilingSection
from titan.observe.clock import StepTimer
from titan.tools import profiling_hook as recording
from titan.tools.profiling_hook import Profiling, name_modules
from titan.tools.trace_files import read_trace

main = command("profile")

LAYERS = SMALL["model"]["overrides"]["n_layers"]
# Matrix products of the forward pass: q, k, v, o and three of the feed-forward in each block, and the output layer.
PRODUCTS = 7 * LAYERS + 1
TRACED: dict[str, Any] = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 1}


# The debug model with one chunk of loss.
BASE = with_changes(
    SMALL,
    training={"seq_len": 16},
    loss={"chunk_tokens": 64},
    checkpoint={"enable": False},
)


def checked_job(folder: Path, *, world_size: int = 1, **changes: dict[str, Any]) -> JobConfig:
    config = job(folder, base=BASE, **changes)
    check_to_run(config, world_size=world_size)
    return config


def run(config: JobConfig) -> None:
    trainer = Trainer(config)
    run_to_end(trainer)


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in read_json_lines(folder / "metrics.jsonl")]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small a model only gets slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    run(checked_job(folder, profiling=TRACED, training={"steps": 4}))
    return folder


def test_traces_come_on_schedule_and_change_nothing(traced: Path, tmp_path: Path) -> None:
    run(checked_job(tmp_path, training={"steps": 4}))
    assert numbers(traced) == numbers(tmp_path)
    files = {str(path.relative_to(traced)) for path in traced.rglob("*.json.gz")}
    assert files == {f"traces/step-{step}/rank-0.json.gz" for step in (2, 4)}
    assert not (tmp_path / "traces").exists()


def test_a_cpu_trace_adds_up_and_counts_the_models_products(traced: Path) -> None:
    for step in (2, 4):
        report = read_trace(traced / f"traces/step-{step}/rank-0.json.gz")
        assert report.num_steps == 1 and adds_up(report)
        assert calls(report)["matmul"] == 3 * PRODUCTS
        assert parts_s(report)["communication_exposed"] == 0
        for part in ("matmul", "attention", "elementwise", "copies", "optimizer"):
            assert parts_s(report)[part] > 0


def test_every_module_has_its_time_forward_and_backward(traced: Path) -> None:
    modules = modules_ms(read_trace(traced / "traces/step-4/rank-0.json.gz"))
    parts = ["attention_norm", "attention", "ffn_norm", "feed_forward"]
    blocks = [f"layers.{i}.{part}" for i in range(LAYERS) for part in parts]
    assert {*blocks, "norm", "loss", "clip", "optimizer"} <= modules.keys()
    for name in ("tok_embeddings", *blocks, "norm", "loss"):
        assert modules[name]["forward"] > 0 and modules[name]["backward"] > 0, name
        assert modules[name]["recomputed"] == 0


def test_hooks_and_the_loader_are_named(traced: Path) -> None:
    report = read_trace(traced / "traces/step-4/rank-0.json.gz")
    names = {event.name for event in report.events}
    assert {"titan loader", "titan hook Metrics.step_end"} <= names
    # A trace ends after the row of its step.
    [step] = [event for event in report.events if event.name.startswith("ProfilerStep")]
    [row] = [event for event in report.events if event.name == "titan hook Metrics.step_end"]
    [load] = [event for event in report.events if event.name == "titan loader"]
    assert row.parent is step and load.begin < row.begin


def test_the_command(traced: Path, shell: Shell) -> None:
    page = shell(f"profile {traced}").out
    assert (
        page.startswith(f"{traced}/traces/step-4/rank-0.json.gz\nstep ")
        and "not attributed" in page
    )


def test_recomputation_is_told_from_the_forward_pass(tmp_path: Path) -> None:
    run(checked_job(tmp_path, profiling=TRACED, activation_checkpoint={"mode": "full"}))
    report = read_trace(tmp_path / "traces/step-2/rank-0.json.gz")
    assert adds_up(report)
    # The last of a block's products is only begun: its inputs are the last tensors to be saved.
    assert calls(report)["matmul"] == 3 * PRODUCTS + 7 * LAYERS
    modules = modules_ms(report)
    for i in range(LAYERS):
        row = modules[f"layers.{i}.attention"]
        assert row["forward"] > 0 and row["recomputed"] > 0 and row["backward"] > 0
    assert modules["norm"]["recomputed"] == 0  # not part of a block


def test_a_compiled_block_is_named_as_a_whole(tmp_path: Path) -> None:
    compiled = {"enable": True, "components": ["model"], "backend": "aot_eager"}
    run(checked_job(tmp_path, profiling=TRACED, compile=compiled))
    report = read_trace(tmp_path / "traces/step-2/rank-0.json.gz")
    assert adds_up(report)
    assert calls(report)["matmul"] == 3 * PRODUCTS
    modules = modules_ms(report)
    for i in range(LAYERS):
        assert modules[f"layers.{i}"]["forward"] > 0 and modules[f"layers.{i}"]["backward"] > 0
    assert not any(name.endswith("attention") for name in modules)


def train_in_pool(folder: Path, sections: dict[str, dict[str, Any]]) -> None:
    trainer = PoolTrainer(
        checked_job(folder, world_size=dist.get_world_size(), profiling=TRACED, **sections)
    )
    assert trainer.run() == 0
    trainer.close()


def test_ranks_that_shard_show_their_communication(
    pool: Pool, tmp_path: Path, shell: Shell
) -> None:
    pool.run(2, train_in_pool, tmp_path, {})
    for rank in (0, 1):
        report = read_trace(tmp_path / f"traces/step-2/rank-{rank}.json.gz")
        assert adds_up(report)
        assert calls(report)["matmul"] == 3 * PRODUCTS
        assert parts_s(report)["communication_exposed"] > 0
        # Each block gathers its parameters twice and reduces its gradients once, and so does the root but for one gather.
        assert calls(report)["communication_exposed"] >= 3 * LAYERS + 2
        assert all(f"layers.{i}.attention" in modules_ms(report) for i in range(LAYERS))
    out = shell(f"profile {tmp_path} --rank 1 --json").out
    assert "rank-1.json.gz" in json.loads(out)["trace"]


def test_a_pipeline_rank_traces_its_own_blocks(pool: Pool, tmp_path: Path) -> None:
    parallel = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    pool.run(2, train_in_pool, tmp_path, {"parallelism": parallel})
    names = [
        {n for n in modules_ms(read_trace(tmp_path / f"traces/step-2/rank-{rank}.json.gz")) if n.endswith(".attention")}
        for rank in (0, 1)
    ]  # fmt: skip
    assert names[0] and names[1] and not names[0] & names[1]
    assert names[0] | names[1] == {f"layers.{i}.attention" for i in range(LAYERS)}


# ---- schedule, ranges, snapshots -------------------------------------------------------------------


def make(tmp_path: Path, *, device: str = "cpu", **section: Any) -> tuple[Any, list[str]]:
    """A hook that has started, and what it says. Its run trains nothing."""
    said: list[str] = []
    run = SimpleNamespace(
        config=SimpleNamespace(profiling=ProfilingSection(**section)),
        run_dir=tmp_path,
        rank=3,
        device=torch.device(device),
        train_step=SimpleNamespace(model_parts=[]),
        console=SimpleNamespace(message=said.append),
        loader=SimpleNamespace(next_step=list),
        timer=StepTimer(total_steps=9),
        hooks=[],
        step=0,
    )
    return Profiling(run), said  # pyrefly: ignore[bad-argument-type]


def train(profiling: Any, *steps: int) -> None:
    for step in steps:
        profiling.trainer.step = step
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiling.step_end()


@pytest.mark.parametrize("first", [0, 5])  # 5: resumed while a trace would be recorded
def test_several_steps_in_one_trace(tmp_path: Path, first: int) -> None:
    section = {"profile_freq": 4, "profiler_warmup": 1, "profiler_active": 3}
    profiling, said = make(tmp_path, enable_profiling=True, **section)
    profiling.trainer.step = first
    profiling.start()
    train(profiling, *range(first + 1, 9))
    profiling.close()
    path = tmp_path / "traces/step-8/rank-3.json.gz"
    report = read_trace(path)
    assert report.num_steps == 3 and calls(report)["matmul"] == 1
    assert str(path) in said[-1] and len(said) == (2 if first == 0 else 1)


def test_a_trace_cut_short_is_not_written(tmp_path: Path) -> None:
    profiling, said = make(tmp_path, enable_profiling=True, profile_freq=8, profiler_active=2)
    profiling.start()
    train(profiling, *range(1, 8))
    profiling.close()
    assert not said and not (tmp_path / "traces").exists()


def test_ranges_are_taken_away() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 2))})
            self.output = nn.Linear(2, 2)

    model = Model()
    before = [dict(module.__dict__) for module in model.modules()]
    removes = name_modules([model])
    assert len(removes) == 3  # layers.0, layers.0.0, output
    assert "_compiled_call_impl" in model.output.__dict__
    for remove in removes:
        remove()
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_memory_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int | None] = []
    monkeypatch.setattr(recording, "record_memory_history", kept.append)
    monkeypatch.setattr(
        recording, "dump_memory_history", lambda path: path.write_text("snapshot")
    )
    section = {"enable_memory_snapshot": True, "profile_freq": 2}
    profiling, said = make(tmp_path, device="cuda", **section)
    profiling.start()
    train(profiling, 1, 2)
    profiling.trainer.step = 3
    profiling.failed(torch.OutOfMemoryError("no memory"))
    profiling.close()
    assert kept == [100_000] and len(said) == 2
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.pickle"))
    folder = "memory_snapshot"
    assert found == [f"{folder}/step-2/rank-3.pickle", f"{folder}/step-3-out-of-memory/rank-3.pickle"]  # fmt: skip


def test_a_cpu_has_no_memory_snapshots_and_says_so(tmp_path: Path) -> None:
    profiling, said = make(tmp_path, enable_memory_snapshot=True, profile_freq=1)
    profiling.start()
    train(profiling, 1)
    profiling.failed(torch.OutOfMemoryError("no memory"))
    profiling.close()
    assert said == ["no memory snapshots: they are the CUDA allocator's, and this is a cpu"]
    assert not list(tmp_path.iterdir())


def test_a_schedule_that_cannot_be(tmp_path: Path) -> None:
    section = {"profile_freq": 3}
    with pytest.raises(ConfigError) as caught:
        checked_job(tmp_path, profiling={"enable_profiling": True} | section)
    (problem,) = caught.value.problems
    assert problem.key == "profiling.profile_freq"
    checked_job(tmp_path, profiling=section)  # not profiling: says nothing
