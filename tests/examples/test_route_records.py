"""The hook of examples/route_records: a record does not depend on the layout, and a replay takes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.test_expert import ranks, sections
from tests.support.jobs import ROOT, job
from tests.support.ranks import Pool
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer

FILE = ROOT / "examples" / "route_records" / "titan_route_records.py"


def run(folder: Path, base: dict[str, Any], replay: str = "") -> list[float]:
    """Train on one rank of the pool with the hook. Return the losses."""
    spec = importlib.util.spec_from_file_location("titan_route_records", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trainer = PoolTrainer(job(folder, base=base))
    trainer.hooks.insert(0, module.Routes(trainer, record="routes", replay=replay))
    losses = []
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
        losses.append(trainer.result.loss)
    for hook in trainer.hooks:
        hook.close()
    return losses


@tabled("layout", ids=lambda layout: " x ".join(layout))
def test_a_record_does_not_depend_on_the_layout(
    layout: dict[str, int], pool: Pool, tmp_path: Path
) -> None:
    records = []
    for name, of_job in (("one", {}), ("many", layout)):
        pool.run(ranks(of_job), run, tmp_path / name, sections(of_job))
        paths = sorted((tmp_path / name / "routes").iterdir())
        assert [path.name for path in paths] == [
            "samples-000000000000-8.npy",
            "samples-000000000008-8.npy",
        ]
        records.append(np.stack([np.load(path) for path in paths]))
    assert records[0].shape == (2, 8, 32, 2, 2) and records[0].min() >= 0
    # Sets: the order within a token's K follows rounding.
    assert np.array_equal(np.sort(records[0], -1), np.sort(records[1], -1))


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_replayed_routes_are_taken(recompute: str, pool: Pool, tmp_path: Path) -> None:
    [losses] = pool.run(1, run, tmp_path / "one", sections({}))
    # Other weights would choose other routes.
    layout = {"dp": 2, "ep": 2}
    other = sections(
        layout,
        debug={"seed": 4},
        activation_checkpoint={"mode": recompute},
    )
    replay = str(tmp_path / "one" / "routes")
    results = pool.run(2, run, tmp_path / "other", other, replay)
    for name in ("samples-000000000000-8.npy", "samples-000000000008-8.npy"):
        taken = np.load(tmp_path / "other" / "routes" / name)
        assert np.array_equal(taken, np.load(tmp_path / "one" / "routes" / name))
    assert results[0] != losses


def test_a_missing_record_is_named(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"nothing.* has sample 0"):
        pool.run(1, run, tmp_path, sections({}), "nothing")


@pytest.mark.parametrize(("expert", "k"), [(-1, 2), (8, 2), (0, 3)])
def test_a_record_of_another_model_is_refused(
    expert: int, k: int, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    record = np.full((8, 32, 2, k), expert, dtype=np.int16)
    np.save(tmp_path / "old" / "samples-000000000000-8.npy", record)
    with pytest.raises(AssertionError, match=r"no 2 of 8 experts for each token of layer 0"):
        pool.run(1, run, tmp_path, sections({}), "old")


def test_a_pipeline_is_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="InputError: route_records: a pipeline"):
        pool.run(2, run, tmp_path, sections({"pp": 2}))
