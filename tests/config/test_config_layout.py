"""World sizes to layouts, and [model] sections to sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.jobs import ROOT
from tests.support.tables import table, tabled
from titan.checks.rules import check, check_layout, resolve_layout
from titan.config.errors import ConfigError
from titan.config.load import load_config
from titan.config.schema import JobConfig, ModelSection
from titan.parallel.traits import ModelSizes

FITTING = table(__file__, "fitting")


@pytest.mark.parametrize(
    "job",
    sorted((Path(__file__).resolve().parents[2] / "train_configs").glob("*.toml")),
    ids=lambda p: p.stem,
)
def test_shipped_jobs_are_sound(job: Path) -> None:
    assert job.read_text().splitlines()[0] == "#:schema ../docs/schema.json"
    config = load_config(job)
    assert config.source_map.warnings == []
    assert check(config) == []
    assert check_layout(config, world_size=FITTING[job.stem]) == []


@tabled("degrees, world_size, expected")
def test_layouts(degrees: dict[str, int], world_size: int, expected: list[int]) -> None:
    layout = resolve_layout(JobConfig.model_validate({"parallelism": degrees}), world_size)
    assert [layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp] == expected
    assert layout.world_size == world_size
    assert layout.accumulation == 1


def test_model_overrides() -> None:
    config = ModelSection(
        flavor="tiny", overrides={"n_layers": 2, "n_heads": 8, "rope_theta": 10_000}
    ).sizes
    assert (config.n_layers, config.n_heads, config.head_dim) == (2, 8, 8)  # head_dim follows
    assert config.rope_theta == 10_000.0 and isinstance(config.rope_theta, float)
    assert ModelSection(overrides={"head_dim": 32}).sizes.head_dim == 32
    with pytest.raises(ConfigError, match="did you mean 'n_layers'"):
        _ = ModelSection(overrides={"nlayers": 2}).sizes


@dataclass(frozen=True)
class OwnHeads(ModelSizes):
    """A size of somebody else's family, whose head_dim is its own, though it is dim / n_heads."""

    dim: int = 32
    n_heads: int = 4
    head_dim: int = 8


@pytest.mark.parametrize("overrides", [{}, {"dim": 64}])
def test_a_head_dim_that_is_not_derived_stays(
    overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SimpleNamespace(FLAVORS={"debugmodel": OwnHeads()})
    monkeypatch.setattr("titan.config.model.family", lambda name: own)
    config = ModelSection(name="own", overrides=overrides).sizes
    assert config == replace(OwnHeads(), **overrides)


def unit_problems(*overrides: str, world: int) -> list[str]:
    settings = [f"parallelism.{override}" for override in overrides]
    config = load_config(ROOT / "train_configs" / "debug_model.toml", overrides=settings)
    return [p.message for p in (*check(config), *check_layout(config, world_size=world))]


@pytest.mark.parametrize("key", ["fsdp_blocks_per_unit", "fsdp_kept_blocks"])
def test_units_that_there_cannot_be(key: str) -> None:
    ddp = ("data_parallel_replicate_degree=2", "data_parallel_shard_degree=1")
    assert unit_problems(f"{key}=8", world=2) == []
    assert unit_problems(f"{key}=2", world=1) == []  # a choice for many ranks runs on one
    assert unit_problems(f"{key}=9", world=2) == [
        "9 are more than the model's 8 blocks; use at most 8"
    ]
    [problem] = unit_problems(
        f"{key}=5", "pipeline_parallel_degree=2", "fsdp_reshard_after_forward=always", world=4
    )
    assert (
        problem == "5 are more than the model's 4 blocks on each pipeline rank; use at most 4"
    )
    [problem] = unit_problems(f"{key}=2", *ddp, world=2)
    assert problem.startswith("DDP gathers no parameters")


def test_all_blocks_are_kept_already() -> None:
    for policy in ("fsdp_reshard_after_forward=never", "pipeline_parallel_degree=2"):
        [problem] = unit_problems("fsdp_kept_blocks=2", policy, world=4)
        assert 'keeps all blocks; use 1, or "always"' in problem
