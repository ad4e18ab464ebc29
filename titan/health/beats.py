"""Say what a rank's beat is, how beats reach other ranks, and what their absence means."""

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

from titan.health.run_lock import ProcessId
from titan.run_folder import write_text_atomically

_FIRST_VALUE_S = 60.0  # ranks start together


@dataclass(frozen=True)
class Beat:
    """Hold what a rank says of itself."""

    count: int
    step: int
    activity: str
    waits: bool
    process: ProcessId

    @staticmethod
    def parse(text: str) -> Beat:
        """Return the beat of a text in the store."""
        content = json.loads(text)
        return Beat(**(content | {"process": ProcessId(**content["process"])}))


def connect(timeout_s: float) -> Any:
    """Return a second connection to the ranks' store; None if it is neither a TCPStore nor a file."""
    import torch.distributed as dist

    store = default_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    if isinstance(store, dist.FileStore):
        return FolderStore(Path(f"{store.path}-beats"))  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(store, dist.TCPStore):
        return None
    timeout = timedelta(seconds=max(timeout_s, 5))
    # Requests over one connection wait for each other, so beats go over another one.
    connection = dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
    # torchrun may keep its store over a restart, with the failure of the attempt before.
    return dist.PrefixStore(f"titan/{attempt}", connection)


def store_host() -> str:
    """Return the host that holds the ranks' store, as far as is known."""
    return str(getattr(default_store(), "host", os.environ.get("MASTER_ADDR", "?")))


def default_store() -> Any:
    """Return the store of the default group, without its prefixes."""
    # Private in torch, but the same in 2.11 to 2.15.
    from torch.distributed.distributed_c10d import _get_default_store

    # A prefix store waits for its keys; the one below it has host, port and path.
    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


class FolderStore:
    """Offer the part of torch's store that the monitor needs, as files.

    torch's FileStore appends each value to its file, which would grow with every beat (docs/architecture.md).
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
        """Set a key that nobody has set. Returns what it holds then."""
        assert not expected, "only the first value is decided here"
        mine = self.folder / f".{key}.{os.getpid()}-{threading.get_ident()}"
        # Written under a name that no other process uses, and then linked.
        mine.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(mine, self._path(key))  # atomic, and fails if the name exists
        mine.unlink()
        return self.get(key)


def describe_silence(
    beats: dict[int, Beat], silent: Sequence[int], *, limit_s: float
) -> tuple[str, bool]:
    """Return which ranks on which machines are silent and what they did last; and whether a whole machine is."""
    hosts = {rank: beat.process.host for rank, beat in beats.items()}
    parts, lost = [], False
    for host in dict.fromkeys(hosts[rank] for rank in silent):
        here = [rank for rank in silent if hosts[rank] == host]
        first = beats[here[0]]
        # All ranks of one of several hosts: more likely the host than each of them.
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


def describe_hang(beats: dict[int, Beat], silent: Sequence[int]) -> str:
    """Return which ranks do not wait for others, and where the others wait."""
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
    """Return what keeps a process silent, as far as this machine's /proc says."""
    if not process.is_here():
        return "it is stopped, or its interpreter is locked by a C extension"
    if not process.is_running():
        return "its process is gone"
    # The state is the first field after the program's name.
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    known = {"T": "it is stopped, by SIGSTOP or the like", "D": "it waits for a disk or a device"}
    return known.get(state, "its interpreter is locked by a C extension")


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2, 3", with at most eight numbers."""
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
