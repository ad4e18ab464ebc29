"""A save that is killed at any point, or finds no room, leaves a committed step to go on from, and the next save works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Pool, RankFailed
from tests.support.tables import table
from titan.checkpoint import commit
from titan.checkpoint.manager import CheckpointManager, SaveFailed, list_steps, load
from titan.checkpoint.manifest import find_damage
from titan.checkpoint.storage import LocalStorage
from titan.config.schema import CheckpointSection

NAMES = [f"model.{number}" for number in range(6)]
# The call that a process dies in: its owner, its name, and the end of an argument. "half removed" removes a file first, the others nothing.
CALLS: dict[str, tuple[Any, str, str]] = {
    "data": (LocalStorage, "open", ".distcp"),
    "unsynced": (LocalStorage, "fsync", ""),
    "written": (commit.CheckpointGroup, "run_on_all", "finish"),
    "manifest": (commit, "write_manifest", ""),
    "rename": (LocalStorage, "rename", ".saving-30"),
    "replace": (LocalStorage, "rename", ".saving-20"),
    "renamed": (LocalStorage, "fsync_folder", "/checkpoint"),
    "delete": (LocalStorage, "remove", ".removing-step-10"),
    "half removed": (LocalStorage, "remove", "-20"),
}
ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
# Where a save of step 30, after 10 and 20, is killed; the rank; the steps that are left. Two are kept.
POINTS = table(__file__, "points")


def die_in(point: str) -> None:
    """Make this process end in a call, as by the kernel or a power cut."""
    owner, name, part = CALLS[point]
    call = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        text = " ".join(str(getattr(arg, "__qualname__", arg)) for arg in args)
        if re.search(f"{re.escape(part)}( |$)", text):
            if point == "half removed":
                next(Path(args[1]).glob("*.distcp")).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, dying)


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((64, 64), float(step + i)) for i, name in enumerate(NAMES)}


def manager_of(folder: Path, **settings: Any) -> CheckpointManager:
    section = CheckpointSection.model_validate({"keep_latest_k": 2} | settings)
    return CheckpointManager(section, run_dir=folder)


def save(
    folder: Path, steps: list[int], mode: str, point: str = "", rank: int = 0
) -> list[str]:
    """Save some steps, and die at a point of it on one rank. Return the messages."""
    if point and dist.get_rank() == rank:
        die_in(point)
    manager = manager_of(folder, async_mode=mode)
    for step in steps:
        manager.save(step, state_of(step), metadata={"step": step}, wait=False)
        manager.staging.before_update()
    manager.poll(wait=True)
    return manager.drain_messages()


def resume(folder: Path) -> int:
    """The step that a new run would go on from, loaded and compared with what was saved."""
    path = manager_of(folder).step_to_resume()
    assert isinstance(path, Path) and not find_damage(path)
    step = int(path.name.removeprefix("step-"))
    found = {name: torch.empty(64, 64) for name in NAMES}
    load(path, found)
    assert all(torch.equal(found[name], value) for name, value in state_of(step).items())
    return step


# A rank 0 that dies in the mode "async" is as its rank 1, and as in the other modes.
CASES = [
    (point, mode)
    for point in POINTS
    for mode in ASYNC_MODES
    if mode != "async" or "rank 0" not in point
]


@pytest.mark.parametrize(("point", "mode"), CASES)
def test_killed_at_each_point(point: str, mode: str, pool: Pool, tmp_path: Path) -> None:
    call, rank, left = POINTS[point]
    pool.run(2, save, tmp_path, [10, 20], mode)
    with pytest.raises(RankFailed, match=r"exit code -9|Connection (reset|closed)"):
        pool.run(2, save, tmp_path, [30], mode, call, rank)
    assert list_steps(tmp_path / "checkpoint") == left
    assert pool.run(2, resume, tmp_path) == [left[-1]] * 2
    messages = pool.run(2, save, tmp_path, [40], mode)[
        0
    ]  # and what is left lying about is removed
    assert messages[0].startswith(f"saved {tmp_path}/checkpoint/step-40 in ")
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {f"step-{left[-1]}", "step-40"}


@pytest.mark.parametrize(("point", "left"), [("replace", [10]), ("half removed", [10, 20])])
def test_killed_while_a_step_is_replaced(
    point: str, left: list[int], pool: Pool, tmp_path: Path
) -> None:
    """A run taken back to step 10 gets to 20 again."""
    pool.run(1, save, tmp_path, [10, 20], "disabled")
    with pytest.raises(RankFailed):
        pool.run(1, save, tmp_path, [20], "disabled", point)
    assert list_steps(tmp_path / "checkpoint") == left
    assert pool.run(1, resume, tmp_path) == [left[-1]]
    pool.run(1, save, tmp_path, [20], "disabled")
    assert pool.run(1, resume, tmp_path) == [20]


# ---- saves that fail -------------------------------------------------------------------------------


def run_quietly(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not run_quietly("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)):
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    run_quietly("umount", str(folder))


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    return ballast


MODES = pytest.mark.parametrize("mode", ASYNC_MODES)


def try_save(manager: CheckpointManager, step: int) -> bool:
    """As the trainer does: whether it was saved."""
    try:
        manager.save(step, state_of(step), metadata={"step": step}, wait=False)
    except SaveFailed as error:
        return manager.failed(error)
    manager.staging.before_update()
    return manager.poll(wait=True)


@pytest.mark.parametrize("room", [0, 8_192], ids=["no room", "some room"])
@MODES
def test_a_full_disk(
    mode: str, room: int, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(small_disk, async_mode=mode)
    assert try_save(manager, 10)
    ballast = fill(small_disk)
    os.truncate(ballast, ballast.stat().st_size - room)
    assert not try_save(manager, 20)
    errors = [r.getMessage() for r in caplog.records if r.name == "titan"]
    assert len(errors) == 1 and "\n" not in errors[0]
    assert "step 20 could not be saved: rank 0: " in errors[0] and "No space left" in errors[0]
    assert [p.name for p in (small_disk / "checkpoint").iterdir()] == ["step-10"]
    assert not find_damage(small_disk / "checkpoint" / "step-10")
    ballast.unlink()
    assert try_save(manager, 30)
    assert manager.steps() == [10, 30]


@MODES
def test_a_read_only_folder(
    mode: str, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(small_disk, async_mode=mode)
    assert try_save(manager, 10)
    assert run_quietly("mount", "-o", "remount,ro", str(small_disk))
    assert not try_save(manager, 20)
    assert "Read-only file system" in caplog.text
    assert not find_damage(small_disk / "checkpoint" / "step-10")
    assert run_quietly("mount", "-o", "remount,rw", str(small_disk))
    assert try_save(manager, 30)


def save_on_a_full_disk(folder: Path, full: bool) -> tuple[bool, str]:
    manager = manager_of(folder, async_mode="async")
    if full and dist.get_rank() == 1:  # one rank alone finds no room

        def no_room(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        manager.staging.begin = lambda state: no_room  # pyrefly: ignore[bad-assignment]
    saved = try_save(manager, 10)
    dist.barrier()  # the training's group still works
    return saved, str(manager.steps())


def test_a_failure_on_one_rank_is_one_on_all(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, save_on_a_full_disk, tmp_path, True) == [(False, "[]")] * 2
    assert pool.run(2, save_on_a_full_disk, tmp_path, False) == [(True, "[10]")] * 2


def test_one_save_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(tmp_path, async_mode="async")
    done: Future[str] = Future()
    manager.background, manager.background_step = done, 5
    assert manager.poll()  # under way: nothing to say
    done.set_exception(SaveFailed("step 5 could not be saved: rank 3: no room"))
    manager.save(10, state_of(10), metadata={})
    assert "rank 3: no room. Earlier checkpoints are as they were" in caplog.text
    assert manager.steps() == [10]


# ---- a power cut -----------------------------------------------------------------------------------


class Disk:
    """ext4 in a file. A copy of the file is what a power cut would leave: what is only in memory is not in it."""

    def __init__(self, folder: Path) -> None:
        self.image, self.cut = folder / "image", folder / "cut"
        self.mounted, self.after = folder / "mounted", folder / "after"
        for path in (self.mounted, self.after):
            path.mkdir()
        make = f"truncate -s 48M {self.image} && mkfs.ext4 -q {self.image}"
        if not run_quietly("sh", "-c", f"{make} && mount -o loop {self.image} {self.mounted}"):
            pytest.skip("needs root, loop devices and mkfs.ext4")

    def whole_steps_after_a_power_cut(self) -> list[int]:
        copy = f"cp --reflink=auto {self.image} {self.cut}"
        assert run_quietly("sh", "-c", f"{copy} && mount -o loop {self.cut} {self.after}")
        folder = self.after / "checkpoint"
        whole = [n for n in list_steps(folder) if not find_damage(folder / f"step-{n}")]
        assert run_quietly("umount", str(self.after))
        return whole

    def close(self) -> None:
        for folder in (self.after, self.mounted):
            run_quietly("umount", str(folder))


@pytest.mark.parametrize(
    "cuts", [3, pytest.param(20, marks=pytest.mark.slow)], ids=["3 cuts", "20 cuts"]
)
def test_power_cuts_after_the_commit(
    cuts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    try:
        manager = manager_of(disk.mounted)
        for step in range(1, cuts + 1):
            manager.save(step, state_of(step), metadata={"step": step})
            assert disk.whole_steps_after_a_power_cut()[-1] == step
        # And without fsync the same test sees them lost.
        monkeypatch.setattr(LocalStorage, "fsync", lambda *_: None)
        monkeypatch.setattr(LocalStorage, "fsync_folder", lambda *_: None)
        manager.save(100, state_of(100), metadata={"step": 100})
        assert 100 not in disk.whole_steps_after_a_power_cut()
    finally:
        disk.close()
