"""A package adds keys, tables, rules and hooks through its entry points, in processes that have it installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.test_cli import DEBUG, ROOT, install, titan

PACKAGE = '''
from titan.config.base import Section


class Kennel(Section):
    """Where dogs live."""

    dogs: int = 2
    """How many."""


class Walks(Section):
    """More keys of [metrics]."""

    walks: int = 3
    """A day."""

    @property
    def is_fit(self):
        return self.walks > 1


def rule(config):
    if config.kennel.dogs > 2 * config.metrics.walks:
        yield "dogs", "need more walks"


def needs(config):
    yield "kennel.dogs", "there is no dog on this machine"


def shy(run):
    return None


def eager(run):
    from titan.run.hook import Hook

    class Eager(Hook):
        priority = -1

    return Eager()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_dog.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


def test_keys_and_tables(folder: Path) -> None:
    job = folder / "job.toml"
    job.write_text("[kennel]\ndogs = 9\n\n[metrics]\nwalks = 4\n")
    _, _, lines = titan("config", str(job))
    assert lines[0].startswith(f"{job}:1: kennel: unknown")
    entries = {"kennel": "my_dog:Kennel", "metrics.dog": "my_dog:Walks"}
    install(folder, "my-dog", sections=entries, rules={"kennel.dog": "my_dog:rule"})
    exit_code, _, lines = titan("config", str(job))
    assert (exit_code, lines[0]) == (2, f"{job}:2: kennel.dogs: need more walks")
    exit_code, shown, _ = titan("config", str(job), "--metrics.walks=5", "--comments")
    assert (
        exit_code == 0 and "[kennel]\n# How many.\ndogs = 9" in shown and "walks = 5" in shown
    )
    exit_code, _, [line, *_] = titan("config", str(job), "--kennel.dog=9")
    assert exit_code == 2 and "did you mean 'dogs'" in line
    schema = json.loads(titan("schema")[1])
    assert schema["$defs"]["MetricsSection"]["properties"]["walks"]["description"] == "A day."
    assert "log_freq" in schema["$defs"]["MetricsSection"]["properties"]
    program = "import pickle, sys; from titan.config.load import load_config; config = load_config(sys.argv[1]); again = pickle.loads(pickle.dumps(config)); print(again == config, again.metrics.is_fit, config.metrics.walks)"
    result = finished([sys.executable, "-c", program, str(job)], code=None)
    assert result.stdout == "True True 4\n", result.stderr


def test_keys_that_are_taken(folder: Path) -> None:
    install(
        folder, "my-dog", sections={"metrics.a": "my_dog:Walks", "metrics.b": "my_dog:Walks"}
    )
    exit_code, _, [line, *_] = titan("check", DEBUG)
    assert exit_code == 2
    assert line == "entry point metrics.b: [metrics] already has one of its keys"


def test_a_choice_takes_no_keys(folder: Path) -> None:
    install(folder, "my-dog", sections={"optimizer.a": "my_dog:Walks"})
    exit_code, _, [line, *_] = titan("check", DEBUG)
    assert exit_code == 2 and "[optimizer] is a choice" in line


def test_a_question_to_the_machine(folder: Path) -> None:
    install(
        folder,
        "my-dog",
        sections={"kennel": "my_dog:Kennel"},
        rules={"machine.dog": "my_dog:needs"},
    )
    exit_code, _, [line, *_] = titan("check", DEBUG)
    assert exit_code == 2 and line.endswith("kennel.dogs: there is no dog on this machine")
    # Another machine is not asked.
    assert titan("check", DEBUG, "--hardware", "h100-sxm", "--formula")[0] == 0


def test_order_of_hooks(folder: Path) -> None:
    """A hook may be the first one, and a run may need none."""
    install(folder, "my-dog", hooks={"shy": "my_dog:shy", "eager": "my_dog:eager"})
    program = "import sys; from titan.run.standard_hooks import standard_hooks; from titan.run.trainer import Trainer; from titan.config.load import load_config; job = load_config(sys.argv[1], overrides=['job.dump_folder=' + sys.argv[2]]); trainer = Trainer(job, hooks=standard_hooks); print([type(hook).__name__ for hook in trainer.hooks]); trainer.close()"
    command = [sys.executable, "-c", program, *f"{ROOT / DEBUG} {folder}/run".split()]
    result = finished(command)
    names = result.stdout.splitlines()[-1]
    assert names.startswith("['Eager', 'StepLimit'") and names.endswith(
        "'Checkpointing', 'Metrics']"
    )
