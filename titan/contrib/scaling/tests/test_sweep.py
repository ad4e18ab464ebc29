"""Sweeps: the runs, a killed sweep, verdicts, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell, finished
from tests.support.tables import tabled
from titan.base.untrusted import InputError
from titan.config.load import load_config
from titan.contrib.scaling import results, trials
from titan.contrib.scaling.execute import run_here
from titan.contrib.scaling.results import Setting

JOB = """
[model]
flavor = "tiny"
overrides = { dim = 32, n_layers = 1, vocab_size = 512 }
[training]
seq_len = 32
local_batch_size = 2
steps = 12
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 2
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def test_runs_with_a_run_that_diverges(job: Path, tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "sweep"
    words = f"sweep {job} --set=optimizer.lr=1e-4,3e-2,1e8 --folder={folder}"
    said = shell(f"{words} --seeds=2 --jobs=2").out
    assert "optimizer.lr=3e-2 is better than optimizer.lr=1e-4 by " in said and " ± " in said
    assert "| optimizer.lr=1e8 | - | - | 2 diverged |" in said
    rows = rows_of(folder)
    assert [*rows][:2] == ["lr=1e-4,seed=0", "lr=1e-4,seed=1"] and len(rows) == 6
    # The row has what the run logged.
    of_run = json.loads((folder / "lr=3e-2,seed=1/metrics.jsonl").read_text().splitlines()[-1])
    assert rows["lr=3e-2,seed=1"]["loss"] == of_run["loss_mean"]
    assert rows["lr=3e-2,seed=1"]["tokens"] == 12 * 2 * 32
    config = load_config(folder / "jobs/lr=3e-2,seed=1.toml")
    assert config.optimizer.lr == 3e-2 and config.debug.seed == 1
    # Nothing is trained twice.
    said = shell(f"{words} --seeds=2").out
    assert "6 of 6 runs are done" in said and "begins" not in said


@pytest.mark.slow
def test_a_killed_sweep_goes_on(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    words = [sys.executable, *f"-m titan.cli sweep {job} --folder={folder}".split()]
    words += ["--set=optimizer.lr=1e-3,2e-3,3e-3", "--training.steps=60"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    first, second = folder / "lr=1e-3", folder / "lr=2e-3"
    end = time.monotonic() + 120
    while not (second / "metrics.jsonl").is_file():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    written = (first / "metrics.jsonl").stat().st_mtime_ns
    process.kill()
    process.communicate()
    # The run that it had begun goes on alone. The next command waits for it.
    done = finished(words)
    assert "1 of 3 runs are done" in done.stdout and "lr=1e-3: begins" not in done.stdout
    assert (first / "metrics.jsonl").stat().st_mtime_ns == written
    assert {row["state"] for row in rows_of(folder).values()} == {"done"}


@pytest.mark.slow
def test_lengths_are_swept_and_not_repeated(job: Path, tmp_path: Path, shell: Shell) -> None:
    words = f"sweep {job} --set=training.steps=4,8 --folder={tmp_path / 's'}"
    shell(f"{words} --jobs=2")
    assert {row["step"] for row in rows_of(tmp_path / "s").values()} == {4, 8}
    assert "2 of 2 runs are done" in shell(words).out


def groups(*losses: list[float]) -> list[Setting]:
    return [Setting(f"lr={n}", each, ["done"] * len(each)) for n, each in enumerate(losses)]


def test_verdicts_know_noise() -> None:
    """The interval is Student's with the variance that all settings share: two seeds each, two degrees of freedom."""
    clear = groups([2.00, 2.02], [2.10, 2.12])
    gap, width = results.difference(clear[0], clear[1], clear)
    assert gap == pytest.approx(0.1) and width == pytest.approx(2.920 * 2e-4**0.5)
    assert results.verdict(clear) == "lr=0 is better than lr=1 by 0.1000 ± 0.0413 nats"
    assert "do not differ: 0.0100 ± 0.0" in results.verdict(groups([2.00, 2.02], [2.01, 2.03]))
    assert "--seeds 2 measures it" in results.verdict(groups([2.0], [2.1]))
    assert results.verdict(groups([], [])) == "no settings have finished all their runs"


def test_intervals_hold_the_truth() -> None:
    """Intervals of 90% are wrong in a tenth of 2,000 drawn sweeps whose settings do not differ."""
    import numpy as np

    generator, wrong = np.random.default_rng(0), 0
    for _ in range(2000):
        drawn = groups(*generator.normal(size=(2, 3)).tolist())  # pyrefly: ignore[not-iterable]
        gap, width = results.difference(drawn[0], drawn[1], drawn)
        assert width is not None
        wrong += abs(gap) > width
    assert 0.08 < wrong / 2000 < 0.12


@tabled("words, expected")
def test_mistakes_are_lines(
    job: Path,
    tmp_path: Path,
    shell: Shell,
    words: list[str],
    expected: str,
) -> None:
    said = shell.refuse(f"sweep {job} --folder={tmp_path / 's'}", *words)
    assert expected in said and len(said.splitlines()) == 1 + said.endswith("1 problem\n")
    assert not (tmp_path / "s").exists()


def test_a_folder_keeps_the_runs_of_its_sweep(
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shell: Shell,
) -> None:
    """A report would lose some."""
    monkeypatch.setattr("titan.contrib.scaling.execute.run_here", lambda *_, **__: 0)
    words = f"sweep {job} --folder={tmp_path / 's'}"
    assert "lr=2e-3: waiting" in shell(f"{words} --set=optimizer.lr=1e-3,2e-3", code=1).err
    kept = (tmp_path / "s/sweep.json").read_text()
    assert "is the folder of a sweep with lr=1e-3: use another --folder" in shell.refuse(
        f"{words} --set=optimizer.lr=2e-3,3e-3"
    )
    assert (tmp_path / "s/sweep.json").read_text() == kept
    shell(f"{words} --set=optimizer.lr=2e-3,3e-3,1e-3", code=1)
    assert [trial.name for trial in trials.read(tmp_path / "s")] == [
        "lr=1e-3",
        "lr=2e-3",
        "lr=3e-3",
    ]
    (tmp_path / "file").touch()
    assert "file: " in shell.refuse(f"sweep {job} --seeds=2 --folder={tmp_path / 'file'}")


def test_a_run_that_fails_names_its_log(
    job: Path, tmp_path: Path, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    trial = trials.Trial("seed=0", {}, 0, 12, folder)
    trials.write([(trial, load_config(job))], folder)
    trial.job.write_text("[model]\nflavor = 1\n")
    assert run_here([trial], at_a_time=1, processes=1) == 0
    assert f"exit code 2; see {folder}/jobs/seed=0.log" in capsys.readouterr().out
    shell(f"sweep --folder={folder} --report", code=1)
    assert "model.flavor" in (folder / "jobs/seed=0.log").read_text()


def test_another_job_needs_another_folder(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    config = load_config(job)
    trial = trials.Trial("a", {}, 0, 12, folder)
    trials.write([(trial, config)], folder)
    trial.run.mkdir()
    trials.write([(trial, config)], folder)
    other = load_config(job, overrides=["training.steps=13"])
    with pytest.raises(InputError, match="use another --folder"):
        trials.write([(trial, other)], folder)


def test_values_with_commas_and_names() -> None:
    given = ["model.overrides.dim=32,64", 'training.dataset="a,b",c', "data.x=[1, 2],[3]"]
    nested = trials.parse_settings(
        ['a.b=[[1, 2], [3]],{c = {d = 1, e = 2}, f = [3, 4]},"it\'s"']
    )
    assert nested["a.b"] == ["[[1, 2], [3]]", "{c = {d = 1, e = 2}, f = [3, 4]}", '"it\'s"']
    settings = trials.parse_settings(given)
    assert settings["training.dataset"] == ['"a,b"', "c"] and settings["data.x"] == [
        "[1, 2]",
        "[3]",
    ]
    assert len(trials.combinations(settings, 2)) == 16
    name = trials.name_of({"optimizer.lr": "1e-3", "a.dim": "8", "b.dim": "9"}, 1, seeds=2)
    assert name == "lr=1e-3,a.dim=8,b.dim=9,seed=1"
    # A name fits a file system, and a long value does not hide the seed behind it.
    long = {trials.name_of({"a.b": "\u00e9" * 200}, seed, seeds=2) for seed in (0, 1)}
    assert len(long) == 2 and max(len(name.encode()) for name in long) < 200


@pytest.mark.parametrize("key", ["tokenizer.name", "training.dataset", "data.mix"])
def test_losses_on_other_text_do_not_compare(key: str) -> None:
    """A key of the text counts only if its values differ."""
    groups = [
        Setting(f"{key}={data} optimizer.lr={lr}", [loss], ["done"])
        for data, lr, loss in (("a", "1", 2.0), ("a", "2", 3.0), ("b", "2", 4.0))
    ]
    assert results.verdict(groups[:2]).startswith(
        f"{key}=a optimizer.lr=1 is 1.0000 nats below"
    )
    assert results.verdict(groups).startswith("runs differ in " + key.partition(".")[0])
