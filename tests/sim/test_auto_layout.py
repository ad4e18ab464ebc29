"""`parallelism.layout = "auto"`: what titan chooses, what it holds, when it keeps a choice, and who refuses it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import Shell
from tests.support.tables import tabled
from titan.checks.layout_rules import resolve_layout
from titan.checks.rules import check_to_run, load_to_run
from titan.config.errors import ConfigError
from titan.config.load import load_config, load_from_argv
from titan.config.phases import phases_of
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.config.toml import tomllib
from titan.sim.price.profiles import load_profile
from titan.sim.search import auto
from titan.sim.search.candidates import LayoutSearch
from titan.sim.search.plan import plan
from titan.sim.search.variants import simulate_variants

JOB = """
[job]
dump_folder = "{run}"
[model]
name = "llama3"
flavor = "tiny"
[tokenizer]
name = "bytes"
[optimizer]
lr = 2e-3
[training]
dataset = "stdlib"
local_batch_size = 4
seq_len = 64
steps = 3
[parallelism]
layout = "auto"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("titan.base.hardware.count_accelerators", lambda: 0)
    monkeypatch.setattr(auto, "count_accelerators", lambda: 0)
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(run=tmp_path / "run"))
    return file


@pytest.fixture
def started(job: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the arguments of the ranks that `titan train` would start."""
    seen: list[list[str]] = []
    monkeypatch.setattr("titan.ops.launch.launch", lambda argv, **_: seen.append(argv) or 0)
    return seen


def choose(
    words: list[str], ranks: int, hardware: str = "cpu", **how: Any
) -> auto.ChosenLayout:
    profile = auto.on_nodes(load_profile(hardware), ranks)
    how = {"simulate": True} | how
    return auto.choose(words, load_from_argv(words), profile, world_size=ranks, **how)


def rest(config: JobConfig) -> dict[str, Any]:
    """Return the settings that no choice may change."""
    values = config.model_dump(mode="json", exclude={"parallelism", "activation_checkpoint"})
    values["training"] = {k: v for k, v in values["training"].items() if "batch_size" not in k}
    return values


def test_the_ranks_get_a_layout_and_the_run_folder_an_overlay(
    job: Path, started: list[list[str]], shell: Shell
) -> None:
    said = shell(f"train {job} --nproc 4").err
    config = load_from_argv(started[0])
    file = job.parent / "run" / auto.FILE
    overlaid = load_config(job, overlays=[file])
    assert overlaid == config and config.parallelism.layout == "fixed"
    layout = check_to_run(config, world_size=4)
    # 4 sequences on each of 4 ranks, as without a choice.
    assert config.training.local_batch_size * layout.dp * layout.accumulation == 16
    assert rest(config) == rest(load_config(job))
    reason = config.parallelism.layout_reason
    assert "by formula" in reason and "CPUs" in reason and reason in said
    assert "# Runner-up: " in file.read_text() and "Runner-up: " in said
    # A small model on ranks that share a CPU is not split.
    assert (layout.pp, layout.tp, layout.cp) == (1, 1, 1) and layout.dp == 4


def test_a_resumed_run_keeps_its_layout(
    job: Path, started: list[list[str]], shell: Shell
) -> None:
    def degrees(words: str) -> tuple[int, int]:
        said.append(shell(f"train {job} {words}").err)
        parallel = load_from_argv(started[-1]).parallelism
        return parallel.data_parallel_shard_degree, parallel.tensor_parallel_degree

    said, file = [""], job.parent / "run" / auto.FILE
    assert degrees("--nproc 2") == (2, 1)
    # A choice that the formula would not make: it comes from the file.
    kept = file.read_text().replace("shard_degree = 2", "shard_degree = 1")
    kept = kept.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2")
    file.write_text(kept)
    assert degrees("--nproc 2 --optimizer.lr=1e-4") == (1, 2)
    assert f"kept from {file}" in said[-1] and file.read_text() == kept
    assert degrees("--nproc 2 --new-layout") == (2, 1)
    assert file.read_text() != kept
    for words, why in {
        "--nproc 4": "is for 2 ranks, and there are 4",
        "--nproc 2 --training.local_batch_size=8": "has a global batch of 8 sequences",
        "--nproc 2 --training.seq_len=63": "63 is not a multiple of cp 1 x tp 2",
        "--nproc 2 --parallelism.data_parallel_replicate_degree=2": "is for 4 ranks",
    }.items():
        file.write_text(kept)
        degrees(words)
        assert f"chosen again, since {file}" in said[-1] and why in said[-1], said
        ranks = int(words.split()[1])
        assert check_to_run(load_from_argv(started[-1]), world_size=ranks).world_size == ranks
    for text, why in {
        "[parallelism\n": "not valid TOML",
        kept + "[optimizer]\nlr = 0.5\n": "has optimizer.lr, which is no key of a layout",
    }.items():
        file.write_text(text)
        degrees("--nproc 2")
        assert why in said[-1]
    assert load_from_argv(started[-1]).optimizer.lr != 0.5
    file.unlink()
    file.mkdir()
    assert "is a folder: remove it" in shell.refuse(f"train {job} --nproc 2")


@tabled("words, ranks")
def test_keys_that_the_job_sets_are_held(job: Path, words: list[str], ranks: int) -> None:
    argv = [str(job), *words]
    choice = choose(argv, ranks)
    set_keys = {
        word[2:].partition("=")[0] for word in words if not word.startswith("--training")
    }
    assert not set_keys & choice.settings.keys()
    asked, found = (
        load_from_argv(argv),
        load_from_argv([*argv, *choice.overrides]),
    )
    for key in set_keys:
        section, _, name = key.partition(".")
        assert getattr(getattr(found, section), name) == getattr(getattr(asked, section), name)
    assert check_to_run(found, world_size=ranks).world_size == ranks
    if any("activation" in word for word in words):
        assert not any(key.startswith("activation") for key in choice.settings)
    else:
        assert "activation_checkpoint.mode" in choice.settings


@pytest.mark.parametrize("hardware", ["cpu", "h100-sxm"])
def test_degrees_that_leave_nothing_are_named(job: Path, hardware: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose([str(job), "--parallelism.tensor_parallel_degree=3"], 4, hardware)
    (line,) = map(str, error.value.problems)
    assert line.startswith(f"{job}:17: parallelism.layout: ")
    assert "parallelism.tensor_parallel_degree: none has degrees that divide" in line
    # A rule, and not memory, leaves nothing for a phase's degrees.
    job.write_text(
        JOB.format(run="run") + "[[phase]]\nfrom_step = 2\ncontext_parallel_degree = 2\n"
    )
    with pytest.raises(
        ConfigError, match=rf"3 x {hardware}: the job's rules refuse all .*: 3 ranks"
    ):
        choose([str(job)], 3, hardware)


def test_the_choice_is_the_planners(job: Path) -> None:
    """On two GPUs, against every single change of the job and the planner's own candidates."""
    argv, profile = [str(job), "--training.global_batch_size=4"], load_profile("h100-sxm")
    choice = choose(argv, 2, "h100-sxm")
    assert "of 4 layouts in simulation" in choice.settings["parallelism.layout_reason"]
    (chosen,) = simulate_variants(argv, [choice.settings], world_size=2, profiles=[profile])
    best = plan(
        LayoutSearch(argv, load_from_argv(argv), profile, world_size=2), budget=4
    ).ranked[0][1]
    assert chosen.fits and chosen.speed >= 0.95 * best.speed


def test_small_models_get_data_parallelism(job: Path) -> None:
    """The formula prefers a pipeline, whose short microbatches keep the host busy."""
    argv, profile = [str(job), "--training.global_batch_size=16"], load_profile("h100-sxm")
    assert LayoutSearch(argv, load_from_argv(argv), profile, world_size=2).points[0].pp == 2
    for simulate in (True, False):
        found = choose(argv, 2, "h100-sxm", simulate=simulate).settings
        assert found["parallelism.pipeline_parallel_degree"] == "1"


def test_experts_and_data_parallelism_that_does_not_fit(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula prefers a pipeline. Data parallelism is simulated with and without expert parallelism, and again with less memory."""
    seen: list[dict[str, str]] = []

    def simulate(settings: Iterable[dict[str, str]]) -> list[SimpleNamespace]:
        found = []
        for one in settings:
            seen.append(one)
            pp = one["parallelism.pipeline_parallel_degree"]
            fits = pp != "1" or one["activation_checkpoint.mode"] != "none"
            found.append(
                SimpleNamespace(
                    fits=fits,
                    speed=3 - int(pp),
                    needed_gib=50.0 if fits else 90.0,
                    problem="",
                    facts={},
                )
            )
        return found

    monkeypatch.setattr(LayoutSearch, "__call__", lambda _, settings: simulate(settings))
    monkeypatch.setattr(auto, "reason", lambda *_: "")
    words = [
        "--model.name=qwen3",
        "--model.flavor=30B-A3B",
        "--model.overrides.n_layers=12",
        "--training.seq_len=4096",
        "--training.global_batch_size=32",
    ]
    choice = choose([str(job), *words], 8, "h100-sxm")
    degrees = [
        (
            one["parallelism.pipeline_parallel_degree"],
            int(one["parallelism.expert_parallel_degree"]) > 1,
        )
        for one in seen[:4]
    ]
    assert degrees[:3] == [("1", False), ("1", True), (degrees[2][0], False)]
    assert int(degrees[2][0]) > 1 and degrees[3][0] == "1"
    assert [one["activation_checkpoint.mode"] for one in seen[:2]] == ["none", "none"]
    assert seen[3]["activation_checkpoint.mode"] != "none" and len(seen) == 7
    assert choice.settings["parallelism.pipeline_parallel_degree"] == "1"


def test_a_choice_is_made_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LayoutSearch] = []
    formula = lambda search: made.append(search) or auto._by_formula(search, "as a test asks")  # noqa: E731
    monkeypatch.setattr(auto, "_by_simulation", formula)
    first = choose([str(job)], 2, "h100-sxm")
    assert (
        choose([str(job), "--job.description=other"], 2, "h100-sxm") == first and len(made) == 1
    )
    # Other ranks, hardware, keys of the job and versions are other questions.
    choose([str(job)], 4, "h100-sxm")
    choose([str(job)], 2, "a100-80g")
    choose([str(job), "--training.seq_len=128"], 2, "h100-sxm")
    choose([str(job), "--parallelism.tensor_parallel_degree=1"], 2, "h100-sxm")
    assert len(made) == 5
    monkeypatch.setattr(auto, "source_hash", lambda: "another version")
    choose([str(job)], 2, "h100-sxm")
    assert len(made) == 6


def test_large_models_are_not_simulated(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_by_simulation", None)
    words = ["--model.flavor=405B", "--training.seq_len=8192", "--training.local_batch_size=1"]
    large = choose([str(job), *words], 512, "h100-sxm")
    assert "models above 75 billion parameters" in large.settings["parallelism.layout_reason"]


def test_phases_hold_in_the_layout(job: Path) -> None:
    phase = "[[phase]]\nfrom_step = 2\nseq_len = 128\ncontext_parallel_degree = 2\n"
    job.write_text(JOB.format(run="run") + phase)
    config = load_from_argv([str(job), *choose([str(job)], 4).overrides])
    check_to_run(config, world_size=4)
    first, second = phases_of(config, world_size=4)
    assert [p.config.parallelism.context_parallel_degree for p in (first, second)] == [1, 2]
    job.write_text(JOB.format(run="run") + "[[phase]]\nfrom_step = 2\nseq_len = 128\n")
    choice = choose([str(job)], 4)
    check_to_run(load_from_argv([str(job), *choice.overrides]), world_size=4)
    job.write_text(JOB.format(run="run") + "[[phase]]\nfrom_step = 2\nlocal_batch_size = 2\n")
    with pytest.raises(ConfigError, match=r'"auto" needs training\.global_batch_size'):
        auto.resolve([str(job)], world_size=4, profile=lambda _: load_profile("cpu"))


def test_ranks_refuse_a_layout_that_is_not_chosen(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for per_node, command in {
        "4": f"titan train {job} --nproc 4",
        "2": f"titan slurm {job} --nodes 2",
    }.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
        with pytest.raises(ConfigError) as error:
            load_to_run([str(job)], world_size=None, here=True)
        (line,) = map(str, error.value.problems)
        assert line.startswith(f"{job}:17: parallelism.layout: ") and command in line


def test_slurm_needs_the_hardware(job: Path, shell: Shell) -> None:
    run = job.parent / "run"
    assert '--hardware: parallelism.layout = "auto" needs' in shell.refuse(
        f"slurm {job} --nodes 2"
    )
    assert not run.exists()
    words = "--nodes 2 --gpus-per-node 0 --ranks-per-node 2"
    shell(f"slurm {job} {words}")
    script = (run / "job.sbatch").read_text()
    assert "--parallelism.layout=fixed" in script and (run / auto.FILE).is_file()
    degrees = [
        line for line in (run / auto.FILE).read_text().splitlines() if "_degree = " in line
    ]
    for line in degrees:
        assert f"--parallelism.{line.replace(' = ', '=')}" in script
    # As many GPUs as the nodes have, except in a rack that is one domain of fast links.
    assert auto.on_nodes(load_profile("h100-sxm"), 4).gpus_per_node == 4
    assert auto.on_nodes(load_profile("gb200"), 4).gpus_per_node == 72


def test_the_gpu_of_this_machine(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "count_accelerators", lambda: 8)
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess([], 0, stdout=name))
    config = load_config(job)
    assert auto.profile_here(config, 8).name == "h100-sxm"
    name = "NVIDIA GeForce GTX 680"
    with pytest.raises(ConfigError, match=r"GTX 680.*there are a100-80g"):
        auto.profile_here(config, 8)
    named = load_config(job, overrides=["hardware.name=h200-sxm"])
    assert auto.profile_here(named, 8).name == "h200-sxm"


def test_config_and_check_say_what_is_open(job: Path, shell: Shell) -> None:
    resolved = tomllib.loads(shell(f"config {job} --parallelism.tensor_parallel_degree=2").out)
    assert resolved["parallelism"] == {"tensor_parallel_degree": 2, "layout": "auto"}
    assert "activation_checkpoint" not in resolved
    # The resolved job is the same question.
    config = load_config(job)
    job.with_name("resolved.toml").write_text(to_toml(config))
    again = load_config(job.with_name("resolved.toml"))
    assert again == config and auto._held(again) == auto._held(config) == set()

    out = shell(f"check {job} --world-size 4").out
    choice = choose([str(job)], 4, simulate=False)
    words = [str(job), *choice.overrides]
    assert (
        f"4 ranks = {resolve_layout(load_from_argv(words), 4)}" in out and "by formula" in out
    )
    assert not (job.parent / "run").exists()
    assert 'expected one of "fixed", "auto", got "best"' in shell.refuse(
        f"check {job} --parallelism.layout=best"
    )


def test_sim_chooses_for_the_hardware(job: Path, shell: Shell) -> None:
    printed = shell(f"sim {job} --world-size 2 --hardware cpu")
    assert 'titan: layout = "auto": dp_shard 2' in printed.err and "dp_shard 2" in printed.out
    assert not (job.parent / "run").exists()
