"""Ranks hear of each other's end in seconds, through the store that they met in, and not at the collectives' time limit.

    beat     each rank writes a beat (a count, its step, what its main thread does) under its own key, in a thread of its own
             with a connection of its own, so that neither a collective nor a compilation of minutes makes it silent
    watch    and reads the beat of the next rank: a ring, so that the cost of a rank does not grow with their number. One
             that has not changed for `comm.heartbeat_timeout_seconds` is silent: then all beats are read, twice
    verdict  the first to know of a failure, be it a silence or its own exception, writes a `Failure` under one key, which
             every rank reads with each beat. All write the same status.json, dump flight recorder and stacks, and end
    loss     a store that does not answer: its host is lost, or this one is cut off. Each rank ends by itself, and ends
             its torchrun, which would wait for TCP to give up for a quarter of an hour

Time is counted in beats of one's own, so that a rank that was stopped or starved itself does not accuse the others. A silent rank
on a machine where others live is sent SIGABRT: faulthandler, which needs no interpreter, writes where it is.

Lost is what a rank on this machine says nothing of: its process is stopped, its interpreter is locked by an extension, or
it is gone. A machine all of whose ranks are silent is lost as a whole.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from titan.health import flight_recorder
from titan.health.run_lock import LockHolder, started
from titan.health.signals import EXIT_FAILED, has_agent, leave, to_main_thread
from titan.health.stacks import main_thread
from titan.observe.runinfo import State, write_status, write_text_atomically

BEATS_PER_TIMEOUT = 20
LINGER_S = (
    3.0  # of a rank that has failed, so that others see why before its agent or store is gone
)
_STUCK_S = 20.0  # after a verdict, for a main thread that ends by itself
_GONE = "gone"
_FIRST_BEAT_S = 60.0  # ranks start together


@dataclass(frozen=True)
class Failure:
    """Why the run ends, on all ranks."""

    reason: str
    step: int = 0
    state: State = "failed"
    exit_code: int = EXIT_FAILED
    rank: int = 0  # whose verdict it is
    silent: tuple[int, ...] = ()

    @staticmethod
    def of(text: bytes) -> Failure:
        content = json.loads(text)
        return Failure(**(content | {"silent": tuple(content["silent"])}))


class Heartbeat:
    """One rank's beats, from `start` to `close`. With no other ranks, no store over TCP, or a limit of 0, nothing runs, and the
    rank's own verdict is the only one."""

    def __init__(
        self, limit_s: float, *, run_dir: Path, rank: int, world_size: int, step: Callable[[], int]
    ) -> None:
        self.limit_s, self.run_dir, self.step = limit_s, run_dir, step
        self.rank, self.world_size = rank, world_size
        self.every_s = limit_s / BEATS_PER_TIMEOUT
        # The first is rank 0, which may hold the store.
        self._me = self._first = LockHolder.this_process()
        self._store: Any = None
        self._rounds = 0  # of beats that the store has taken
        self._leaving = threading.Event()  # the main thread ends by itself
        self._closed = threading.Event()

    def start(self) -> None:
        """Once the process group is there."""
        if self.world_size == 1 or not self.limit_s:
            return
        self._store = _connect(self.limit_s)
        if self._store is None:
            logging.getLogger("titan").warning("no heartbeat: the ranks' store cannot be shared")
            return
        self._store.set(_beat_key(self.rank), self._beat_text())
        self._first = _owner(self._store.get(_beat_key(0)).decode())
        for target in (self._beat, self._watch_store):
            threading.Thread(target=target, name="heartbeat", daemon=True).start()

    def tell(self, mine: Failure) -> Failure:
        """The main thread fails: let the others know. Returns the run's verdict, which may be another rank's."""
        self._leaving.set()
        return self._agree(mine)

    def linger(self) -> None:
        """Sign off. Rank 0, whose process or agent holds the store, waits until all have, or had the time to hear why."""
        if self._store is None:
            return
        within_s = min(LINGER_S, 3 * self.every_s)
        deadline = time.monotonic() + within_s

        def wait() -> None:
            self._store.add(_GONE, 1)
            while (
                self.rank == 0
                and self._store.add(_GONE, 0) < self.world_size
                and time.monotonic() < deadline
            ):
                time.sleep(0.05)

        _within(within_s, wait)

    def close(self) -> None:
        """The rank has ended well: its silence means nothing from now on."""
        self._closed.set()
        if self._store is not None and not self._leaving.is_set():
            _within(LINGER_S, lambda: self._store.set(_beat_key(self.rank), _GONE))

    # ---- threads -----------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Beat, look at the next rank, and at the verdict."""
        neighbour, last, unchanged = (self.rank + 1) % self.world_size, b"", 0
        while not self._closed.wait(self.every_s):
            try:
                self._store.set(_beat_key(self.rank), self._beat_text())
                if self._store.check([_VERDICT]):
                    return self._obey(Failure.of(self._store.get(_VERDICT)))
                beat = b""
                if self._store.check([_beat_key(neighbour)]):
                    beat = self._store.get(_beat_key(neighbour))
                self._rounds += 1
            except Exception:  # the connection is lost; the other thread counts
                continue
            unchanged = unchanged + 1 if beat == last and beat != _GONE.encode() else 0
            last = beat
            if unchanged >= BEATS_PER_TIMEOUT and not self._closed.is_set():
                with suppress(Exception):
                    self._accuse()
                unchanged = 0

    def _watch_store(self) -> None:
        """A request to a store whose host is lost does not come back: another thread notices."""
        seen, unchanged = -1, 0
        while not self._closed.wait(self.every_s):
            unchanged = unchanged + 1 if self._rounds == seen else 0
            seen = self._rounds
            if unchanged >= BEATS_PER_TIMEOUT + 2 and not self._leaving.is_set():
                return self._end(self._of_lost_store(), alone=True)

    def _of_lost_store(self) -> Failure:
        at: dict[str, Any] = {"step": self.step(), "rank": self.rank}
        if _is_here(self._first):
            state = _state(self._first)
            reason = (
                f"rank 0 on {self._me.host} has not been heard of for {self.limit_s:g} s: {state}"
            )
            return Failure(reason, state="hung", silent=(0,), **at)
        host = _store_host()
        reason = (
            f"the ranks' store on {host} has not answered rank {self.rank} on {self._me.host} for {self.limit_s:g} s: "
            f"{host} is lost, or {self._me.host} is cut off from it"
        )
        return Failure(reason, **at)

    def _accuse(self) -> None:
        """Find all that are silent, and say so. Nobody may be: a rank may have come back."""
        before = self._beats()
        for _ in range(3):  # others may accuse, too, and must not seem silent
            time.sleep(self.every_s)
            self._store.set(_beat_key(self.rank), self._beat_text())
            self._rounds += 1
        after = self._beats()
        silent = [rank for rank in before if before[rank] == after[rank] and after[rank] != _GONE]
        if silent:
            reason = describe_silence(after, silent, limit_s=self.limit_s)
            lost = "is lost" in reason
            # The next beat finds it, like those of all others.
            self._agree(
                Failure(
                    reason,
                    step=self.step(),
                    state="failed" if lost else "hung",
                    rank=self.rank,
                    silent=tuple(silent),
                )
            )

    def _obey(self, verdict: Failure) -> None:
        """End, unless the main thread is about to: it may have failed of the same, and says more."""
        if not self._leaving.is_set():
            _within(_STUCK_S, lambda: self._write_down(verdict))
        if self._leaving.wait(1):
            time.sleep(_STUCK_S)  # which it does not outlive, as a rule
            os._exit(verdict.exit_code)
        self._end(verdict, alone=False)

    def _end(self, verdict: Failure, *, alone: bool) -> None:
        def report() -> None:
            said = {"exit_code": verdict.exit_code, "reason": verdict.reason}
            write_status(self.run_dir, state=verdict.state, step=verdict.step or None, **said)
            logging.getLogger("titan").error(verdict.reason)
            if self.rank == 0 or alone or verdict.rank == self.rank:
                name = "" if self.rank == 0 else f"[rank {self.rank}] "
                print(f"{name}{verdict.reason}", file=sys.stderr, flush=True)
            if not alone:
                self.linger()
            elif not verdict.silent:
                _end_agent()

        if alone:
            _within(_STUCK_S, lambda: self._write_down(verdict))
        leave(verdict.exit_code, report, within_s=2 * LINGER_S + 2)

    def _write_down(self, verdict: Failure) -> None:
        flight_recorder.dump(verdict.reason)
        self._wake_silent(verdict)

    def _wake_silent(self, verdict: Failure) -> None:
        """Have those on this machine write their stacks and end, stopped or not; torchrun would give them 30 seconds first."""
        for rank in verdict.silent:
            with suppress(Exception):
                there = self._first if rank == 0 else _owner(self._beats([rank])[rank])
                if _is_here(there) and started(str(there.pid)) == there.started:
                    to_main_thread(there.pid, signal.SIGABRT)
                    os.kill(there.pid, signal.SIGCONT)

    # ---- the store ---------------------------------------------------------------------------------

    def _agree(self, mine: Failure) -> Failure:
        """The first verdict is everybody's."""
        if self._store is None:
            return mine
        text = json.dumps(asdict(mine))
        first = _within(LINGER_S, lambda: self._store.compare_set(_VERDICT, "", text))
        return Failure.of(first) if first else mine

    def _beat_text(self) -> str:
        beat = {"n": self._rounds, "step": self.step(), "does": main_thread().text}
        return json.dumps(beat | {"owner": asdict(self._me)})

    def _beats(self, ranks: list[int] | None = None) -> dict[int, str]:
        ranks = ranks or list(range(self.world_size))
        there = [rank for rank in ranks if self._store.check([_beat_key(rank)])]
        texts = self._store.multi_get([_beat_key(rank) for rank in there])
        return {rank: text.decode() for rank, text in zip(there, texts, strict=True)}


_VERDICT = "verdict"


def describe_silence(beats: dict[int, str], silent: list[int], *, limit_s: float) -> str:
    """Which ranks, on which machines, and what they did last."""
    hosts = {rank: _owner(text).host for rank, text in beats.items() if text != _GONE}
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in silent):
        here = [rank for rank in silent if hosts[rank] == host]
        names = f"rank {here[0]}" if len(here) == 1 else "ranks " + ", ".join(map(str, here))
        others = [rank for rank in hosts if hosts[rank] == host and rank not in silent]
        beat = json.loads(beats[here[0]])
        does = f"; rank {here[0]} was in {beat['does']}, step {beat['step']}"
        if others or len(set(hosts.values())) == 1:
            what = _state(_owner(beats[here[0]]))
        else:
            what = f"{host} is lost, or cut off"
        has = "has" if len(here) == 1 else "have"
        parts.append(f"{names} on {host} {has} not been heard of for {limit_s:g} s: {what}{does}")
    return ". ".join(parts)


def _is_here(owner: LockHolder) -> bool:
    """Whether its process id means something to this process. Virtual hosts may share a kernel."""
    me = LockHolder.this_process()
    return owner.machine != "" and (owner.machine, owner.host) == (me.machine, me.host)


def _state(owner: LockHolder) -> str:
    """What keeps a process silent, as far as this machine's /proc says."""
    if not _is_here(owner):
        return "it is stopped, or its interpreter is locked by a C extension"
    if started(str(owner.pid)) != owner.started:
        return "its process is gone"
    state = Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0]
    known = {"T": "it is stopped, by SIGSTOP or the like", "D": "it waits for a disk or a device"}
    return known.get(state, "its interpreter is locked by a C extension")


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a request to the store returns; None where it fails, or the store does not answer in time."""
    results: list[Any] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _owner(beat: str) -> LockHolder:
    return LockHolder(**json.loads(beat)["owner"])


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _default_store() -> Any:
    """The store of the default group, without its prefixes; private in torch, but the same in 2.11 to 2.15."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _store_host() -> str:
    return str(getattr(_default_store(), "host", os.environ.get("MASTER_ADDR", "?")))


def _connect(limit_s: float) -> Any:
    """Return a second connection to the ranks' store; None if it is neither a TCPStore nor a file."""
    import torch.distributed as dist

    store = _default_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    if isinstance(store, dist.FileStore):
        return _FolderStore(Path(f"{store.path}-beats"))  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(store, dist.TCPStore):
        return None
    own = dist.TCPStore(
        store.host, store.port, is_master=False, timeout=timedelta(seconds=max(limit_s, 5))
    )
    # torchrun may keep its store over a restart.
    return dist.PrefixStore(f"titan/{attempt}", own)


class _FolderStore:
    """What heartbeats need of a store, as files: torch's FileStore appends each beat to its file for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "-")

    def set(self, key: str, text: str) -> None:
        write_text_atomically(self._path(key), text, durable=False)

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + _FIRST_BEAT_S
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
        mine.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(mine, self._path(key))
        mine.unlink()
        return self.get(key)

    def add(self, key: str, amount: int) -> int:
        """Count the processes that have added 1 to a key."""
        if amount:
            (self.folder / f"{key}-by-{os.getpid()}").touch()
        return len(list(self.folder.glob(f"{key}-by-*")))


def _end_agent() -> None:
    """This machine's torchrun, after its other ranks had the time for their last words; they end with it (PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    with suppress(OSError):
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        known = (b"torchrun", b"torch.distributed.run", b"titan.health.launch")
        if has_agent() and any(name in command for name in known):
            time.sleep(LINGER_S)
            os.kill(parent, signal.SIGKILL)
