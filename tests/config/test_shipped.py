"""`titan init` and `titan config --list`."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

from titan.cli import main
from titan.config.load import load_config
from titan.tools.shipped import about, jobs


def test_every_shipped_job_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(jobs())
    assert all(about(file) in line for file, line in zip(jobs().values(), lines, strict=True))
    assert all(about(file).endswith(".") for file in jobs().values())


def test_a_job_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert load_config("job.toml").model.flavor == "demo"
    assert load_config("job.toml").job.dump_folder == "outputs/job"
    assert main(["init", "it's mine.toml"]) == 0
    assert load_config("it's mine.toml").job.dump_folder == "outputs/first"
    (tmp_path / "job.toml").write_text("mine")
    assert main(["init"]) == 2
    assert (tmp_path / "job.toml").read_text() == "mine"
    assert main(["config", "--list", "llama3_8b", "--output", "eight.toml"]) == 0
    assert load_config("eight.toml").model.flavor == "8B"
    # An editor finds the schema from wherever the copy is.
    for name in ("it's mine.toml", "eight.toml"):
        line, *_ = (tmp_path / name).read_text().splitlines()
        assert line.startswith("#:schema file:///")
        schema = Path(url2pathname(urlparse(line.removeprefix("#:schema ")).path))
        assert json.loads(schema.read_text())["title"] == "titan job file"
    assert main(["config", "--list", "llama3_8", "--output", "other.toml"]) == 2
    assert "did you mean 'llama3_8b'?" in capsys.readouterr().err


def test_a_job_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--list", "starter"]) == 0
    assert capsys.readouterr().out == jobs()["starter"].read_text()
