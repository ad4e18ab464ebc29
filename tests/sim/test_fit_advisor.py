"""`titan check --hardware`: the verdict is the simulator's, and what would make a job fit is simulated, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan.cli import main
from titan.config.load import load_from_argv
from titan.config.rules import check_to_run
from titan.sim.fit_advisor import candidates
from titan.sim.profiles import load_profile

JOB = ["train_configs/debug_model.toml", "--training.local_batch_size=4", "--training.seq_len=128"]
SMALL = """
name = "small"
base = "h100-sxm"
memory_gib = {gib}
context_gib = 0.0
communicator_gib = 0.0
workspace_mib = 0
[sources]
memory_gib = "this test"
context_gib = "this test"
communicator_gib = "this test"
workspace_mib = "this test"
"""


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["check", *JOB, "--world-size", "2", *arguments]) == 0
    return capsys.readouterr().out


def test_it_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = json.loads(check(capsys, "--hardware", "h100-sxm", "--json"))
    assert facts["fits"] and facts["memory_method"] == "simulation" and facts["fixes"] == []
    assert facts["simulation"]["memory"]["peak_reserved_gib"] > 0
    printed = check(capsys, "--hardware", "h100-sxm")
    assert "simulated on h100-sxm" in printed and "\nfits: " in printed
    printed = check(capsys, "--hardware", "l4")  # of which there is no profile
    assert "not simulated: the simulator has no profile of l4" in printed and "\nfits: " in printed


def test_it_does_not_fit_and_what_would(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what full recomputation takes and what none does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = json.loads(check(capsys, "--hardware", "h100-sxm", "--json"))
    needed = facts["simulation"]["memory"]["peak_active_gib"] - 32 / 1024  # cuBLAS workspace
    file = tmp_path / "small.toml"
    file.write_text(SMALL.format(gib=needed * 0.9))
    small = load_profile(file)
    monkeypatch.setattr("titan.sim.fit_advisor.load_profile", lambda _: small)
    facts = json.loads(check(capsys, "--hardware", "h100-sxm", "--json"))
    assert not facts["fits"]
    fixes = facts["fixes"]
    assert 1 <= len(fixes) <= 5
    speeds = [fix["tokens_per_s_per_gpu"] for fix in fixes]
    assert speeds == sorted(speeds, reverse=True)
    assert all(fix["peak_reserved_gib"] <= needed for fix in fixes)
    printed = check(capsys, "--hardware", "h100-sxm")
    assert "DOES NOT FIT" in printed and "changes that make it fit, the fastest first:" in printed


def test_changes_keep_the_global_batch() -> None:
    config = load_from_argv([*JOB, "--parallelism.data_parallel_replicate_degree=2"])
    layout = check_to_run(config, world_size=4)
    single, pairs = candidates(config, layout, load_profile("h100-sxm"))
    assert {"training.local_batch_size": "2", "training.global_batch_size": "16"} in single
    assert {"activation_checkpoint.mode": "full"} in single
    assert len(pairs) > len(single)
    for change in (*single, *pairs):
        again = load_from_argv(
            [
                *JOB,
                "--parallelism.data_parallel_replicate_degree=2",
                *(f"--{k}={v}" for k, v in change.items()),
            ]
        )
        other = check_to_run(again, world_size=4)
        assert again.training.local_batch_size * other.dp * other.accumulation == 16
