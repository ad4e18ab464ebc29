"""Other frameworks' words lead to titan's keys and commands (titan/config/foreign_words.json)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tables import tabled
from titan.cli import main as titan
from titan.commands import command_names
from titan.config import errors
from titan.config.keys import field_at
from titan.config.load import load_from_argv
from titan.config.model import family

HINTS = {hint: word for word, hint in errors._foreign_words().items()}


def test_each_hint_names_keys_and_commands_that_exist() -> None:
    sizes = vars(family("deepseek_v3").FLAVORS["tiny"])
    for hint in HINTS:
        for key in re.findall(r"\b[a-z_]+\.[a-z_]\w+(?:\.\w+)*", hint):
            *_, last = path = tuple(key.split("."))
            known = field_at(path) is not None or (path[0] == "model" and last in sizes)
            assert known or key in ("titan.train", "titan.hooks", "data.sources"), (hint, key)
        assert {*re.findall(r"`titan (\w+)", hint)} <= {*command_names()}, hint


@pytest.mark.parametrize("hint", HINTS, ids=HINTS.get)
def test_a_foreign_word_is_answered(hint: str, tmp_path: Path) -> None:
    word, file = HINTS[hint], tmp_path / "job.toml"
    file.write_text(f"[training]\n{word.strip('-')} = 1\n")
    with pytest.raises(errors.ConfigError) as caught:
        load_from_argv([str(file), f"--{word.strip('-')}=1"])
    keys, options = caught.value.problems[0].message, caught.value.problems[-1].message
    # An option whose name is a section or a key of titan leads there, and a word for an option is for the commands that have it.
    assert word.startswith("--") or keys.endswith(f"; {hint}")
    is_other = word.startswith("--") and "--" in hint
    assert options.endswith((f"; {hint}", "?", "into a TOML file")) or is_other


@tabled("line, answer")
def test_an_answer_is_true(
    line: str,
    answer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.toml"
    file.write_text("[training]\nsteps = 1\n")
    assert titan([str(file) if word == "JOB" else word for word in line.split()]) == 2
    assert answer in capsys.readouterr().err
