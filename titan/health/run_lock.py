"""One run folder, one run: a second copy (submitted twice, or an orphan still alive) is refused before it imports torch.

`lock.json` in the run folder names its owner, rank 0 of the run, which writes a beat into it every second. Its owner lives

    on this machine       while its process does: process id and start time, boot and pid namespace, so that numbers used
                          again are no owner
    on another machine    while its last beat is younger than DEAD_AFTER_S; by the file server's clock, since those of two
                          machines differ. For a restart or requeue of the very same job, which may find its own lock
                          from another machine, the beat is watched instead, for WATCH_S

What is relied on: a small file that is made exclusively (O_EXCL), or replaced by a rename, and is seen by others when it is opened
anew; not on flock, which on network file systems may be local to a machine. Where two take over a dead lock at once, the
last one has it, and the other, which reads it again after SETTLE_S and then at every beat, ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan.health.signals import EXIT_FAILED
from titan.observe.runinfo import write_text_atomically

NAME = "lock.json"
_ATTEMPT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
BEAT_S, DEAD_AFTER_S, WATCH_S, SETTLE_S = 1.0, 60.0, 10.0, 0.2


class RunLocked(RuntimeError):
    """Another run is alive in this folder; the message is for the user."""


@dataclass(frozen=True)
class LockHolder:
    """A process, such that no two are the same, and the run it belongs to."""

    host: str
    pid: int
    started: str  # in ticks since the boot; empty where there is no /proc
    machine: str  # boot and pid namespace; process ids mean the same where it is equal
    job: str  # the scheduler's or torchrun's name of the job: the same after a restart or requeue
    attempt: str  # of the job: the same for all its ranks, another after a restart
    beat: int = 0

    @staticmethod
    def this_process() -> LockHolder:
        names = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
        job = next((os.environ[name] for name in names if os.environ.get(name)), "")
        return LockHolder(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started("self"),
            machine=_machine(),
            job=job if job != "none" else "",  # torchrun's, where it was given no --rdzv-id
            attempt=" ".join(os.environ.get(name, "") for name in _ATTEMPT),
        )

    def is_same_process(self, other: LockHolder) -> bool:
        return replace(self, beat=0) == replace(other, beat=0)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


class RunLock:
    """The lock of a run folder, held by this process from `acquire` to `release`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / NAME
        self.me = LockHolder.this_process()
        self._released = threading.Event()
        self._beating: threading.Thread | None = None

    def require_free(self) -> None:
        """Raises RunLocked if a run that this process is no part of holds the folder."""
        owner = self._read()
        if owner is None or self._is_ours(owner) or not self._is_alive(owner):
            return
        raise RunLocked(
            f"{self.path.parent}: this run goes on already, in {owner}; end it first, or choose another job.dump_folder"
        )

    def acquire(self) -> None:
        """Take the lock, or raise RunLocked. Of a run that has died it is taken over."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.require_free()
            if self.path.exists():  # its owner has died
                write_text_atomically(self.path, self._text(self.me), durable=False)
                time.sleep(SETTLE_S)
                break
            with suppress(FileExistsError), self.path.open("x") as file:
                file.write(self._text(self.me))
                break
        self._require_mine()
        self._beating = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beating.start()

    def release(self) -> None:
        self._released.set()
        if self._beating is not None:
            self._beating.join(BEAT_S)
            owner = self._read()
            if owner is not None and owner.is_same_process(self.me):
                self.path.unlink(missing_ok=True)

    def _require_mine(self) -> None:
        owner = self._read()
        if owner is not None and not owner.is_same_process(self.me):
            raise RunLocked(f"{self.path.parent}: {owner} has taken over this run")

    def _beat(self) -> None:
        beat = 0
        while not self._released.wait(BEAT_S):
            beat += 1
            try:
                self._require_mine()
                # In place: a file opened anew is read from the server, a new name may be looked up in a cache.
                with self.path.open("r+") as file:
                    file.write(self._text(replace(self.me, beat=beat)))
            except RunLocked as error:
                if not self._released.is_set():
                    print(f"{error}: process {self.me.pid} ends", file=sys.stderr, flush=True)
                    os._exit(EXIT_FAILED)
            except OSError:  # a file server that is away for a while; the run itself will say so
                pass

    def _is_ours(self, owner: LockHolder) -> bool:
        """Whether it is rank 0 of the run that this process is another rank of."""
        return os.environ.get("RANK", "0") != "0" and owner.attempt == self.me.attempt

    def _is_alive(self, owner: LockHolder) -> bool:
        if owner.machine and owner.machine == self.me.machine:
            return started(str(owner.pid)) == owner.started != ""
        if not owner.machine and owner.host == self.me.host:  # no /proc
            return _has_process(owner.pid)
        if owner.job and owner.job == self.me.job:
            deadline = time.monotonic() + WATCH_S
            while time.monotonic() < deadline:
                time.sleep(BEAT_S / 2)
                now = self._read()
                if now is not None and now != owner:
                    return not self._is_ours(now)
            return False
        return self._age_s() < DEAD_AFTER_S

    def _age_s(self) -> float:
        """Since the last beat, by the clock that stamps files."""
        probe = self.path.with_name(f".{NAME}.{self.me.host}.{self.me.pid}")
        try:
            probe.touch()
            return probe.stat().st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:  # released
            return DEAD_AFTER_S
        finally:
            probe.unlink(missing_ok=True)

    def _read(self) -> LockHolder | None:
        """Who holds the lock; None if nobody does, or what it holds makes no sense."""
        for _ in range(3):
            if not self.path.exists():
                return None
            with suppress(OSError, ValueError, TypeError):
                return LockHolder(**json.loads(self.path.read_text()))
            time.sleep(0.05)  # it may be in the middle of a beat
        return None

    @staticmethod
    def _text(owner: LockHolder) -> str:
        """Of the same length at every beat, since it is written over the last one."""
        text = json.dumps(asdict(owner), indent=1)
        return text + " " * (20 - len(str(owner.beat))) + "\n"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started(pid: str) -> str:
    """When a process was started; empty if there is none, or what is left of it waits for its parent only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
