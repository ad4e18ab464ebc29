"""Phases in the simulator: each alone is the job that it stands for, and the run is the sum of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import Shell
from titan.sim.price.profiles import load_profile
from titan.sim.search.variants import simulate_variants

JOB = """
[model]
flavor = "tiny"
overrides = {n_layers = 2}
[training]
steps = 1000
seq_len = 256
local_batch_size = 2
global_batch_size = 4
[[phase]]
from_step = 101
global_batch_size = 8
[[phase]]
from_step = 501
seq_len = 2048
local_batch_size = 1
"""
LONG = [
    "--training.global_batch_size=8",
    "--training.seq_len=2048",
    "--training.local_batch_size=1",
]
# Steps and sequences of each phase, and the plain job's options that make it that phase.
ALONE = [
    (100, 4, ["--training.steps=100"]),
    (400, 8, ["--training.steps=400", "--training.global_batch_size=8"]),
    (500, 8, ["--training.steps=500", *LONG]),
]
WHERE = ["--world-size", "2", "--hardware", "h100-sxm"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The job with its phases, and without."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "job.toml").write_text(JOB)
    (folder / "plain.toml").write_text(JOB.partition("[[phase]]")[0])
    return str(folder / "job.toml"), str(folder / "plain.toml")


def test_time_memory_and_money_of_each_phase_and_of_the_run(
    jobs: tuple[str, str], tmp_path: Path, shell: Shell
) -> None:
    file, priced = tmp_path / "facts.json", ["--run", "--simulator.run.gpu_hour_price=2"]
    page = shell(f"sim {jobs[0]}", *WHERE, *priced, "--json", str(file)).out
    for text in (
        "phase  steps  sequences  tokens",
        "phase 3: ",
        "GiB on the fullest rank",
        "cost",
    ):
        assert text in page
    facts = json.loads(file.read_text())
    for phase, cost, alone in zip(facts["phases"], facts["run"]["phases"], ALONE, strict=True):
        steps, sequences, changes = alone
        shell(f"sim {jobs[1]}", *WHERE, *priced, *changes, "--json", str(file))
        other = json.loads(file.read_text())
        assert (phase["steps"], phase["sequences_per_step"]) == (steps, sequences)
        assert phase["tokens"] == cost["tokens"] == steps * other["tokens_per_step"]
        assert phase["step_time_s"] == other["step_time_s"]
        assert phase["needed_gib"] == cost["needed_gib"] == other["memory"]["needed_gib"]
        assert cost == other["run"]["phases"][0]
    for name in ("days", "gpu_hours", "cost", "tokens", "steps"):
        parts = [phase[name] for phase in facts["run"]["phases"]]
        assert facts["run"][name] == pytest.approx(sum(parts)) and min(parts) > 0
    assert facts["phases"][2]["needed_gib"] > facts["phases"][0]["needed_gib"]


def test_a_choice_is_ranked_by_the_speed_of_the_run_and_the_memory_of_the_fullest_phase(
    jobs: tuple[str, str],
) -> None:
    where = {"world_size": 2, "profiles": [load_profile("h100-sxm")]}
    [run] = simulate_variants([jobs[0]], [{}], **where)
    settings = [dict(c.removeprefix("--").split("=") for c in changes) for *_, changes in ALONE]
    parts = simulate_variants([jobs[1]], settings, **where)
    steps = [steps for steps, *_ in ALONE]
    pairs = [*zip(steps, parts, strict=True)]
    seconds = sum(n * part.facts["step_time_s"] for n, part in pairs)
    tokens = sum(n * part.facts["tokens_per_step"] for n, part in pairs)
    assert run.speed == pytest.approx(tokens / seconds / 2)
    assert run.facts["step_time_s"] == pytest.approx(seconds / 1000)
    assert run.needed_gib == max(part.needed_gib for part in parts) and run.fits


def test_a_phase_that_does_not_fit_is_the_verdict(tmp_path: Path, shell: Shell) -> None:
    large = "local_batch_size = 32768\nglobal_batch_size = 65536"
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("seq_len = 2048\nlocal_batch_size = 1", large))
    page = shell(f"sim {path}", *WHERE, "--loss.chunk_tokens=0", code=1).out
    assert (
        page.count("DOES NOT FIT") == 1 and "fits: " in page
    )  # the page is of the first phase


def test_a_change_of_layout_is_priced(
    jobs: tuple[str, str], tmp_path: Path, shell: Shell
) -> None:
    """The phase costs what a job of its layout costs, and the border a save that training waits for and a restart."""
    file, job = tmp_path / "facts.json", tmp_path / "job.toml"
    long = "[[phase]]\nfrom_step = 501\nseq_len = 2048\nlocal_batch_size = 1\nglobal_batch_size = 8\n"
    job.write_text(Path(jobs[1]).read_text() + f"{long}context_parallel_degree = 2\n")
    times = f"--simulator.run.restart_seconds=600 --run --json {file}".split()
    shell(f"sim {job}", *WHERE, *times)
    facts = json.loads(file.read_text())
    alone = ["--training.steps=500", *LONG, "--parallelism.context_parallel_degree=2"]
    shell("sim", jobs[1], *WHERE, *times, *alone)
    other = json.loads(file.read_text())
    phase, cost, [job_cost] = (
        facts["phases"][1],
        facts["run"]["phases"][1],
        other["run"]["phases"],
    )
    assert phase["mesh"] == "cp 2" and cost["layout"] == other["layout"]
    assert phase["step_time_s"] == other["step_time_s"]
    assert phase["needed_gib"] == other["memory"]["needed_gib"]
    save = cost["checkpoint"]
    border_s = save["blocked_s"] + save["beside_s"] + 600
    assert 86_400 * (cost["days"] - job_cost["days"]) == pytest.approx(border_s)
    assert 86_400 * cost["days_by_part"].pop("change of layout") == pytest.approx(border_s)
    assert cost["days_by_part"] == job_cost["days_by_part"]
