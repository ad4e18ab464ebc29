"""Lock of a run folder: one run at a time. A second run is refused before it imports torch.

`lock.json` in the run folder names its holder, rank 0 of the run, which writes a heartbeat into it
about every second (titan/ops/monitor.py calls `touch`). The holder is alive

    on this machine       while its process is: process id and start time, boot and pid namespace, so that a process id
                          that is used again is no holder
    on another machine    while its last heartbeat is younger than DEAD_AFTER_S, by the file server's clock, since the
                          clocks of two machines differ. The heartbeat itself is watched for WATCH_S instead if the age
                          says little: the lock is of the very same job (a restart or requeue), of this host before it
                          was booted again, or from the future

This relies on a file system that creates a file exclusively (O_EXCL), replaces a file by a rename,
and shows a file's new content to others who open it. It does not use flock, which network file
systems may keep to one machine. If two runs take over a dead lock at once, the later writer has it.
The earlier one reads it again after SETTLE_S and at every heartbeat, and ends.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from titan.base.failure import UserError
from titan.base.run_writer import open_to_write, write_text_atomically
from titan.base.untrusted import (
    Count,
    InputError,
    is_lost,
    is_there,
    open_regular,
    parse_json,
    printable,
    retry,
)

LOCK_FILE = "lock.json"
# Seconds: between two heartbeats; of silence until a holder elsewhere counts as dead; to watch a
# holder of the same job; until a run that took over a dead lock checks that it still has it.
BEAT_S, DEAD_AFTER_S, WATCH_S, SETTLE_S = 1.0, 60.0, 10.0, 0.2
_MAX_BYTES = 2**16
# Variables that all ranks of an attempt share, with values that no other attempt has.
_ATTEMPT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class RunLocked(UserError):
    """Error: another run is alive in this folder. The message is for the user."""


@dataclass(frozen=True)
class ProcessId:
    """Unmistakable identity of a process, and the run that it belongs to.

    Attributes:
        host: name of the host.
        pid: process id.
        started: start time in ticks since the boot; empty on systems without /proc.
        machine: boot id and pid namespace; process ids mean the same if it is equal.
        job: the scheduler's or torchrun's name of the job; the same after a restart or requeue.
        attempt: attempt of the job; the same for all its ranks, another after a restart.
        beat: number of heartbeats.
    """

    host: str
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started: str
    machine: str
    job: str
    attempt: str
    beat: Count = 0

    @staticmethod
    def this() -> ProcessId:
        """Return the identity of this process."""
        names = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
        job = next((os.environ[name] for name in names if os.environ.get(name)), "")
        try:
            # /proc holds both on Linux. Elsewhere the host's name and the process id must do.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
        except OSError:
            machine = ""
        return ProcessId(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=start_time("self"),
            machine=machine,
            job=job if job != "none" else "",  # torchrun's, without a --rdzv-id
            attempt=" ".join(os.environ.get(name, "") for name in _ATTEMPT),
        )

    def is_here(self) -> bool:
        """Return whether this process can look up the process id. Virtual hosts may share a kernel."""
        # Containers share the kernel's boot id, so the pid namespace and the host's name count too.
        me = ProcessId.this()
        return self.machine != "" and (self.machine, self.host) == (me.machine, me.host)

    def is_running(self) -> bool:
        """Return whether the process lives. Call it only if its machine is this one."""
        return start_time(str(self.pid)) == self.started != ""

    def is_same(self, other: ProcessId) -> bool:
        """Return whether both are the same process, whatever their heartbeats."""
        return replace(self, beat=0) == replace(other, beat=0)

    def __str__(self) -> str:
        # A file says this, which anyone may have written.
        job = f" (job {printable(self.job, 100)})" if self.job else ""
        return f"process {self.pid} on {printable(self.host, 100)}{job}"


class RunLock:
    """Lock of a run folder, held by this process from `acquire` to `release`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK_FILE
        self.me = ProcessId.this()
        self.is_held = False

    def require_free(self) -> None:
        """Check that no other run holds the folder.

        Raises:
            RunLocked: a run that this process does not belong to holds the folder.
        """
        # All ranks come here, and rank 0 may have the lock already.
        holder = self._read()
        if holder is None or self._is_of_this_run(holder) or not self._is_alive(holder):
            return
        raise RunLocked(
            f"{self.path}: this run is already going on, in {holder}; end it first, or choose another job.dump_folder"
        )

    def acquire(self) -> None:
        """Acquire the lock. Take over a lock that a dead run left.

        Raises:
            RunLocked: the holder is alive.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Again from the top if another run creates the file between the check and `open`.
        while True:
            self.require_free()
            if is_there(self.path):  # its holder has died
                write_text_atomically(self.path, self._text(), durable=False)
                time.sleep(SETTLE_S)  # another run may do the same now
                break
            # O_EXCL: if two runs begin at once, one creates the file, and the other checks again.
            with suppress(FileExistsError):
                self._write(os.O_CREAT | os.O_EXCL)
                break
        # If two runs took over at once, the earlier writer ends here.
        self._require_mine()
        self.is_held = True

    def touch(self) -> None:
        """Write the next heartbeat.

        Raises:
            RunLocked: another run has taken over.
        """
        if not self.is_held:
            return
        # A file server that is away for a while is no reason to end, nor is a full disk.
        with suppress(OSError):
            self._require_mine()
            self.me = replace(self.me, beat=self.me.beat + 1)
            # In place: readers get an opened file from the server, but may find a new name in a cache.
            # Created again if somebody has moved the folder.
            self._write(os.O_CREAT)

    def release(self) -> None:
        """Release the lock, unless another run has taken it over."""
        if self.is_held:
            self.is_held = False
            with suppress(OSError):  # the next run finds that the process has ended
                holder = self._read()
                if holder is not None and holder.is_same(self.me):
                    self.path.unlink(missing_ok=True)

    def _require_mine(self) -> None:
        # No file at all is no reason to end: an operator may have removed it.
        holder = self._read()
        if holder is not None and not holder.is_same(self.me):
            raise RunLocked(f"{self.path.parent}: {holder} has taken over this run")

    def _is_of_this_run(self, holder: ProcessId) -> bool:
        """Return whether the holder is rank 0 of this process's run, and this process another rank."""
        # Rank 0 holds the lock, so it is never a peer of the holder.
        return os.environ.get("RANK", "0") != "0" and holder.attempt == self.me.attempt

    def _is_alive(self, holder: ProcessId) -> bool:
        # From the surest sign to the weakest: the process itself, a heartbeat that changes, the age
        # of the last heartbeat.
        if holder.machine and holder.machine == self.me.machine:
            return holder.is_running()
        if not holder.machine and holder.host == self.me.host:  # no /proc
            return _has_process(holder.pid)
        # A job has one run at a time, as a rule.
        is_same_job = holder.job != "" and holder.job == self.me.job
        age_s = self._age_s()
        # A host that was booted again may have had another clock before. A clock that was set back makes ages negative.
        if is_same_job or holder.host == self.me.host or age_s < -BEAT_S:
            return self._beats(holder)
        return age_s < DEAD_AFTER_S

    def _beats(self, holder: ProcessId) -> bool:
        """Watch the heartbeat of a holder. Return whether another run writes it."""
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            # Twice per heartbeat, so that none is missed.
            time.sleep(BEAT_S / 2)
            now = self._read()
            if now is not None and now != holder:
                return not self._is_of_this_run(now)
        return False

    def _age_s(self) -> float:
        """Return the seconds since the last heartbeat, by the clock that stamps files."""
        # A new file gets its time from the server's clock, which stamped the lock, too.
        probe = self.path.with_name(f".{LOCK_FILE}.{self.me.host}.{self.me.pid}")
        probe.unlink(missing_ok=True)
        descriptor = open_to_write(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            return os.fstat(descriptor).st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:  # released in the meantime
            return DEAD_AFTER_S
        finally:
            os.close(descriptor)
            probe.unlink(missing_ok=True)

    def _read(self) -> ProcessId | None:
        """Read the holder; None if there is no lock, or the file is none.

        Raises:
            OSError: the file cannot be read now, so nothing is known about a holder.
        """

        def read() -> bytes:
            with open_regular(self.path, within=self.path.parent) as file:
                return file.read(_MAX_BYTES)

        for _ in range(3):
            try:
                text = retry(read)
            except OSError as error:
                if is_lost(error):
                    raise
                return None  # missing, or a link or a folder, which no run has made
            with suppress(InputError):
                return parse_json(text, ProcessId, name=self.path)
            time.sleep(0.05)  # its holder may be writing a heartbeat
        return None

    def _write(self, flags: int = 0) -> None:
        """Write the lock in place."""
        descriptor = open_to_write(self.path, os.O_WRONLY | flags)
        try:
            os.write(descriptor, self._text().encode())
        finally:
            os.close(descriptor)

    def _text(self) -> str:
        """Return the file's content. Its length is constant, since each heartbeat overwrites the last one."""
        text = json.dumps(asdict(self.me), indent=1)
        # 20 digits hold any count of heartbeats.
        return text + " " * (20 - len(str(self.me.beat))) + "\n"


def start_time(pid: str) -> str:
    """Return the start time of a process; an empty string if it does not exist or is a zombie."""
    # The second field is the name of the program, in parentheses, and may hold spaces.
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
    except PermissionError:  # it lives, and is another user's
        pass
    return True
