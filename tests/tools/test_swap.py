"""titan/numerics/swap: a right swap and the way back, a fault in the new job, named changes, kills."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.support.tables import table
from tests.tools.test_audit import GradientFlips, _train
from titan.cli import main as titan
from titan.config.load import load_from_argv
from titan.config.render import to_toml
from titan.numerics.swap import handover
from titan.run.hook import Hook
from titan.run.trainer import Trainer

SECTIONS: Any = {"training": {"steps": 8}, "checkpoint": {"interval": 3}}
BOTH, FOLDER = ["old", "new"], "new folder"
HALVES = ("--training.local_batch_size=1", "--training.global_batch_size=2")


def _kill(*_: object) -> None:
    raise KeyboardInterrupt


class Trained(list[str]):
    """Names of the jobs that were trained, here. The new one may have a fault, and a job may be killed."""

    faults: tuple[Any, ...] = ()
    killed = ""

    def __call__(self, words: Sequence[str], *, ranks: int, what: str, python: str) -> None:
        name = what.removesuffix(" job").rpartition("the ")[2]
        if name == self.killed:
            _kill()
        self.append(name)
        _train(
            load_from_argv(words, warn=False), *(self.faults if name.startswith("new") else ())
        )


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.chdir(tmp_path)
    found = Trained()
    monkeypatch.setattr("titan.numerics.experiment.train", found)
    _train(job("old", **SECTIONS))
    Path("new.toml").write_text(to_toml(job("new", **SECTIONS)))
    return found


def swap(*words: str) -> int:
    return titan(["swap", "old", "--to=new.toml", "--steps=1", "--json=found.json", *words])


def result() -> list[str]:
    return json.loads(Path("found.json").read_text())["result"]


def _write(**sections: Any) -> None:
    """Train the old job again with other sections, and write the new job."""
    shutil.rmtree("old")
    _train(job("old", **SECTIONS | sections))
    Path("new.toml").write_text(to_toml(job("new", **SECTIONS | sections)))


def step() -> Any:
    return json.loads(Path("found.json").read_text())["proofs"][0]["steps"][0]


def losses(run: str) -> list[float]:
    return [row["loss"] for row in read_json_lines(Path(run, "metrics.jsonl"))]


def test_a_run_goes_on_as_another_job_and_back(trained: Trained, shell: Shell) -> None:
    before = {path: path.read_bytes() for path in Path("old").rglob("*.*")}
    assert swap(*HALVES) == 0 and trained == [*BOTH, "disturbed old", FOLDER]
    assert step()["verdict"] == "equal but for rounding" and 0 < step()["worst"] < 0.5
    assert losses("new") == losses("old")[:6]
    _train(load_from_argv(["new.toml", *HALVES], warn=False))
    assert losses("new")[6:] == pytest.approx(losses("old")[6:], rel=1e-5)
    assert {path: path.read_bytes() for path in Path("old").rglob("*.*")} == before
    # The job before has its own number of ranks, or its batch would be another one.
    place = Path("new/environment.json")
    place.write_text(json.dumps(json.loads(place.read_text()) | {"world_size": 2}))
    shell("swap new --to=new/before.toml --nproc=1 --steps=1 --job.dump_folder=back")
    lineage = json.loads(Path("back/swap.json").read_text())["swaps"]
    assert [(one["run"], one["step"]) for one in lineage] == [("old", 6), ("new", 6)]


def test_a_fault_is_refused_with_its_place(trained: Trained) -> None:
    trained.faults = (type("Flips", (GradientFlips,), {"step": 7}),)
    assert swap() == 1 and swap("--or-refuse") == 3
    assert step()["verdict"] == "differs" and step()["step"] == 7
    assert "update of layers.1.feed_forward.w1.weight" in step()["first"]
    assert {path.name for path in Path().iterdir()} == {"old", "new.toml", "found.json"}


def test_a_change_of_what_is_learned_has_to_be_named(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only one side sets the key, too. A phase is a table, so a file has it."""
    phase = "[[phase]]\nfrom_step = 8\nlr_factor = 0.5\n"
    Path("phase.toml").write_text(Path("new.toml").read_text() + phase)
    for words in (*(f"--{key}" for key in table(__file__, "settings")), "--to=phase.toml"):
        assert swap(words) == 2
        named = words.strip("-").replace("to=phase.toml", "phase").partition("=")[0]
        assert named.replace("local_batch", "global_batch") in capsys.readouterr().err
    # A checkpoint outside the run folder would be lost in the handover.
    text = Path("new.toml").read_text().replace('folder = "checkpoint"', 'folder = "../other"')
    Path("phase.toml").write_text(text)
    assert swap("--to=phase.toml") == 2 and "below its run folder" in capsys.readouterr().err
    assert swap("--optimizer.lr=1e-3", "--changes=optimizer") == 0
    assert trained == [*BOTH, FOLDER]  # equal bits, as all else is the same


class StillAverage(Hook):
    def __init__(self, trainer: Trainer) -> None:
        average: Any = trainer.train_step.average
        average.update = lambda step: None


class FasterRate(Hook):
    def __init__(self, trainer: Trainer) -> None:
        def faster(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 1.05

        trainer.train_step.optimizer.register_step_pre_hook(faster)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_no_step_shows_is_in_the_saves_and_bf16_hides_nothing(
    trained: Trained, precision: str
) -> None:
    """In another layout, so that rounding is measured. In bf16 alone, both faults are within the bounds."""
    _write(average={"enable": True}, training={"steps": 8, "mixed_precision_param": precision})
    trained.faults = (StillAverage,)
    assert swap(*HALVES) == 1 and "REFUSED: saved: average." in result()[0]
    trained.faults = (FasterRate,)
    assert swap(*HALVES) == 1 and result()[0].startswith("REFUSED: s")
    trained.faults = ()
    assert swap(*HALVES) == 0 and result()[0].startswith("PASS: equal but for rounding")
    assert ("float32 decides" in result()[0]) == (precision == "bfloat16")
    assert "2 steps since step 6 will be trained again" in result()[2]


def test_what_the_comparison_overwrites_is_found_in_the_new_folder(trained: Trained) -> None:
    """Both jobs leave the optimizer's state out, so no setting differs."""
    _write(checkpoint={"interval": 3, "exclude_from_loading": ["optimizer"]})
    assert swap() == 1 and trained == [*BOTH, FOLDER, FOLDER]
    assert "with the command that goes on, in the new folder, step 7: update of" in result()[0]


def test_what_modules_draw_is_left_out(trained: Trained) -> None:
    _write(model=table(__file__, "drawing"))
    assert swap(*HALVES) == 0 and "dropout: both jobs computed without it" in result()[1]
    assert trained == [*BOTH, *(f"{n} without draws" for n in (*BOTH, "disturbed old")), FOLDER]


def test_the_runs_copy_of_a_tokenizer_is_no_change_and_other_data_is(
    trained: Trained, shell: Shell
) -> None:
    """Keys of the command line are permissions for the old job, too. They hide no change."""
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save("words.json")
    words: Any = SECTIONS | {"tokenizer": {"path": "words.json"}}
    _train(job("copied", **words))
    assert Path("copied/tokenizer/words.json").is_file()
    Path("new.toml").write_text(to_toml(job("new", **words)))
    command = ["swap", "copied", "--to=new.toml", "--steps=1"]
    said = shell.refuse(*command, "--training.dataset=stdlib")
    assert 'training.dataset: "synthetic" -> "stdlib" changes' in said
    assert titan(command) == 0 and trained == [*BOTH, FOLDER]


@pytest.mark.parametrize("part", ["new", "rename"])
def test_the_same_command_goes_on_after_a_kill(
    trained: Trained, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.killed = part
    with monkeypatch.context() as patch:
        if part == "rename":
            patch.setattr(handover, "LocalStorage", lambda: SimpleNamespace(rename=_kill))
        assert swap() == 130
    trained.killed = ""
    assert not Path("new").exists()
    assert swap() == swap() == 0 and trained == [*BOTH, FOLDER]
    assert losses("new") == losses("old")[:6]
