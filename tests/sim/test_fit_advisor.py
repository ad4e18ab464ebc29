"""`titan check --hardware`: the verdict is the simulator's, and what would make a job fit is simulated, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell
from titan.base.hardware import MARGIN
from titan.checks.rules import check_to_run
from titan.config.load import load_from_argv
from titan.sim.price.profiles import load_profile
from titan.sim.report.imbalance import with_imbalance
from titan.sim.search.fit_advisor import candidates, describe, suggest
from titan.sim.search.variants import simulate_variants
from titan.sim.simulate import simulate

JOB = [
    "train_configs/debug_model.toml",
    "--training.local_batch_size=4",
    "--training.seq_len=128",
]
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


@pytest.fixture
def check(shell: Shell) -> Any:
    """Return a function that checks the job on hardware, and returns the page."""
    job = f"check {' '.join(JOB)} --world-size 2 --hardware"
    return lambda words, **how: shell(f"{job} {words}", **how).out


def test_it_fits(check: Any) -> None:
    facts = json.loads(check("h100-sxm --json"))
    assert facts["fits"] and facts["memory_method"] == "simulation" and facts["fixes"] == []
    assert facts["simulation"]["memory"]["peak_reserved_gib"] > 0
    printed = check("h100-sxm")
    assert "simulated on h100-sxm" in printed and "\nfits: " in printed
    assert (
        "in bfloat16, by formula (the simulated value below is used)" in printed
    )  # "auto" there
    printed = check("l4")  # of which there is no profile
    assert (
        "not simulated: the simulator has no profile of l4" in printed and "\nfits: " in printed
    )


def test_it_does_not_fit_and_what_would(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what full recomputation takes and what none does."""
    facts = json.loads(check("h100-sxm --json"))
    needed = facts["simulation"]["memory"]["peak_active_gib"] - 32 / 1024  # cuBLAS workspace
    file = tmp_path / "small.toml"
    file.write_text(SMALL.format(gib=needed))
    small = load_profile(file)
    monkeypatch.setattr("titan.sim.search.fit_advisor.load_profile", lambda _: small)
    # As after any mistake, so that a script stops.
    facts = json.loads(check("h100-sxm --json", code=1))
    assert not facts["fits"] and not facts["tight"]
    fixes = facts["fixes"]
    assert 1 <= len(fixes) <= 5
    speeds = [fix["tokens_per_s_per_gpu"] for fix in fixes]
    assert speeds == sorted(speeds, reverse=True)
    assert all(fix["needed_gib"] <= needed for fix in fixes)
    printed = check("h100-sxm", code=1)
    assert (
        "DOES NOT FIT" in printed and "changes that make it fit, the fastest first:" in printed
    )


def test_every_smaller_batch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a twelfth of the batch only: the advice is at least as fast as each smaller batch by hand."""
    job = [*JOB, "--training.local_batch_size=24", "--activation_checkpoint.mode=full"]
    job.append("--model.overrides.n_layers=2")
    config = load_from_argv(job)
    layout = check_to_run(config, world_size=2)
    single, _ = candidates(config, layout, load_profile("h100-sxm"))
    sizes = [c["training.local_batch_size"] for c in single if len(c) == 2 and "training.local_batch_size" in c]  # fmt: skip
    assert sizes == ["1", "2", "3", "4", "6", "8", "12"]
    by_hand = [
        {"training.local_batch_size": n, "training.global_batch_size": "48"} for n in sizes
    ]
    roomy = load_profile("h100-sxm")
    variants = simulate_variants(job, by_hand, world_size=2, profiles=[roomy], processes=2)
    small = roomy.model_copy(update={"memory_gib": variants[1].needed_gib / (1 - MARGIN)})
    monkeypatch.setattr("titan.sim.search.fit_advisor.load_profile", lambda _: small)
    answer = suggest(job, config, layout, hardware="h100-sxm")
    assert not answer["simulation"]["fits"]
    assert answer["fixes"][0]["tokens_per_s_per_gpu"] >= max(v.speed for v in variants[:2]) > 0


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


def test_bf16_is_offered_to_a_job_in_fp32() -> None:
    change = {"training.mixed_precision_param": "bfloat16"}
    for precision in ("auto", "bfloat16", "float32"):
        config = load_from_argv([*JOB, f"--training.mixed_precision_param={precision}"])
        layout = check_to_run(config, world_size=2)
        single, _ = candidates(config, layout, load_profile("h100-sxm"))
        assert (change in single) == (precision == "float32")


def test_uneven_routing_and_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with room for 1.3 times the mean load: the changes are those that fit at twice the load."""
    job = ["train_configs/debug_model.toml", "--model.name=qwen3", "--model.flavor=tiny_moe"]
    job += ["--model.overrides.expert_dim=512", "--model.overrides.n_layers=2"]
    job += ["--training.seq_len=512", "--training.local_batch_size=8"]
    job += ["--parallelism.expert_parallel_degree=4"]
    config = load_from_argv(job)
    layout = check_to_run(config, world_size=4)
    single, _ = candidates(config, layout, load_profile("h100-sxm"))
    changes = {key: value for change in single for key, value in change.items()}
    assert changes["moe.expert_chunk_rows"] == str(8 * 512 * 2 // 4)
    assert {"parallelism.expert_parallel_degree": "2"} in single
    roomy = load_profile("h100-sxm")
    at = {
        x: simulate(with_imbalance(config, x), world_size=4, profile=roomy) for x in (1.0, 2.0)
    }
    even, twice = (at[x].fullest.peak_reserved_bytes for x in (1.0, 2.0))
    gib = (even + 0.3 * (twice - even) + at[1.0].fullest.outside_bytes) / 2**30
    small = roomy.model_copy(update={"memory_gib": gib / (1 - MARGIN)})
    monkeypatch.setattr("titan.sim.search.fit_advisor.load_profile", lambda _: small)
    # One change that helps, instead of some thirty simulations.
    help_ = [{"moe.expert_chunk_rows": "2048"}]
    monkeypatch.setattr("titan.sim.search.fit_advisor.candidates", lambda *_: (help_, []))
    answer = suggest(job, config, layout, hardware="h100-sxm")
    limit = answer["simulation"]["experts"]["fits_up_to_imbalance"]
    assert answer["simulation"]["fits"] and 1 <= limit < 2 and answer["imbalance"] == 2.0
    assert [fix["settings"] for fix in answer["fixes"]] == help_
    lines = describe(answer)
    assert any(
        f"fits up to {limit:g} times the mean load of the 4 ranks" in line for line in lines
    )
    assert "changes that make it fit at 2 times the mean load, the fastest first:" in lines
