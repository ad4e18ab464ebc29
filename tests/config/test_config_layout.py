"""World sizes to layouts, and [model] sections to sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan.config.errors import ConfigError
from titan.config.load import load_config
from titan.config.model import model_config
from titan.config.rules import Layout, check, check_layout, check_to_run, resolve_layout
from titan.config.schema import JobConfig, ModelSection

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
    assert config.source_map.warnings == []
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


SPLIT = "0F0,0I0,0W0\n1F0,1I0,1W0\n"
WHOLE = "0F0,0B0\n1F0,1B0\n"


def pipeline_problems(job: str, *, csv: str, folder: Path) -> list[str]:
    """What is wrong with a job of two pipeline ranks and one microbatch; csv: the order of its actions, or a schedule."""
    name, file = csv, ""
    if "\n" in csv:
        name, file = "PipelineScheduleMulti", folder / "order.csv"
        file.write_text(csv)
    path = folder / "job.toml"
    path.write_text(
        f"[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = '{name}'\n"
        f"pipeline_parallel_schedule_csv = '{file}'\n{job}"
    )
    config = load_config(path, overrides=["training.local_batch_size=1"])
    problems = [*check(config), *check_layout(config, world_size=2)]
    return [str(problem).removeprefix(f"{folder}/") for problem in problems]


@pytest.mark.parametrize("csv", ["InterleavedZeroBubble", SPLIT], ids=["named", "from a file"])
@pytest.mark.parametrize(
    ("job", "place", "fix"),
    [
        (
            "fsdp_reshard_after_forward = 'always'",
            "job.toml:5: parallelism.fsdp_reshard_after_forward: ",
            'torch compute wrong gradients; use "default" or "never"',
        ),
        (
            "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'",
            "job.toml:7: activation_checkpoint.selective_ac_option: ",
            'use a number such as 2, mode = "full", or schedule 1F1B',
        ),
        (
            "[compile]\nenable = true",
            "job.toml:6: compile.enable: ",
            "use false, or schedule 1F1B",
        ),
    ],
)
def test_what_a_split_backward_pass_rules_out(
    job: str, place: str, fix: str, csv: str, tmp_path: Path
) -> None:
    """Whether the order of actions comes by name or from a file; and nothing is refused that has whole ones."""
    [problem] = pipeline_problems(job, csv=csv, folder=tmp_path)
    assert problem.startswith(place) and problem.endswith(fix)
    whole = "1F1B" if csv != SPLIT else WHOLE
    assert all("microbatch" in p for p in pipeline_problems(job, csv=whole, folder=tmp_path))


def test_what_a_split_backward_pass_allows(tmp_path: Path) -> None:
    job = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'"
    assert pipeline_problems(job, csv=SPLIT, folder=tmp_path) == []


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("PipelineScheduleMulti", "", "set pipeline_parallel_schedule_csv, or use one of GPipe"),
        ("1F2B", "order.csv", "did you mean '1F1B'"),
    ],
)
def test_names_beside_a_file(name: str, file: str, message: str, tmp_path: Path) -> None:
    """torch's class that runs files may stand there, as in TorchTitan's jobs, and is no schedule without one."""
    (tmp_path / "order.csv").write_text(WHOLE)
    parallelism = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": name,
        "pipeline_parallel_schedule_csv": file and str(tmp_path / file),
    }
    [problem] = check(JobConfig.model_validate({"parallelism": parallelism}))
    assert problem.key == "parallelism.pipeline_parallel_schedule" and message in problem.message


@pytest.mark.parametrize(
    ("sections", "key", "fragment"),
    [
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
