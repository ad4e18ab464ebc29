"""scripts/bench/steps.py: the job that all are given, runs of titan, the bare loop and an earlier titan."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import finished
from tests.support.jobs import ROOT
from tests.support.runs import logged_rows
from titan.checks.rules import check_to_run, load_to_run
from titan.config.load import load_config

STEPS = runpy.run_path(str(ROOT / "scripts/bench/steps.py"))
GPU = ROOT / "scripts/bench/gpu.sh"
TINY = ["--model", "tiny", "--seq-len", "16", "--rounds", "1", "--warm-up", "1"]


def arguments(*more: str) -> argparse.Namespace:
    return STEPS["parse"](["--json", "unused.json", *more])


def runs(path: Path, contestants: str, *more: str) -> list[dict[str, Any]]:
    options = ["--against", contestants, *f"--variants eager --json {path}".split()]
    STEPS["main"]([*TINY, *options, *more])
    return json.loads(path.read_text())["runs"]


def test_titan_and_the_bare_loop_train_and_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, keep = tmp_path / "out.json", f"--steps 2 --keep {tmp_path}/runs".split()
    first = runs(out, "titan,bare", *keep)
    assert [run["contestant"] for run in first] == ["titan", "bare"]
    for run in first:
        assert (
            len(run["windows"]) == 2 and run["tokens_per_s"] > 0 and run["reserved_gib"] > 0.1
        )
        assert 7 < run["loss"] < 9  # log(2048) = 7.6
    losses = [row["loss"] for row in logged_rows(tmp_path / "runs/eager-0-bare")]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[2] > 0.005  # one batch
    assert runs(out, "titan,bare", *keep) == first  # its folders would be in the way
    assert f"| bare | {first[1]['tokens_per_s']:,.0f} (" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TorchTitan needs an accelerator")
def test_torchtitan_trains(tmp_path: Path) -> None:
    (run,) = runs(tmp_path / "out.json", "torchtitan", "--steps", "2")
    assert "error" not in run and 7 < run["loss"] < 9 and len(run["windows"]) == 2


def test_no_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STEPS["main"]([*TINY, *f"--against bare --json {tmp_path}/o --limit-s 1".split()])
    assert "no time left" in capsys.readouterr().out


def test_the_job_of_a_variant(tmp_path: Path) -> None:
    args = arguments("--model", "8B-blocks", "--steps", "20", "--warm-up", "5")
    STEPS["write_job"](tmp_path, args, "compile+sac+float8")
    config = load_config(tmp_path / "job.toml", overlays=[tmp_path / "titan.toml"])
    check_to_run(config, world_size=1)
    assert config.source_map.warnings == []
    assert config.compile.enable and config.model.converters == ["quantize.linear.float8"]
    ac = config.activation_checkpoint
    assert (ac.mode, ac.selective_ac_option) == ("selective", "op")
    training = config.training
    assert (training.local_batch_size, training.seq_len, training.steps) == (2, 8192, 25)
    assert config.metrics.log_freq == 5 and not config.checkpoint.enable
    assert config.model.overrides == {"n_layers": 8, "tied_embeddings": False}
    STEPS["write_job"](tmp_path, args, "accumulate4+chunk8192")
    config = load_config(tmp_path / "job.toml", overlays=[tmp_path / "titan.toml"])
    assert config.training.global_batch_size == 8 and config.loss.chunk_tokens == 8192
    assert not config.compile.enable and config.activation_checkpoint.mode == "none"


def measured_by_gpu_sh() -> list[tuple[str, str, str]]:
    """Return model, variant and contestants of each row that gpu.sh measures."""
    text = GPU.read_text()
    names = {"SMALL": "1B", "BLOCKS": "8B-blocks", "EXPERTS": "30B-A3B-blocks"}
    names["HYBRID"] = "80B-A3B-blocks"
    rows = re.findall(r"\bsteps \S+ \$(\w+) (\S+) (\S+) \d", text)
    assert {f"{name}={names[name]}" for name, *_ in rows} <= set(text.split())
    assert len(rows) == len(re.findall(r"\bsteps [a-z0-9]+-?\S* \$", text)) > 15
    return [
        (names[m], variant, against)
        for m, variants, against in rows
        for variant in variants.split(",")
    ]


@pytest.mark.parametrize(("model", "variant", "against"), measured_by_gpu_sh())
def test_every_row_of_gpu_sh_can_run(
    model: str, variant: str, against: str, tmp_path: Path
) -> None:
    args = arguments("--model", model, "--variants", variant, "--against", against)
    STEPS["write_job"](tmp_path, args, variant)
    job = [str(tmp_path / name) for name in ("job.toml", "titan.toml")]
    emulate = (
        ["--quantize.linear.float8.emulate=true"] if "float8" in variant else []
    )  # no GPU here
    config, _ = load_to_run([*job, *emulate], world_size=1, here=True)
    assert config.training.mixed_precision_param != "float32"


@pytest.mark.slow
def test_gpu_sh_runs_in_a_clone_that_is_not_installed(tmp_path: Path) -> None:
    clone, packages = tmp_path / "clone", tmp_path / "venv"
    tracked = finished(["git", "ls-files"], cwd=ROOT)
    for name in tracked.stdout.split():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    # An environment with what titan needs and without titan: a .pth file in a folder that a .pth file names is not read.
    venv.create(packages, symlinks=True)
    (site,) = packages.glob("lib/*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"])
    python = packages / "bin" / "python"
    absent = subprocess.run([python, "-c", "import titan"], cwd=tmp_path, capture_output=True)
    assert absent.returncode == 1
    variables = {
        "TINY": "1",
        "LIMIT_S": "3000",
        "PYTHON": str(python),
        "SAVE_TO": str(tmp_path / "saved"),
    }
    only = "machine tests pair-1B profile-pair-1B speed-experts predict"

    def run(folder: str, **more: str) -> str:
        command = ["bash", clone / "scripts/bench/gpu.sh", tmp_path / folder]
        environment = {**os.environ, **variables, "ONLY": only, **more}
        return finished(command, env=environment).stdout

    said = run("first")
    assert said.count("exit code 0") == len(only.split()) and "complete: " in said, said
    runs = json.loads((tmp_path / "first/steps.json").read_text())["runs"]
    assert [(run["model"], run["variant"]) for run in runs] == [
        ("tiny", "compile"),
        ("tiny-experts", "eager"),
        ("tiny-experts", "compile"),
    ]
    assert not [run for run in runs if "error" in run]
    # Another machine goes on where the first one stopped.
    said = run("second", RESUME_FROM=str(tmp_path / "saved"))
    assert said.count("exit code") == 1 and "machine: exit code 0" in said, said


def test_what_is_expected_is_what_the_simulator_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the simulator, run the commands at the top of steps.py to update expected.json."""
    committed = json.loads((ROOT / "scripts/bench/expected.json").read_text())["h100-sxm"]
    monkeypatch.setitem(STEPS["expect"].__globals__, "EXPECTED", tmp_path / "expected.json")
    STEPS["main"](["--model", "1B", "--variants", "eager", "--expect", "h100-sxm"])
    found = json.loads((tmp_path / "expected.json").read_text())["h100-sxm"]
    assert found == pytest.approx(
        {"1B, 8192, 2, eager": committed["1B, 8192, 2, eager"]}, rel=0.01
    )


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--variants", "compile+sacc")
    assert "'sacc': use eager, compile, ac, sac, float8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        arguments("--variants", "compile+accumulate4")
    said = capsys.readouterr().err
    assert "accumulate4 is for before, titan, torchtitan, not for bare" in said
    other = tmp_path / "out.json"
    other.write_text(json.dumps({"machine": {"device": "another"}, "runs": []}))
    with pytest.raises(SystemExit, match="name another file"):
        runs(other, "titan")
