"""`titan init` and `titan config --list`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

from tests.support.commands import Shell
from titan.config.load import load_config
from titan.models.llama3 import FLAVORS
from titan.tools.shipped import about, jobs


def test_every_shipped_job_says_what_it_is(shell: Shell) -> None:
    lines = shell("config --list").out.splitlines()
    assert [line.split()[0] for line in lines] == list(jobs())
    assert all(about(file) in line for file, line in zip(jobs().values(), lines, strict=True))
    assert all(about(file).endswith(".") for file in jobs().values())


def test_a_job_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    shell("init")
    assert load_config("job.toml").model.sizes == replace(FLAVORS["1M"], vocab_size=264)
    assert load_config("job.toml").job.dump_folder == "outputs/job"
    shell("init", "it's mine.toml")
    assert load_config("it's mine.toml").job.dump_folder == "outputs/first"
    (tmp_path / "job.toml").write_text("mine")
    shell("init", code=2)
    assert (tmp_path / "job.toml").read_text() == "mine"
    shell("config --list llama3_8b --output eight.toml")
    assert load_config("eight.toml").model.flavor == "8B"
    # An editor finds the schema from wherever the copy is.
    for name in ("it's mine.toml", "eight.toml"):
        line, *_ = (tmp_path / name).read_text().splitlines()
        assert line.startswith("#:schema file:///")
        schema = Path(url2pathname(urlparse(line.removeprefix("#:schema ")).path))
        assert json.loads(schema.read_text())["title"] == "titan job file"
    assert "did you mean 'llama3_8b'?" in shell.refuse(
        "config --list llama3_8 --output other.toml"
    )


def test_two_commands_train_on_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none").mkdir()
    Path("text.txt").write_text(Path(argparse.__file__).read_text())
    for words, expected in (("none", "no *.txt"), ("text.txt --vocab=99", "99 is below 258")):
        said = shell.refuse(f"init run.toml --text {words}")
        assert expected in said and said.count("\n") == 1 and not Path("run.toml").exists()
    shell("init run.toml --text text.txt --vocab=300")
    shell("train run.toml --training.seq_len=9 --training.steps=2")
    ran = load_config("outputs/run/config.toml")
    assert ran.model.overrides == {"vocab_size": 304} and ran.tokenizer.path == "run_tokenizer"
    Path("run.toml").unlink()
    shell.refuse("init run.toml --text text.txt")  # the run's tokenizer is there
    shell("init")
    # One key of the starter is another tokenizer.
    words = "config job.toml --tokenizer.path"
    assert "vocab_size = 304" in shell(f"{words}=run_tokenizer").out
    said = shell.refuse(f"{words}=x")
    assert "tokenizer.path: tokenizer path 'x' does not exist" in said and said.count("\n") == 1


def test_a_job_suits_the_size_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "text").mkdir()
    (folder / "paper.pdf").touch()
    words = "".join(
        file.read_text() for file in sorted(Path(argparse.__file__).parent.glob("*.py"))
    )
    left_out = "text (1 file, left out: 1 *.pdf)"
    for size, ids, steps in (("20000", 616, 33), ("300000", 2016, 145)):
        (folder / "book.txt").write_bytes(words.encode()[: int(size)])
        printed = shell(f"init {size} --text text")
        job = load_config(size)
        assert (job.model.sizes.vocab_size, job.training.steps) == (ids, steps)
        assert left_out in printed.out
    # Part of a long file is kept for validation.
    said = shell(f"train {size} --training.steps=2 --validation.steps=1").out
    assert left_out in said and "bits/byte" in said
    assert "  | " in said


def test_a_job_is_printed_as_it_is(shell: Shell) -> None:
    assert shell("config --list starter").out == jobs()["starter"].read_text()
