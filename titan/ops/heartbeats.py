"""Heartbeats of ranks, the store that carries them, and the meaning of their absence."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from titan.base.failure import list_ranks
from titan.base.run_writer import write_text_atomically

from .run_lock import ProcessId

_FIRST_VALUE_S = 60.0  # ranks start together


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat: the state of a rank, as the rank itself reports it.

    Attributes:
        count: number of exchanges with the store so far; it changes with each heartbeat.
        step: training step that the rank is in.
        activity: operation and source line of the main thread.
        waits: whether the main thread waits for other ranks or for the device.
        process: process that sends the heartbeat.
    """

    count: int
    step: int
    activity: str
    waits: bool
    process: ProcessId

    @staticmethod
    def parse(text: str) -> Heartbeat:
        """Parse the text of a heartbeat in the store."""
        content = json.loads(text)
        return Heartbeat(**(content | {"process": ProcessId(**content["process"])}))


def connect(timeout_s: float) -> Any:
    """Open a second connection to the ranks' store.

    Args:
        timeout_s: time limit of a request, at least 5 seconds.

    Returns:
        The store, or None if the ranks' store is neither a TCPStore nor a FileStore.
    """
    import torch.distributed as dist

    from titan.parallel.init_distributed import default_store

    store = default_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    if isinstance(store, dist.FileStore):
        return FolderStore(Path(f"{store.path}-beats"))  # pyrefly: ignore[missing-attribute]
    if not isinstance(store, dist.TCPStore):
        return None
    timeout = timedelta(seconds=max(timeout_s, 5))
    # Requests over one connection wait for each other, so heartbeats use a second one.
    connection = dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
    # torchrun may keep its store over a restart, with the failure of the earlier attempt.
    return dist.PrefixStore(f"titan/{attempt}", connection)


def store_host() -> str:
    """Return the host of the ranks' store, or "?" if it is unknown."""
    from titan.parallel.init_distributed import default_store

    return str(getattr(default_store(), "host", os.environ.get("MASTER_ADDR", "?")))


class FolderStore:
    """Folder of files with the part of torch's Store interface that the monitor needs.

    torch's FileStore appends each value to its file, which would grow with every heartbeat
    (docs/architecture.md).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "-")

    def set(self, key: str, text: str) -> None:
        write_text_atomically(self._path(key), text, durable=False)

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + _FIRST_VALUE_S
        # Files announce nothing, so this polls.
        while not self.check([key]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._path(key).read_bytes()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        """Set a key unless another process has set it. Return its value afterwards."""
        assert not expected, "only the first value is decided here"
        mine = self.folder / f".{key}.{os.getpid()}-{threading.get_ident()}"
        # Write under a name that no other process uses, then link.
        mine.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(mine, self._path(key))  # atomic, and fails if the name exists
        mine.unlink()
        return self.get(key)


def describe_silence(
    beats: dict[int, Heartbeat], silent: Sequence[int], *, limit_s: float
) -> tuple[str, bool]:
    """Describe the silent ranks: their machines, and their last activity.

    Args:
        beats: newest heartbeat of each rank that has not ended.
        silent: silent ranks.
        limit_s: silence after which a rank counts as lost.

    Returns:
        The description, and whether all ranks of a machine are silent.
    """
    hosts = {rank: beat.process.host for rank, beat in beats.items()}
    parts, lost = [], False
    for host in dict.fromkeys(hosts[rank] for rank in silent):
        here = [rank for rank in silent if hosts[rank] == host]
        first = beats[here[0]]
        # If all ranks of one of several hosts are silent, the host is more likely lost than each rank.
        if len(set(hosts.values())) > 1 and here == [r for r in hosts if hosts[r] == host]:
            why, lost = f"{host} is lost, or cut off", True
        else:
            why = why_silent(first.process)
        has = "has" if len(here) == 1 else "have"
        parts.append(
            f"{list_ranks(here)} on {host} {has} not been heard of for {limit_s:g} s: {why}; rank {here[0]} was in "
            f"{first.activity}, step {first.step}"
        )
    return ". ".join(parts), lost


def describe_hang(beats: dict[int, Heartbeat], silent: Sequence[int]) -> str:
    """Describe which ranks do not wait for others, and where the others wait."""
    parts = [
        f"rank {rank} does not answer (stopped, or its interpreter is locked)"
        if rank in silent
        else f"rank {rank} is in {beat.activity}"
        for rank, beat in beats.items()
        if rank in silent or not beat.waits
    ]
    waiting = [rank for rank, beat in beats.items() if beat.waits and rank not in silent]
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        parts.append(f"{list_ranks(waiting)} {verb} in {beats[waiting[0]].activity}")
    if len(waiting) == len(beats):
        parts.insert(0, "every rank waits for another")
    return "; ".join(parts)


def why_silent(process: ProcessId) -> str:
    """Return the reason that this machine's /proc shows for a silent process."""
    if not process.is_here():
        return "it is stopped, or its interpreter is locked by a C extension"
    if not process.is_running():
        return "its process is gone"
    # The state is the first field after the program's name.
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    known = {
        "T": "it is stopped, by SIGSTOP or the like",
        "D": "it waits for a disk or a device",
    }
    return known.get(state, "its interpreter is locked by a C extension")
