"""Loads of experts as a run shows them: figures by hand, the same rows in every layout, curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import SMALL, degrees_of, job, with_changes
from tests.support.metrics import read_json_lines, step_row
from tests.support.ranks import Pool
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer
from titan.config.schema import MetricsSection
from titan.contrib.model_columns.loads import ExpertLoads, load_figures
from titan.observe.metrics import MetricsLog

MOE = with_changes(
    SMALL,
    model={
        "name": "qwen3",
        "flavor": "tiny_moe",
        "overrides": {"n_layers": 4, "n_dense_layers": 1, "load_balance_coeff": 1e-2},
    },
    training={"global_batch_size": 8, "steps": 4},
    metrics={"log_freq": 3},
    checkpoint={"enable": False},
)
LAYERS = [1, 2, 3]


def test_figures_by_hand() -> None:
    loads = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2], [8, 0, 0, 0]]).double()
    bias = torch.tensor([[0.5, -0.25, 0, 0], [0, 0, 0, 0], [-1, -1, -1, 1]]).double()
    found = {name: t.tolist() for name, t in load_figures(loads, bias, ep=2).items()}
    assert found["maxvio"] == [1.0, 0.0, 3.0]
    # 1/2 ln 2 + 2 x 1/4 ln 4 = 3/2 ln 2, of ln 4
    assert found["entropy"] == pytest.approx([0.75, 1.0, 0.0])
    assert found["dead"] == [1, 0, 3]
    assert found["bias_range"] == [0.75, 0.0, 2.0]
    assert found["ep_imbalance"] == [1.0, 1.0, 2.0]  # (4, 4), (4, 4), (8, 0) rows
    assert load_figures(loads, bias, ep=4)["ep_imbalance"].tolist() == [2.0, 1.0, 4.0]
    assert load_figures(loads, bias, ep=1)["ep_imbalance"].tolist() == [1.0, 1.0, 1.0]


def run(folder: Path, base: dict[str, Any]) -> list[bool]:
    """On a rank: after each step, whether loads were measured."""
    trainer = PoolTrainer(job(folder, base=base))
    hook, measured = trainer.hook(ExpertLoads), []
    assert hook is not None
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
        measured.append(hook.measured is not None)
    for each in trainer.hooks:
        each.close()
    if dist.get_world_size() > 1:
        dist.barrier()
    return measured


def shown(pool: Pool, folder: Path, layout: dict[str, int]) -> tuple[list[Any], dict[str, Any]]:
    """Return rows of steps, imbalance and experts, and experts.json."""
    parallelism = degrees_of({"dp": 1} | layout)
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    for measured in pool.run(ranks, run, folder, with_changes(MOE, parallelism=parallelism)):
        assert measured == [True, False, True, True]
    rows = read_json_lines(folder / "metrics.jsonl")
    table = json.loads((folder / "experts.json").read_text())
    return [(r["step"], r["expert_imbalance"], r["experts"]) for r in rows], table


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return shown(pool, tmp_path_factory.mktemp("alone"), {})


def test_one_process(alone: Any) -> None:
    rows, table = alone
    assert [step for step, _, _ in rows] == [1, 3, 4]
    assert (table["step"], table["layers"]) == (4, LAYERS)
    loads = torch.tensor(table["loads"]).double()
    assert loads.sum(1).tolist() == [8 * 32 * 2] * 3  # sequences, tokens, experts of each
    for step, imbalance, figures in rows:
        assert figures["layer"] == LAYERS
        assert figures["ep_imbalance"] == [1.0] * 3
        assert imbalance == pytest.approx(1 + max(figures["maxvio"]), abs=1e-5)
        # Each step moves a bias by 0.01 up or down.
        assert all(0 <= width < 0.0201 * step for width in figures["bias_range"])
    assert rows[0][2]["bias_range"] == pytest.approx([0.02] * 3, abs=1e-5)
    expected = (loads.amax(1) / 64 - 1).tolist()
    assert rows[-1][2]["maxvio"] == pytest.approx(expected, abs=1e-5)


@tabled("layout", ids=lambda layout: " x ".join(layout))
def test_each_layout_shows_the_figures_of_one_process(
    layout: dict[str, int], alone: Any, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "experts.json").write_text("of an earlier run")
    rows, table = shown(pool, tmp_path, layout)
    assert table == alone[1]
    ep = layout.get("ep", 1)
    for (step, imbalance, figures), (of_step, _, expected) in zip(rows, alone[0], strict=True):
        assert step == of_step
        same = figures.keys() - {"ep_imbalance"}
        assert {k: figures[k] for k in same} == {k: expected[k] for k in same}
        if ep > 1:
            assert imbalance == max(figures["ep_imbalance"]) > 1
    halves = torch.tensor(table["loads"]).unflatten(1, (ep, -1)).sum(-1).double()
    by_hand = (halves.amax(1) / halves.mean(1)).tolist()
    assert rows[-1][2]["ep_imbalance"] == pytest.approx(by_hand, abs=1e-5)


def test_a_dense_model_has_none_and_removes_the_table(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "experts.json").write_text("of an earlier run")
    assert pool.run(1, run, tmp_path, dict(SMALL)) == [[False, False]]
    [first, _] = read_json_lines(tmp_path / "metrics.jsonl")
    assert first["expert_imbalance"] is None and "experts" not in first
    assert not (tmp_path / "experts.json").exists()


def test_curves_of_each_layer(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    log = MetricsLog(tmp_path, section=MetricsSection(enable_tensorboard=True))
    figures = {"layer": [1, 3], "maxvio": [0.5, 2.0], "dead": [0, 1]}
    log.write(step_row(7, expert_imbalance=1.25, experts=figures))
    log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag.startswith("experts")
    }
    assert found == {
        "experts/imbalance": [(7, 1.25)],
        "experts_maxvio/layers.1": [(7, 0.5)],
        "experts_maxvio/layers.3": [(7, 2.0)],
        "experts_dead/layers.1": [(7, 0.0)],
        "experts_dead/layers.3": [(7, 1.0)],
    }
