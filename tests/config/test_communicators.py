"""Options of communicators that nothing would use are refused, at their line; on a CPU they are said to be ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.checks.rules import advise, load_to_run
from titan.config.errors import ConfigError

ONE_RANK = (
    "the axis has one rank, which sends nothing; remove the table, or change parallelism."
)
MOE = '[model]\nname = "qwen3"\nflavor = "tiny_moe"\n'
OPTIONS = "[comm.nccl.{}]\nmax_ctas = 4\n"


def problems(text: str, folder: Path, *, world: int) -> list[str]:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    try:
        load_to_run([str(path)], world_size=world, device="cuda", warn=False)
    except ConfigError as error:
        return [str(problem).removeprefix(f"{path}:") for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPTIONS.format("dp_shrd"), ["1: comm.nccl.dp_shrd: unknown key; did you mean 'dp_shard'?"]),
        ("[comm.nccl.tp]\nmax_cta = 4\n", ["2: comm.nccl.tp.max_cta: unknown key; did you mean 'max_ctas'?"]),
        ("[comm.nccl.tp]\nmin_ctas = 0\n", ["2: comm.nccl.tp.min_ctas: must be at least 1, got 0"]),
        ("[comm.nccl.dp_shard]\nmax_ctas = 4\nmin_ctas = 8\n", ["3: comm.nccl.dp_shard.min_ctas: is more than max_ctas = 4; use 4 or less"]),
        (OPTIONS.format("cp"), [f"1: comm.nccl.cp: {ONE_RANK}context_parallel_degree"]),
        ("[comm.nccl.dp_shard]\nnet_name = ''\n", ["2: comm.nccl.dp_shard.net_name: string should have at least 1 character, got the string \"\""]),
        # No degree would give a dense model experts.
        (OPTIONS.format("ep"), ["1: comm.nccl.ep: the model has no experts; remove the table"]),
        (OPTIONS.format("efsdp"), ["1: comm.nccl.efsdp: the model has no experts; remove the table"]),
        # Without expert parallelism, experts are sharded with the rest. With all ranks in it, they are not sharded.
        (MOE + OPTIONS.format("efsdp"), [f"4: comm.nccl.efsdp: {ONE_RANK}expert_parallel_degree"]),
        (MOE + OPTIONS.format("efsdp") + "[parallelism]\nexpert_parallel_degree = 4\n", [f"4: comm.nccl.efsdp: {ONE_RANK}expert_parallel_degree"]),
        (MOE + OPTIONS.format("efsdp") + OPTIONS.format("ep") + "[parallelism]\nexpert_parallel_degree = 2\n", []),
        (OPTIONS.format("dp_shard") + "[comm.nccl.pp]\n", []),
        (OPTIONS.format("dp_shard") + "[parallelism]\ndata_parallel_replicate_degree = 4\n", [f"1: comm.nccl.dp_shard: {ONE_RANK}data_parallel_shard_degree"]),
    ],
)  # fmt: skip
def test_what_nothing_would_use(text: str, expected: list[str], tmp_path: Path) -> None:
    assert problems(text, tmp_path, world=4) == expected


def test_options_for_many_ranks_run_on_one(tmp_path: Path) -> None:
    assert problems(OPTIONS.format("cp") + OPTIONS.format("dp_shard"), tmp_path, world=1) == []


def test_gloo_has_none(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[comm]\nsm_carveout = 8\n" + OPTIONS.format("dp_shard"), encoding="utf-8")
    config, _ = load_to_run([str(path)], world_size=2, device="cuda", warn=False)
    assert advise(config, device="cuda") == []
    assert advise(config, device="cpu") == [
        f"{path}:3: comm.nccl.dp_shard: ranks on a CPU communicate through gloo, which has no such options; ignored",
        f"{path}:2: comm.sm_carveout: a CPU has no SMs; ignored",
    ]
