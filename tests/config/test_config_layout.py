"""World sizes to layouts, and [model] sections to sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan.config.load import load_config
from titan.config.model import model_config
from titan.config.problems import ConfigError
from titan.config.rules import Layout, check, check_layout, check_to_run, resolve_layout
from titan.config.sections import JobConfig, ModelSection

FITTING = {
    "debug_model": 1,
    "demo": 2,
    "llama3_1b": 1,
    "llama3_3b": 8,
    "llama3_8b": 8,
    "llama3_70b": 256,
    "llama3_405b": 512,
}


@pytest.mark.parametrize(
    "job",
    sorted((Path(__file__).resolve().parents[2] / "train_configs").glob("*.toml")),
    ids=lambda p: p.stem,
)
def test_shipped_jobs_are_sound(job: Path) -> None:
    assert job.read_text().splitlines()[0] == "#:schema ../docs/schema.json"
    config = load_config(job)
    assert config.origin.warnings == []
    assert check(config) == []
    assert check_layout(config, world_size=FITTING[job.stem]) == []


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 4, (1, 1, 4, 1, 1)),
        ({"data_parallel_replicate_degree": 2}, 8, (1, 2, 4, 1, 1)),
        (
            {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
            4,
            (1, 4, 1, 1, 1),
        ),
        (
            {
                "pipeline_parallel_degree": 2,
                "context_parallel_degree": 2,
                "tensor_parallel_degree": 2,
            },
            16,
            (2, 1, 2, 2, 2),
        ),
    ],
)
def test_layouts(degrees: dict[str, int], world_size: int, expected: tuple[int, ...]) -> None:
    layout = resolve_layout(JobConfig.model_validate({"parallelism": degrees}), world_size)
    assert (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp) == expected
    assert layout.world_size == world_size
    assert layout.accumulation == 1


def test_accumulation() -> None:
    config = JobConfig.model_validate(
        {"training": {"local_batch_size": 2, "global_batch_size": 48}}
    )
    assert resolve_layout(config, 4) == Layout(
        pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1, accumulation=6
    )
    with pytest.raises(ConfigError, match="48 is not a multiple of local_batch_size 2 x 5"):
        resolve_layout(config, 5)


def test_tensor_parallel_may_exceed_the_key_value_heads() -> None:
    config = JobConfig.model_validate({"parallelism": {"tensor_parallel_degree": 4}})
    assert check_layout(config, world_size=4) == []  # 2 key/value heads, each kept by two ranks


def test_everything_in_the_way_of_a_run_is_told_at_once() -> None:
    config = JobConfig.model_validate(
        {
            "parallelism": {"tensor_parallel_degree": 3, "expert_parallel_degree": 2},
            "validation": {"enable": True},
        }
    )
    with pytest.raises(ConfigError) as caught:
        check_to_run(config, world_size=8)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {
        "parallelism.tensor_parallel_degree",
        "validation.dataset",
        "parallelism.expert_parallel_degree",
    }


def test_model_overrides() -> None:
    config = model_config(
        ModelSection(flavor="tiny", overrides={"n_layers": 2, "n_heads": 8, "rope_theta": 10_000})
    )
    assert (config.n_layers, config.n_heads, config.head_dim) == (2, 8, 8)  # head_dim follows
    assert config.rope_theta == 10_000.0 and isinstance(config.rope_theta, float)
    assert model_config(ModelSection(overrides={"head_dim": 32})).head_dim == 32
    with pytest.raises(ConfigError, match="did you mean 'n_layers'"):
        model_config(ModelSection(overrides={"nlayers": 2}))


@dataclass(frozen=True)
class OwnHeads:
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
    config = model_config(ModelSection(name="own", overrides=overrides))
    assert config == replace(OwnHeads(), **overrides)


ZERO_BUBBLE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}


@pytest.mark.parametrize(
    ("sections", "key", "fragment"),
    [
        (
            {"parallelism": {**ZERO_BUBBLE, "fsdp_reshard_after_forward": "always"}},
            "parallelism.fsdp_reshard_after_forward",
            "torch compute wrong gradients",
        ),
        (
            {"parallelism": ZERO_BUBBLE, "activation_checkpoint": {"mode": "selective"}},
            "activation_checkpoint.mode",
            'use "full" or "none", or 1F1B',
        ),
        (
            {"parallelism": ZERO_BUBBLE, "compile": {"enable": True}},
            "compile.enable",
            "use false, or 1F1B",
        ),
        (
            {
                "parallelism": {
                    "context_parallel_degree": 2,
                    "context_parallel_load_balancer": "ptrr",
                }
            },
            "parallelism.context_parallel_load_balancer",
            'use "headtail"',
        ),
        (
            {
                "parallelism": {
                    "context_parallel_degree": 2,
                    "context_parallel_rotate_method": "ring",
                },
                "data": {"document_mask": True},
            },
            "parallelism.context_parallel_rotate_method",
            'use "allgather" or "ulysses"',
        ),
        (
            {
                "model": {"flavor": "tiny"},
                "parallelism": {
                    "context_parallel_degree": 8,
                    "context_parallel_rotate_method": "ulysses",
                },
            },
            "parallelism.context_parallel_rotate_method",
            "4 query heads among 8",
        ),
    ],
)
def test_pairs_that_cannot_be_right_are_refused(
    sections: dict[str, Any], key: str, fragment: str
) -> None:
    [problem] = check(JobConfig.model_validate(sections))
    assert problem.key == key and fragment in problem.message
