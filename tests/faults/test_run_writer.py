"""A run whose disk fails once at each write of its folder; links in the folder of a stranger's run."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.support.trainers import Trainer
from titan.health.run_lock import RunLock
from titan.observe.run_log import read_events

FILES = ("status.json", "config.toml", "environment.json", "metrics.jsonl", "events.jsonl")
LOGS = ("logs/rank-0.log", "logs/rank-0.times.jsonl")


def run(folder: Path) -> torch.Tensor:
    """Train two steps. Return a weight that was saved, after a look at all files."""
    trainer = Trainer(job(folder, model={"overrides": {"n_layers": 1}}))
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
            path = Path(f"/proc/self/fd/{place}").readlink() if isinstance(place, int) else place
            is_write = name != "open" or args[0] & (os.O_WRONLY | os.O_RDWR)
            if is_write and re.match(f"{self.folder}/(?!checkpoint)", str(path)):
                self.calls += 1
                if self.calls % self.stride == self.first:
                    if name == "write":
                        real(place, args[0][:9])  # a part, as on a disk that becomes full
                    raise self.error
            return real(place, *args, **options)

        return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ESTALE], ids=errno.errorcode.get)
def test_each_write_may_fail_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    stride = 8  # more than the calls of one write, so that its second try works
    for first in range(stride):
        folder = tmp_path / str(first)
        with monkeypatch.context() as patch:
            faults = Faults(folder, code, first=first, stride=stride)
            for name in ("open", "write", "fsync", "replace", "mkdir", "unlink", "ftruncate"):
                patch.setattr(os, name, faults.wrap(name))
            assert torch.equal(run(folder), whole)
        assert faults.calls > 5 * stride
        assert all((folder / name).is_file() for name in (*FILES, *LOGS))
        assert [row["step"] for row in read_json_lines(folder / "metrics.jsonl")] == [1, 2]
        events = [row["event"] for row in read_events(folder / "events.jsonl")]
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


def test_no_link_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    folder, linked = tmp_path / "run", tmp_path / "linked"
    (folder / "logs").mkdir(parents=True)
    for name in (*FILES, *LOGS[:1], ".config.toml"):
        (folder / name).symlink_to(secret)
    os.link(secret, folder / LOGS[1])
    (folder / "lock.json").symlink_to(tmp_path / "nowhere")
    RunLock(folder).acquire()
    run(folder)
    linked.mkdir()
    (linked / "logs").symlink_to(tmp_path)
    (linked / "tensorboard").symlink_to(tmp_path)
    run(linked)
    assert secret.read_text() == "kept" and (folder / LOGS[1]).read_text() > "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "run", "linked"}
