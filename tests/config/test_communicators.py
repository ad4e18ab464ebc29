"""Options of communicators that nothing would use are refused, at their line; on a CPU they are said to be ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tables import table
from titan.checks.rules import advise, load_to_run
from titan.config.errors import ConfigError

OPTIONS = "[comm.nccl.{}]\nmax_ctas = 4\n"


def problems(text: str, folder: Path, *, world: int) -> list[str]:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    try:
        load_to_run([str(path)], world_size=world, device="cuda", warn=False)
    except ConfigError as error:
        return [str(problem).removeprefix(f"{path}:") for problem in error.problems]
    return []


# (OPTIONS.format("ep"), ["1: comm.nccl.ep: the model has no experts; re: No degree would give a dense model experts.
# (MOE + OPTIONS.format("efsdp"), [f"4: comm.nccl.efsdp: {ONE_RANK}exper: Without expert parallelism, experts are sharded with the rest. With all ranks in it, they are not sharded.
@pytest.mark.parametrize(
    ("text", "expected"),
    table(__file__, "what_nothing_would_use"),
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
