"""Traces recorded by the trainer, read back: the figures are those of the model, and recording changes nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerAction

from tests.support.commands import Shell, command
from tests.support.jobs import SMALL, job, with_changes
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.schema import JobConfig, ProfilingSection
from titan.tools import profiler as recording
from titan.tools.profiler import Profiler, name_modules
from titan.tools.profiling_hook import Profiling
from titan.tools.trace import Report
from titan.tools.trace_files import read_report

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


def adds_up(report: Report) -> None:
    assert sum(report.parts_s.values()) == pytest.approx(report.step_s)
    totals = [row["total"] for row in report.modules_s.values()]
    assert sum(totals) == pytest.approx(report.step_s)


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
        report = read_report(traced / f"traces/step-{step}/rank-0.json.gz")
        assert (report.device, report.num_steps) == ("cpu", 1)
        adds_up(report)
        assert report.calls["matmul"] == 3 * PRODUCTS
        assert report.calls["communication_exposed"] == report.communication_hidden_s == 0
        for part in ("matmul", "attention", "elementwise", "copies", "optimizer"):
            assert report.parts_s[part] > 0


def test_every_module_has_its_time_forward_and_backward(traced: Path) -> None:
    modules_s = read_report(traced / "traces/step-4/rank-0.json.gz").modules_s
    parts = ["attention_norm", "attention", "ffn_norm", "feed_forward"]
    blocks = [f"layers.{i}" + (f".{part}" if part else "") for i in range(LAYERS) for part in ("", *parts)]  # fmt: skip
    around = ["norm", "output", "loss", "clip", "optimizer", "(elsewhere)"]
    assert list(modules_s) == ["tok_embeddings", *blocks, *around]
    for name in ("tok_embeddings", *blocks, "norm", "loss"):
        assert modules_s[name]["forward"] > 0 and modules_s[name]["backward"] > 0, name
        assert modules_s[name]["recompute"] == 0


def test_the_command(traced: Path, shell: Shell) -> None:
    page = shell(f"profile {traced}").out
    assert page.startswith(f"{traced}/traces/step-4/rank-0.json.gz\n1 step, ")
    assert "CPU: self times" in page and f"layers.*.attention ({LAYERS})" in page
    assert max(map(len, page.splitlines()[1:])) <= 100


def test_recomputation_is_told_from_the_forward_pass(tmp_path: Path) -> None:
    run(checked_job(tmp_path, profiling=TRACED, activation_checkpoint={"mode": "full"}))
    report = read_report(tmp_path / "traces/step-2/rank-0.json.gz")
    adds_up(report)
    # The last of a block's products is only begun: its inputs are the last tensors to be saved.
    assert report.calls["matmul"] == 3 * PRODUCTS + 7 * LAYERS
    for i in range(LAYERS):
        row = report.modules_s[f"layers.{i}.attention"]
        assert row["forward"] > 0 and row["recompute"] > 0 and row["backward"] > 0
    assert report.modules_s["norm"]["recompute"] == 0  # not part of a block


def test_a_compiled_block_is_named_as_a_whole(tmp_path: Path) -> None:
    compiled = {"enable": True, "components": ["model"], "backend": "aot_eager"}
    run(checked_job(tmp_path, profiling=TRACED, compile=compiled))
    report = read_report(tmp_path / "traces/step-2/rank-0.json.gz")
    adds_up(report)
    assert report.calls["matmul"] == 3 * PRODUCTS
    assert [n for n in report.modules_s if n.startswith("layers.")] == [f"layers.{i}" for i in range(LAYERS)]  # fmt: skip
    for i in range(LAYERS):
        row = report.modules_s[f"layers.{i}"]
        assert row["forward"] > 0 and row["backward"] > 0


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
        report = read_report(tmp_path / f"traces/step-2/rank-{rank}.json.gz")
        adds_up(report)
        assert report.calls["matmul"] == 3 * PRODUCTS
        assert report.parts_s["communication_exposed"] > 0
        # Each block gathers its parameters twice and reduces its gradients once, and so does the root but for one gather.
        assert report.calls["communication_exposed"] >= 3 * LAYERS + 2
        assert all(report.modules_s[f"layers.{i}"]["total"] > 0 for i in range(LAYERS))
    out = shell(f"profile {tmp_path} --rank 1").out
    assert "rank-1.json.gz" in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("2 of 2 ranks, ms: step ")


def test_a_pipeline_rank_traces_its_own_blocks(pool: Pool, tmp_path: Path) -> None:
    parallel = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    pool.run(2, train_in_pool, tmp_path, {"parallelism": parallel})
    names = [
        {n for n in read_report(tmp_path / f"traces/step-2/rank-{rank}.json.gz").modules_s if n.endswith(".attention")}
        for rank in (0, 1)
    ]  # fmt: skip
    assert names[0] and names[1] and not names[0] & names[1]
    assert names[0] | names[1] == {f"layers.{i}.attention" for i in range(LAYERS)}


# ---- schedule, ranges, snapshots -------------------------------------------------------------------


def make(tmp_path: Path, *, device: str = "cpu", **section: Any) -> tuple[Profiler, list[str]]:  # fmt: skip
    said: list[str] = []
    profiler = Profiler(
        ProfilingSection(**section),
        run_dir=tmp_path,
        rank=3,
        device=torch.device(device),
        parts=[],
        say=said.append,
    )
    return profiler, said


def test_schedule(tmp_path: Path) -> None:
    profiler, _ = make(tmp_path, profile_freq=6, profiler_warmup=2, profiler_active=3)
    off, warm = ProfilerAction.NONE, ProfilerAction.WARMUP
    record, save = ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE
    actions = [profiler.action_of(step) for step in range(1, 13)]
    assert actions == [off, warm, warm, record, record, save] * 2


@pytest.mark.parametrize("first", [0, 5])  # 5: resumed while a trace would be recorded
def test_several_steps_in_one_trace(tmp_path: Path, first: int) -> None:
    profiler, said = make(
        tmp_path, enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=3
    )  # fmt: skip
    for step in range(first + 1, 9):
        profiler.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end()
    profiler.close()
    path = tmp_path / "traces/step-8/rank-3.json.gz"
    report = read_report(path)
    assert report.num_steps == 3 and report.calls["matmul"] == 1
    assert str(path) in said[-1] and len(said) == (2 if first == 0 else 1)


def test_shapes_are_recorded_on_request(tmp_path: Path) -> None:
    for record_shapes in (False, True):
        folder = tmp_path / str(record_shapes)
        profiler, _ = make(folder, enable_profiling=True, profile_freq=2, profiler_warmup=1, record_shapes=record_shapes)  # fmt: skip
        for step in (1, 2):
            profiler.begin(step)
            torch.ones(8, 4) @ torch.ones(4, 2)
            profiler.end()
        profiler.close()
        with gzip.open(folder / "traces/step-2/rank-3.json.gz") as file:
            events = json.load(file)["traceEvents"]
        [matmul] = [e for e in events if e.get("name") == "aten::mm"]
        assert matmul["args"].get("Input Dims") == ([[8, 4], [4, 2]] if record_shapes else None)


def test_a_trace_cut_short_is_not_written(tmp_path: Path) -> None:
    profiler, said = make(tmp_path, enable_profiling=True, profile_freq=4, profiler_active=2)
    for step in (1, 2, 3):
        profiler.begin(step)
        profiler.end()
    profiler.close()
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
    profiler, said = make(tmp_path, device="cuda", enable_memory_snapshot=True, profile_freq=2)
    for step in (1, 2, 3):
        profiler.begin(step)
        profiler.end()
    profiler.out_of_memory()
    profiler.close()
    assert kept == [100_000] and len(said) == 2
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.pickle"))
    folder = "memory_snapshot"
    assert found == [f"{folder}/step-2/rank-3.pickle", f"{folder}/step-3-out-of-memory/rank-3.pickle"]  # fmt: skip


def test_a_cpu_has_no_memory_snapshots_and_says_so(tmp_path: Path) -> None:
    profiler, said = make(tmp_path, enable_memory_snapshot=True, profile_freq=1)
    profiler.begin(1)
    profiler.end()
    profiler.out_of_memory()
    profiler.close()
    assert said == ["no memory snapshots: they are the CUDA allocator's, and this is a cpu"]
    assert not list(tmp_path.iterdir())


def test_running_out_of_memory_writes_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    trainer = Trainer(checked_job(tmp_path))
    written = []
    profiling = trainer.hook(Profiling)
    assert profiling is not None
    monkeypatch.setattr(
        profiling.profiler, "out_of_memory", lambda: written.append(trainer.step)
    )

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(trainer.train_step, "train", fail)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.run()
    trainer.close()
    assert written == [1]


def test_a_schedule_that_cannot_be(tmp_path: Path) -> None:
    section = {"profile_freq": 3}
    with pytest.raises(ConfigError) as caught:
        checked_job(tmp_path, profiling={"enable_profiling": True} | section)
    (problem,) = caught.value.problems
    assert problem.key == "profiling.profile_freq"
    checked_job(tmp_path, profiling=section)  # not profiling: says nothing
