"""Mistakes of many kinds: each is reported at its file, line and key, alike by every command, before torch is imported.

The jobs are the rows of errors.json, with what was reported when they were saved (tests/support/golden_errors.py).
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import golden_errors as golden
from tests.support.commands import finished
from tests.support.tables import table, tabled
from titan import cli
from titan.base.untrusted import printable
from titan.checks.rules import advise, check, check_layout
from titan.config.errors import ConfigError, key_text
from titan.config.keys import fields_at
from titan.config.load import load_config
from titan.config.schema import JobConfig

SAVED = json.loads(golden.SAVED.read_text())
# At a misspelt option: each command has other options.
_HINT = r"; did you mean '--[a-z-]+'\?"
# One message of each kind: of the scanner, of types, names and ranges, of rules, of a layout, of an old key.
PHRASES = table(__file__, "the_message_says_what_to_write")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    golden.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def test_every_mistake_is_reported_where_it_was() -> None:
    results = golden.errors()
    rows = zip(results["jobs"], SAVED["jobs"], strict=True)
    assert [new for new, old in rows if new != old] == []
    assert results["layouts"] == SAVED["layouts"]
    assert len(SAVED["jobs"]) > 350


@pytest.mark.parametrize("text", PHRASES)
def test_the_message_says_what_to_write(text: str, folder: Path) -> None:
    write(folder, text)
    first = golden.problems_of({"ranks": 16 if "_degree" in text else 1})[0]
    assert PHRASES[text] in str(first)


# ---- every command ---------------------------------------------------------------------------------


def require_report(report: str, job: golden.Job) -> None:
    """Require a line for each problem, in the order and at the places of errors.json, and their number."""
    lines = [
        line for line in report.splitlines() if not re.search(" is now | is ignored", line)
    ]
    if len(job["problems"]) > 1:
        assert lines.pop() == f"{len(lines)} problems", report
    for line, (file, number, key) in zip(lines, job["problems"], strict=True):
        parts = (printable(part) for part in (f"{file}:{number}" if number else file, key))
        assert line.startswith(": ".join([*filter(None, parts), ""]))


@pytest.mark.parametrize("job", SAVED["jobs"], ids=lambda job: repr(job)[9:60])
def test_check_and_train_refuse_alike(
    job: golden.Job,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not job["problems"]:
        return  # it would train
    monkeypatch.setattr("titan.base.hardware.count_accelerators", lambda: 0)
    golden.write_files(job, folder)
    with golden.environment(job):
        start, ranks = time.process_time(), job.get("ranks", 1)
        code = cli.main(["check", *golden.argv(job), f"--world-size={ranks}"])
        report = capsys.readouterr().err
        require_report(report, job)
        assert time.process_time() - start < 1.0
        assert code == 2
        assert cli.main(["train", *golden.argv(job), f"--nproc={ranks}"]) == 2
    refused = capsys.readouterr().err
    assert re.sub(_HINT, "", refused) == re.sub(_HINT, "", report)
    assert not (folder / "outputs").exists()


def run(command: str, job: golden.Job, folder: Path) -> None:
    """Run a command as a user does, and require exit code, report, no torch, and a second of processor time at most."""
    golden.write_files(job, folder)
    probe = "import sys; from titan.cli import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    option = "--world-size" if command == "check" else "--nproc"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with golden.environment(job):
        result = finished(
            [
                sys.executable,
                "-c",
                probe,
                command,
                *golden.argv(job),
                f"{option}={job.get('ranks', 1)}",
            ],
            timeout=300,
            code=None,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, result.stdout) == (2, "False\n"), result.stderr
    require_report(result.stderr, job)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def runnable(job: golden.Job) -> bool:
    """Whether a process can be given the arguments: they hold no null character."""
    return bool(job["problems"]) and not any("\0" in word for word in golden.argv(job))


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", ["check", "train"])
def test_the_same_as_users_run_it(command: str, every: int, folder: Path) -> None:
    for job in list(filter(runnable, SAVED["jobs"]))[::every]:
        run(command, job, folder)


# ---- what errors.json cannot hold ------------------------------------------------------------------


@tabled("text, expected")
def test_a_short_run_is_warned_of_what_is_cut(
    text: str, expected: list[list[int | str]], tmp_path: Path
) -> None:
    """TorchTitan's build_lr_schedulers cuts warm-up, then decay, and warns."""
    path = write(tmp_path, text)
    config = load_config(path)
    assert check(config) == []
    warnings = [re.match(r"(.*):(\d+): \w+\.(\w+): ", line) for line in advise(config)]
    assert [[int(w[2]), w[3]] for w in warnings if w and w[1] == str(path)] == expected
    assert len(warnings) == len(expected)


def test_every_interval_is_warned_of_or_met_at_the_last_step() -> None:
    sections = {name: f.annotation for name, f in JobConfig.model_fields.items()}
    names = {
        f"{s}.{key}"
        for s, kind in sections.items()
        for key in getattr(kind, "model_fields", ())
    }
    met = {
        "metrics.log_freq",
        "training.gc_freq",
        "validation.freq",
        "checkpoint.interval",
        "checkpoint.interval_minutes",
    }
    asked = {name for name in names - met if re.search("freq|every|interval", name)}
    asked -= {"checkpoint.keep_every_n_steps"}
    keys = [
        "training.steps=8",
        "profiling.enable_profiling=true",
        *(f"{name}=9" for name in asked),
    ]
    warnings = "".join(advise(load_config("train_configs/debug_model.toml", overrides=keys)))
    assert asked and all(f"{name}: 9, but the run ends" in warnings for name in asked)


def test_fp32_is_warned_of_on_accelerators(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, '[training]\nmixed_precision_param = "float32"\n'))
    assert advise(config, device="cpu") == []
    [warning] = advise(config, device="cuda")
    assert f"{tmp_path / 'job.toml'}:2: training.mixed_precision_param: float32" in warning
    assert advise(load_config(write(tmp_path, "[job]\ndescription = ''")), device="cuda") == []


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train_configs").mkdir()
    Path("train_configs/debug_model.toml").write_text("")
    for name, message in {
        "train_configs/debug_modl.toml": "no such file; did you mean 'train_configs/debug_model.toml'?",
        "debug_model.toml": "no such file; did you mean 'train_configs/debug_model.toml'?",
        "zzz": "no such file; there are train_configs/debug_model.toml",
        "train_configs": "a folder, not a job file; there are train_configs/debug_model.toml",
        "a\0b": "cannot be read: embedded null byte",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(name)
        assert str(caught.value).startswith(printable(f"{name}: {message}"))


def every_key(path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in fields_at(path):
        yield (*path, name)
        yield from every_key((*path, name))


ODD_VALUES: Sequence[str] = (
    "-1",
    "1.5",
    "nan",
    "true",
    '"x"',
    "[]",
    "[[1]]",
    "{a={b=[1]}}",
    "2024-01-01",
    '[{type="text"}]',
    '{"a.b"=1}',
)


def test_no_value_of_any_key_shows_a_traceback(tmp_path: Path) -> None:
    keys = [key_text(key) for key in every_key() if len(key) < 5]
    assert len(keys) > 140
    num_problems = 0
    for key in keys:
        for value in ODD_VALUES:
            path = write(tmp_path, f"\n{key} = {value}\n")
            try:
                config = load_config(path)
                problems = check(config) + check_layout(config, world_size=8)
            except ConfigError as error:
                problems = error.problems
            for problem in problems:
                assert problem.file == str(path) and problem.line in (1, 2), problem
                assert "nput should" not in problem.message, problem  # pydantic's own words
            num_problems += len(problems)
    assert num_problems > 1000


@pytest.mark.parametrize("key", ["dtype", "mixed_precision_reduce"])
def test_float16_weights_are_refused_with_the_reason(key: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"job\.toml:2: .*mixed_precision_param alone.*loss scale"
    ):
        load_config(write(tmp_path, f'[training]\n{key} = "float16"\n'))
