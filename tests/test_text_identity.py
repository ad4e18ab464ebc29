"""Weights, tokenizer and data belong together: what a resume and a start from other weights refuse or say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tokenizers import AddedToken, Tokenizer

from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.scripted import SHAPES, build_tokenizer, write_folder
from tests.support.trainers import Trainer, run_to_end
from titan.checkpoint import CheckpointError
from titan.checks.machine import check_machine
from titan.config.render import to_toml
from titan.config.schema import JobConfig

LINE = "the quick brown fox jumps over lazy dogs and cats\n"


def write_tokenizer(folder: Path, family: str) -> Path:
    folder.mkdir()
    build_tokenizer(SHAPES[family]).save(str(folder / "tokenizer.json"))
    names = {"bos_token": SHAPES[family].bos, "eos_token": SHAPES[family].eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, its tokenizer, and another one of about the same size."""
    folder = tmp_path_factory.mktemp("made")
    write_tokenizer(folder / "tok", "llama3")
    write_tokenizer(folder / "other", "gpt_oss")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(LINE * 50)
    (folder / "held.txt").write_text(LINE * 20)
    (folder / "task.jsonl").write_text('{"context": "the quick", "target": " brown"}\n')
    train(config(folder, steps=2))
    return folder


def config(
    folder: Path, *, steps: int = 4, run: Path | None = None, **changes: Any
) -> JobConfig:
    sections: dict[str, Any] = {
        "model": {"flavor": "tiny", "overrides": {"n_layers": 1, "vocab_size": 400}},
        "tokenizer": {"path": str(folder / "tok")},
        "data": {"cache_folder": str(folder / "cache")},
        "training": {"dataset": "text", "dataset_path": str(folder / "text"), "steps": steps},
        "validation": {
            "enable": True,
            "dataset": "text",
            "dataset_path": str(folder / "held.txt"),
            "freq": 100,
            "steps": 1,
        },
        "checkpoint": {"enable": True, "interval": 1},
    }
    for name, change in changes.items():
        sections[name] = {**sections.get(name, {}), **change}
    made = job(run or folder / "run", **sections)
    return made.model_copy(
        update={
            "evaluation": dict(
                JobConfig.model_validate(
                    {"evaluation": [{"tasks": [str(folder / "task.jsonl")], "interval": 100}]}
                )
            )["evaluation"]
        }
    )


def train(config: JobConfig) -> None:
    try:
        trainer = Trainer(config)
    except CheckpointError:
        dist.destroy_process_group()
        raise
    run_to_end(trainer)


def copied(made: Path, tmp_path: Path) -> Path:
    """Return a copy of everything, at another path."""
    return shutil.copytree(made, tmp_path / "copy")


def files(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def problems(config: JobConfig) -> list[str]:
    return [f"{problem.key}: {problem.message}" for problem in check_machine(config)]


def test_a_resume_with_another_tokenizer_is_refused_before_anything_changes(
    made: Path, tmp_path: Path, shell: Shell
) -> None:
    folder = copied(made, tmp_path)
    run = folder / "run"
    # The newest step is damaged, which a resume would set aside.
    next((run / "checkpoint" / "step-2").glob("*.distcp")).write_bytes(b"")
    before = files(run / "checkpoint")
    for tokenizer in ({"path": str(folder / "other")}, {"name": "bytes", "path": ""}):
        other = config(folder, tokenizer=tokenizer)
        [found] = problems(other)
        assert (
            "step-2/titan.json: its weights belong to the tokenizer huggingface of 336" in found
        )
        assert f"set tokenizer.path = {run / 'tokenizer'}, or" in found
        with pytest.raises(CheckpointError, match="its weights belong to the tokenizer"):
            train(other)
        assert files(run / "checkpoint") == before
        (tmp_path / "job.toml").write_text(to_toml(other))
        for command in (["check"], ["train", "--nproc", "1"]):
            said = shell.refuse(f"{command[0]} {tmp_path}/job.toml", *command[1:])
            assert said.count("its weights belong") == 1, said
    excluded = {"exclude_from_loading": ["tokenizer"]}
    assert not problems(
        config(folder, tokenizer={"name": "bytes", "path": ""}, checkpoint=excluded)
    )


def test_one_tokenizer_is_one_in_another_place_form_and_with_more_files(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(made, tmp_path)
    shutil.rmtree(folder / "other")
    (folder / "tok").rename(folder / "elsewhere")
    again = Tokenizer.from_file(str(folder / "elsewhere" / "tokenizer.json"))
    again.add_special_tokens([AddedToken("<|new|>")])
    again.save(str(folder / "elsewhere" / "tokenizer.json"), pretty=False)
    (folder / "elsewhere" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    named = json.dumps({"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"})
    (folder / "elsewhere" / "tokenizer_config.json").write_text(named)
    same = config(folder, tokenizer={"path": str(folder / "elsewhere")})
    assert not problems(same)
    train(same)
    said = capsys.readouterr().out
    said = said.replace("\n", " ")
    assert "the tokenizer's eos_id changed since the step was saved: 3 -> 4" in said
    assert "the tokenizer's template changed since the step was saved: none -> " in said
    assert "WARNING" not in said


def test_other_data_is_said_once_with_counts(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(made, tmp_path)  # elsewhere, with other times
    for file in folder.rglob("*.txt"):
        os.utime(file, (1, 1))
    train(config(folder, steps=3))
    assert "WARNING" not in capsys.readouterr().out
    (folder / "text" / "b.txt").write_text(LINE * 5)
    (folder / "held.txt").write_text(LINE * 21)
    (folder / "task.jsonl").write_text('{"context": "the quick", "target": " foxes"}\n')
    train(config(folder, steps=4))
    said = capsys.readouterr().out.replace("\n", " ")
    size = len(LINE)
    for line in (
        f"training.dataset_path: 1 files, {50 * size:,} bytes -> 2 files, {55 * size:,} bytes",
        f"validation.dataset_path: 1 files, {20 * size:,} bytes -> 1 files, {21 * size:,} bytes",
        f"evaluation[0].tasks, {folder / 'task.jsonl'}: 1 files",
    ):
        assert said.count(line) == 1, said
    assert said.count("WARNING: THE DATA CHANGED since the step was saved") == 3
    train(config(folder, steps=5))
    assert "WARNING" not in capsys.readouterr().out


def test_a_start_from_other_weights_names_the_tokenizer(made: Path, tmp_path: Path) -> None:
    write_folder(hf := tmp_path / "hf", SHAPES["qwen3"], scripts={})
    step = made / "run" / "checkpoint" / "step-2"
    starts = {
        hf: ({"initial_load_path": str(hf), "initial_load_in_hf": True}, hf),
        step: ({"initial_load_path": str(step)}, made / "run" / "tokenizer"),
    }
    for where, (checkpoint, right) in starts.items():
        for path, is_right in ((made / "other", False), (right, True)):
            start = config(
                made, run=tmp_path / "new", tokenizer={"path": str(path)}, checkpoint=checkpoint
            )
            found = problems(start)
            assert bool(found) is not is_right, found
            if not is_right:
                assert (
                    f"{where}" in found[0] and f"set tokenizer.path = {right}, or" in found[0]
                )
    # A folder without a tokenizer says nothing.
    for file in hf.glob("tokenizer*"):
        file.unlink()
    checkpoint = starts[hf][0]
    assert not problems(config(made, run=tmp_path / "new", checkpoint=checkpoint))


def test_steps_of_older_versions_are_accepted(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    for file in (folder / "run" / "checkpoint").glob("*/titan.json"):
        saved = json.loads(file.read_text())
        del saved["text"]
        file.write_text(json.dumps(saved))
    train(config(folder, steps=3, checkpoint={"verify": "off"}))
