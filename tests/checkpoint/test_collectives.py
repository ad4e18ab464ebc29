"""Collectives of a save: none for the tensors of the state, and a fixed number for the commit, over the checkpoints' own group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import fsdp

from tests.support.jobs import ROOT, job
from tests.support.operations import Watch
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer

LAYOUTS = {
    "FSDP2 2": {"data_parallel_shard_degree": 2},
    "TP 2": {"tensor_parallel_degree": 2},
    "PP 2": {"pipeline_parallel_degree": 2},
    "HSDP 2 x 2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
}


def _boxed(args: Any) -> Iterator[Any]:
    """Yield the process groups among an operator's arguments."""
    for x in args:
        if type(x).__name__ == "ScriptObject":
            with_name = dist.ProcessGroup.unbox(x) if "ProcessGroup" in str(x._type()) else None
            if with_name is not None:
                yield with_name


@contextmanager
def counted(into: list[tuple[str, str]]) -> Iterator[None]:
    """Note the names and groups of the collectives of this thread, which are operators of torch."""

    def see(function: Any, args: Any, _: Any) -> None:
        if function.namespace in ("c10d", "_c10d_functional"):
            groups = [getattr(x, "group_name", "") for x in _boxed(args)]
            groups += [x for x in args if isinstance(x, str)]
            into.append((function._opname, next(filter(None, groups), "?")))

    with Watch(see):
        yield


def save(folder: Path, mode: str, parallelism: dict[str, int], blocks: int) -> dict[str, Any]:
    """Save in the middle of a run on this rank. Return the collectives of each part, by operator and group."""
    config = job(
        folder,
        model={"flavor": "tiny", "overrides": {"n_layers": blocks}},
        training={"steps": 4, "local_batch_size": 2},
        parallelism=parallelism,
        checkpoint={"async_mode": mode, "interval": 100},
    )
    trainer = PoolTrainer(config)
    manager, state = trainer.checkpoints, trainer.checkpointing.state
    begun, written, commit = [], [], manager._write
    threads = []

    def write(*args: Any, **named: Any) -> str:
        threads.append(current_thread() is main_thread())
        with counted(written):
            return commit(*args, **named)

    setattr(manager, "_write", write)  # noqa: B010
    step: list[tuple[str, str]] = []
    trainer.train_one_step()
    with counted(step):
        trainer.train_one_step()
    with counted(begun):
        tensors = state()
    own = manager.group.process_group
    assert own is not None
    started: list[tuple[str, str]] = []
    with counted(started if mode != "disabled" else []):
        manager.save(2, tensors, metadata=trainer.checkpointing.metadata(), wait=False)
        trainer.train_step.before_change()
    with counted(step):
        trainer.train_one_step()  # while the save is written
    assert manager.poll(wait=True)
    trainer.close()
    return {
        "tensors": len(tensors),
        "state": begun,
        "start": started,
        "write": written,
        "step": step,
        "own": own.group_name,
        "in the main thread": threads,
    }


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("FSDP2 2", "disabled"),
        ("FSDP2 2", "async_with_pinned_mem"),
        *((layout, "async") for layout in LAYOUTS),
    ],
)
def test_a_state_needs_no_communication(
    layout: str, mode: str, pool: Pool, tmp_path: Path
) -> None:
    parallelism = LAYOUTS[layout]
    ranks = 4 if len(parallelism) == 2 else 2
    counts = []
    for blocks in (2, 6):
        folder = tmp_path / str(blocks)
        for found in pool.run(ranks, save, folder, mode, parallelism, blocks):
            # A training step communicates, so that this counts something.
            assert len(found["step"]) > 5 and found["own"] not in {g for _, g in found["step"]}
            # The state is this rank's shards, and its copy is a copy.
            assert found["state"] == found["start"] == []
            assert found["tensors"] > 20 and found["write"]
            assert {group for _, group in found["write"]} == {found["own"]}
            assert found["in the main thread"] == [mode == "disabled"]
            counts.append(len(found["write"]))
    assert {*counts} == {15}  # on every rank, however many tensors there are


def test_memory_waits_for_no_stream() -> None:
    """FSDP2 and titan free memory without `record_stream`, after which the time of freeing is the device's. FSDP1 has it."""

    def callers(folder: Path) -> set[str]:
        files = (f for f in folder.rglob("*.py") if "tests" not in f.relative_to(folder).parts)
        return {file.name for file in files if ".record_stream(" in file.read_text("utf-8")}

    sharding = Path(fsdp.__file__).parent
    assert "_common_utils.py" in callers(sharding)
    assert not callers(sharding / "_fully_shard")
    assert not callers(ROOT / "titan") | callers(ROOT / "models")
