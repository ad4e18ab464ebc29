"""examples/layer_norms: norms of blocks add up to the norm that is clipped by, and are those of one process in every layout."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, job
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer

FILE = ROOT / "examples/layer_norms/titan_layer_norms.py"


def run(folder: Path, degrees: dict[str, int]) -> float:
    """Write the norms of the first step, and return the global norm of gradients."""
    training = {"steps": 1, "global_batch_size": 8}
    parallelism = {f"{axis}_degree": size for axis, size in degrees.items()}
    trainer = PoolTrainer(job(folder, training=training, parallelism=parallelism))
    hook = runpy.run_path(str(FILE))["LayerNorms"](trainer)
    hook.every = 1
    trainer.train_one_step()
    trainer.close()
    return trainer.result.grad_norm


def test_the_norms_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    layouts = [
        {},
        {"data_parallel_shard": 2, "tensor_parallel": 2},
        {"pipeline_parallel": 2, "data_parallel_shard": 2},
    ]
    rows: list[dict[str, Any]] = []
    for number, degrees in enumerate(layouts):
        [total, *_] = pool.run(4 if degrees else 1, run, tmp_path / str(number), degrees)
        rows.append(json.loads((tmp_path / f"{number}/layer_norms.jsonl").read_text()))
        squares = sum(norm**2 for norm in rows[-1]["grad_norm"].values())
        assert squares**0.5 == pytest.approx(total, rel=1e-6)
    for row in rows[1:]:
        for kind in ("grad_norm", "weight_norm"):
            assert row[kind] == pytest.approx(rows[0][kind], rel=1e-6), kind
            assert all(row[kind].values())
