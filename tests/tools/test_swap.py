"""titan/numerics/swap: right swaps, a fault in the new job, named changes, kills, and the way back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.tools.test_audit import GradientFlips, _train
from titan.checkpoint.storage import LocalStorage
from titan.cli import main as titan
from titan.config.load import load_from_argv
from titan.config.render import to_toml
from titan.numerics.swap import command

SECTIONS: Any = {"training": {"steps": 8}, "checkpoint": {"interval": 3}}
HALVES = ("--training.local_batch_size=1", "--training.global_batch_size=2")


class LaterGradientFlips(GradientFlips):
    step = 7


class Trained(list[str]):
    """Names of the jobs that were trained here. The new one may have a fault, and a job may be killed."""

    faults: tuple[Any, ...] = ()
    killed = ""

    def __call__(self, words: Sequence[str], *, ranks: int, what: str, python: str) -> None:
        name = what.removesuffix(" job").rpartition("the ")[2]
        if name == self.killed:
            raise KeyboardInterrupt
        self.append(name)
        _train(load_from_argv(words, warn=False), *(self.faults if name == "new" else ()))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "predict", lambda config, ranks: {})
    found = Trained()
    monkeypatch.setattr(command, "train", found)
    _train(job("old", **SECTIONS))
    Path("new.toml").write_text(to_toml(job("new", **SECTIONS)))
    return found


def swap(*words: str, to: tuple[str, ...] = ("--to=new.toml",)) -> int:
    return titan(["swap", "old", *to, "--steps=1", "--json=found.json", *words])


def files(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def losses(folder: str) -> list[float]:
    return [row["loss"] for row in read_json_lines(Path(folder, "metrics.jsonl"))]


def test_a_run_goes_on_as_another_job_and_back(trained: Trained) -> None:
    before = files("old")
    assert swap(*HALVES) == 0
    assert trained == ["old", "new", "disturbed old"]
    found = json.loads(Path("found.json").read_text())
    assert found["proofs"][0]["verdict"] == "equal but for rounding" and found["step"] == 6
    assert 0 < found["proofs"][0]["steps"][0]["worst"] < 0.5
    assert losses("new") == losses("old")[:6]
    _train(load_from_argv(["new.toml", *HALVES], warn=False))
    assert losses("new")[6:] == pytest.approx(losses("old")[6:], rel=1e-5)
    assert losses("new")[7] != losses("old")[7]
    assert files("old") == before
    assert titan(["swap", "new", "--back", "--steps=1", "--job.dump_folder=back"]) == 0
    lineage = json.loads(Path("back/swap.json").read_text())["swaps"]
    assert [(one["run"], one["step"]) for one in lineage] == [("old", 6), ("new", 6)]
    assert losses("back") == losses("old")[:6]


def test_a_fault_is_refused_with_its_place(trained: Trained) -> None:
    trained.faults = (LaterGradientFlips,)
    assert swap() == 1 and swap("--or-refuse") == 3
    (step,) = json.loads(Path("found.json").read_text())["proofs"][0]["steps"]
    assert step["verdict"] == "differs" and step["step"] == 7
    assert "update of layers.1.feed_forward.w1.weight" in step["first"]
    assert not [*Path().glob("new*[!l]")]


def test_a_change_of_what_is_learned_has_to_be_named(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swap("--optimizer.lr=1e-3") == 2
    assert "optimizer.lr: 0.0008 -> 0.001" in capsys.readouterr().err
    assert swap("--optimizer.lr=1e-3", "--changes=optimizer") == 0
    assert trained == ["old", "new"]  # equal bits, as all else is the same


@pytest.mark.parametrize("part", ["new", "rename"])
def test_the_same_command_goes_on_after_a_kill(
    trained: Trained, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    before = files("old")
    with monkeypatch.context() as patch:
        trained.killed = part
        if part == "rename":
            patch.setattr(LocalStorage, "rename", killed)
        assert swap() == 130
    trained.killed = ""
    assert not Path("new").exists()
    assert swap() == 0 and trained == ["old", "new"]
    assert swap() == 0 and trained == ["old", "new"]  # nothing is left to do
    assert files("old") == before and losses("new") == losses("old")[:6]
