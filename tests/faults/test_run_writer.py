"""A run whose disk fails once at each write of its folder; links in the folder of a stranger's run."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.support.trainers import Trainer
from titan.base.run_folder import RunFolder
from titan.base.run_writer import RunFiles
from titan.ops.run_lock import RunLock

FILES = ("status.json", "config.toml", "environment.json", "metrics.jsonl", "events.jsonl")
LOGS = ("logs/rank-0.log", "logs/rank-0.times.jsonl")
TRACE = "traces/step-2/rank-0.json.gz"
CODES = [
    "ENOSPC",
    "EROFS",
    "ESTALE",
    "EDQUOT",
    "EIO",
    "EACCES",
    "EMFILE",
    "ENOENT",
    "ETIMEDOUT",
]


def run(folder: Path, **tables: Any) -> torch.Tensor:
    """Train two steps. Return a weight that was saved, after a look at all files."""
    trainer = Trainer(job(folder, model={"overrides": {"n_layers": 1}}, **tables))
    assert trainer.run() == 0
    trainer.close()
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    return trainer.train_step.model_parts[0].get_parameter("output.weight").detach()


class Faults:
    """Functions of os that write. Of the calls for files of a folder, but not its checkpoints, every `stride`-th fails."""

    def __init__(self, folder: Path, code: int, *, first: int, stride: int) -> None:
        self.folder, self.error, self.calls = folder, OSError(code, os.strerror(code)), 0
        self.first, self.stride = first, stride

    def wrap(self, name: str) -> Any:
        real = getattr(os, name)

        def call(place: Any, *args: Any, **options: Any) -> Any:
            path = (
                Path(f"/proc/self/fd/{place}").readlink() if isinstance(place, int) else place
            )
            is_write = name != "open" or args[0] & (os.O_WRONLY | os.O_RDWR)
            if is_write and re.match(f"{self.folder}/(?!checkpoint)", str(path)):
                self.calls += 1
                if self.calls % self.stride == self.first:
                    if name == "write":
                        real(place, args[0][:9])  # a part, as on a disk that becomes full
                    raise self.error
            return real(place, *args, **options)

        return call


@pytest.mark.parametrize("code", CODES)
def test_each_write_may_fail_once(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    stride = 8  # more than the calls of one write, so that its second try works
    for first in range(stride):
        folder = tmp_path / str(first)
        with monkeypatch.context() as patch:
            faults = Faults(folder, getattr(errno, code), first=first, stride=stride)
            for name in ("open", "write", "fsync", "replace", "mkdir", "unlink", "ftruncate"):
                patch.setattr(os, name, faults.wrap(name))
            assert torch.equal(run(folder), whole)
        assert faults.calls > 5 * stride
        assert all((folder / name).is_file() for name in (*FILES, *LOGS))
        assert [row["step"] for row in read_json_lines(folder / "metrics.jsonl")] == [1, 2]
        events = [row["event"] for row in RunFolder(folder).events()]
        assert events == ["start", "save", "end"]


def test_what_stays_unwritten_is_counted_at_the_end(tmp_path: Path, capsys: Any) -> None:
    for name in ("metrics.jsonl", "status.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        run(tmp_path)  # which reads status.json
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl cannot be written (Is a directory); training goes on") == 1
    assert "2 lines of metrics.jsonl could not be written (Is a directory)" in out
    assert "status.json could not be written (Is a directory)" in out


OBSTACLES: dict[str, Callable[[Path, Path], object]] = {
    "link": Path.symlink_to,
    "hard link": Path.hardlink_to,
    "loop": lambda path, _: path.symlink_to(path),
    "FIFO": lambda path, _: os.mkfifo(path),
    "folder": lambda path, secret: path.symlink_to(secret.parent),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_no_link_is_followed(obstacle: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "run"
    secret.write_text("kept")
    files = (*FILES, *LOGS, TRACE, "lock.json", ".config.toml")
    for name in ("logs", "tensorboard", "traces") if obstacle == "folder" else files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        OBSTACLES[obstacle](folder / name, secret)
    RunLock(folder).acquire()
    run(folder, profiling={"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 0})
    assert secret.read_text() == "kept"
    if obstacle in ("hard link", "FIFO"):  # replaced, where links are refused
        assert (folder / TRACE).stat().st_size > 1000
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "run"}


def test_a_folder_that_is_moved_away_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's job, its environment and its lock stand in the new folder, too, so that all commands can use it."""
    files, lock = RunFiles(tmp_path / "run"), RunLock(tmp_path / "run")
    lock.acquire()
    for name in FILES[1:3]:
        files.replace(name, name)
    for number in range(3):
        files.append("metrics.jsonl", f"{number}\n")
        lock.touch()
        if number == 0:
            (tmp_path / "run").rename(tmp_path / "moved")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*FILES[1:4], lock.path.name}
    assert (tmp_path / "run/metrics.jsonl").read_text() == "1\n2\n"
    [warning] = caplog.messages
    assert "was moved or removed while the run goes on" in warning
