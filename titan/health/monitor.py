"""Watch a run, and let all ranks hear of a failure in seconds, not at the collectives' time limit.

    beat     each rank writes a beat (a count, its step, what its main thread does) under its own key of the store that
             the ranks met in, over a second connection. Neither a collective nor a compilation of minutes makes it silent
    watch    and reads the beat of the next rank: a ring, so that the cost for a rank does not grow with their number.
             If it has not changed for `comm.heartbeat_timeout_seconds`, all beats are read, twice
    step     a step that lasts longer than `fault_tolerance.step_timeout_seconds` is a failure, too: the beats say which
             ranks do not wait for others, and where they are. A rank that hangs keeps all others in the same step, so
             that the time of all is up together
    failure  the first to notice a failure, be it one of these or an exception, writes a `Failure` under one key, which
             every rank reads with each beat. All write the same status.json, dump flight recorder and stacks, and end
    loss     if the store does not answer, its host is lost, or this one is cut off. Each rank ends by itself, and ends
             its torchrun, which would wait for TCP to give up for a quarter of an hour

One thread, "monitor", decides all this and touches the run lock. It never waits for the store: a request to a store
whose host is lost does not return (docs/torch.md). A second thread, "beats", carries the messages.

Each rank measures time by its own beats, so a rank that was itself paused does not report its peers as silent.
A silent rank on a machine where others live is sent SIGABRT: faulthandler, which needs no interpreter, writes its stack.
A rank that does not hear of this (on another machine, its interpreter locked by a C extension that holds the GIL) is
ended by a timer of faulthandler, LOCKED_S after the limit of its step.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

from titan.health import flight_recorder
from titan.health.beats import (
    Beat,
    connect,
    describe_hang,
    describe_silence,
    store_host,
    why_silent,
)
from titan.health.errors import COMMUNICATION, Failure, main_thread, stacks_file, where_failed
from titan.health.run_lock import BEAT_S, ProcessId, RunLock, RunLocked
from titan.health.signals import (
    EXIT_FAILED,
    StopRequest,
    has_agent,
    leave,
    signal_main_thread,
)
from titan.run_folder import write_status

BEATS_PER_TIMEOUT, LONGEST_BEAT_S = 20, 1.5
LINGER_S = (
    3.0  # that a failed rank stays, so that others read why before its agent or store is gone
)
LOCKED_S = 10.0  # after a step's limit, until a rank whose interpreter is locked is ended
_STUCK_S = 20.0  # for a main thread that ends by itself, and for a disk that may hang
_FAILURE, _SIGNED_OFF, _GONE = "failure", "signed_off", "gone"  # keys, and the last beat
T = TypeVar("T")


class Monitor:
    """Watches one rank from `start` to `close`, and its peers from `connect` to `finish`.

    Args:
        heartbeat_s: the silence after which a rank counts as lost; 0: silence is no failure.
        step_limit_s: the time between `begin` and `end` of a step; 0: no limit.
        lock: the run lock, on rank 0.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        heartbeat_s: float = 0,
        step_limit_s: float = 0,
        lock: RunLock | None = None,
    ) -> None:
        self.run_dir, self.rank, self.world_size = run_dir, rank, world_size
        self.heartbeat_s, self.step_limit_s, self.lock = heartbeat_s, step_limit_s, lock
        self.step = 0
        self.beat_s = min(heartbeat_s / BEATS_PER_TIMEOUT or LONGEST_BEAT_S, LONGEST_BEAT_S)
        self._deadline = float("inf")  # of the step
        self._stacks: IO[str] | None = None
        # The first is rank 0, which may hold the store.
        self._me = self._first = ProcessId.this()
        self._store: Any = None
        self._rounds = 0  # of messages that the store has taken
        self._peer_is_silent = False
        self._leaving = threading.Event()  # the main thread has failed, and ends by itself
        self._finished = threading.Event()
        self._closed = threading.Event()

    # ---- what the main thread calls ----------------------------------------------------------------

    def start(self) -> None:
        if self.step_limit_s:
            path = stacks_file(self.run_dir, self.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = path.open("a")  # now, since a locked interpreter opens no file
        threading.Thread(target=self._watch, name="monitor", daemon=True).start()

    def connect(self) -> None:
        """Exchange beats from now on: the process group exists."""
        flight_recorder.begin()
        if self.world_size == 1 or not (self.heartbeat_s or self.step_limit_s):
            return
        store = connect(self.heartbeat_s)
        if store is None:
            logging.getLogger("titan").warning("no heartbeat: the ranks' store cannot be shared")
            return
        store.set(_beat_key(self.rank), self._beat())
        self._first = Beat.parse(store.get(_beat_key(0)).decode()).process
        self._store = store
        threading.Thread(target=self._exchange, name="beats", daemon=True).start()

    def begin(self, step: int, *, extra_s: float = 0) -> None:
        """Begin a step. extra_s: time that it has beyond the limit."""
        self.step = step
        if self._stacks is not None:
            limit_s = self.step_limit_s + extra_s
            self._deadline = time.monotonic() + limit_s
            faulthandler.dump_traceback_later(limit_s + LOCKED_S, exit=True, file=self._stacks)

    def end(self) -> None:
        """End a step: until the next one begins there is no limit."""
        if self._stacks is not None:
            self._deadline = float("inf")
            faulthandler.cancel_dump_traceback_later()

    def fail(self, error: Exception, exit_code: int, *, expected: bool = True) -> int:
        """Report an error that ends the run, to the user and to the other ranks. Returns the exit code.

        Args:
            expected: the message of the error is written for the user; no stacks are needed.
        """
        mine = Failure.of(
            error, rank=self.rank, step=self.step, exit_code=exit_code, expected=expected
        )
        expected = expected and mine.kind not in COMMUNICATION
        agreed = self.report_failure(mine)
        if self.world_size > 1 or not expected:
            flight_recorder.dump(mine, at=where_failed(error), stacks=not expected)
        # All ranks write the same, so that it does not matter who comes last.
        with suppress(OSError):  # the disk may be what failed
            self._write_status(agreed)
        logging.getLogger("titan").error(mine.reason, extra={"last_words": True})
        self._print(mine.reason)
        if self.rank == 0 and agreed.reason != mine.reason:
            self._print(agreed.reason)
        self.wait_for_peers()
        return exit_code

    def report_failure(self, mine: Failure) -> Failure:
        """Let the other ranks know that this one fails. Returns the run's failure, which may be another rank's."""
        # First of all: a failure of others that comes in now must not end this process before its own report.
        self._leaving.set()
        self.end()
        return self._agree(mine) or mine

    def wait_for_peers(self) -> None:
        """Sign off. Rank 0, whose process or agent holds the store, waits until all have, or had the time to."""
        if self._store is None:
            return
        within_s = min(LINGER_S, 3 * self.beat_s)
        deadline = time.monotonic() + within_s

        def wait() -> None:
            self._store.add(_SIGNED_OFF, 1)
            # The other ranks need nobody: they may end at once.
            while (
                self.rank == 0
                and self._store.add(_SIGNED_OFF, 0) < self.world_size
                and time.monotonic() < deadline
            ):
                time.sleep(0.05)

        call_with_timeout(within_s, wait)

    def finish(self) -> None:
        """Stop watching: the rank has ended, and its silence means nothing from now on."""
        self.end()
        self._finished.set()
        if self._store is not None and not self._leaving.is_set():
            call_with_timeout(LINGER_S, lambda: self._store.set(_beat_key(self.rank), _GONE))

    def close(self) -> None:
        self.finish()
        self._closed.set()
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
            with suppress(FileNotFoundError):
                if not (path := stacks_file(self.run_dir, self.rank)).stat().st_size:
                    path.unlink()

    # ---- what others call, in threads that do not wait for the main one ----------------------------

    def stop_too_late(self, stop: StopRequest, grace_s: float) -> None:
        """Report that a signal's grace time is over, and where the rank is."""
        reason = (
            f"{stop.seen} asked rank {self.rank} to stop, but fault_tolerance.grace_seconds = {grace_s:g} are over: "
            f"it is in {main_thread().text}. "
        )
        saved = stop.exit_code is not None
        reason += "All is saved" if saved else "The last checkpoint is from before"
        failure = self._failure(reason, "stopped_late")
        if not saved:
            self._write_status(failure)
        stacks = stacks_file(self.run_dir, self.rank)
        print(f"{reason}. Stacks of all threads: {stacks}", file=sys.stderr, flush=True)
        flight_recorder.dump(failure)  # last, for it takes longest, and there is not much time

    def dump_on_request(self) -> None:
        """Answer SIGUSR2: write where the rank is, and go on."""
        flight_recorder.dump(self._failure(f"SIGUSR2 in step {self.step}", "asked"))
        self._print(f"stacks of all threads: {stacks_file(self.run_dir, self.rank)}")

    def terminate(self, reason: str) -> None:
        """Report that C++ ends the process."""
        failure = self._failure(reason, "terminated")
        self.report_failure(failure)
        flight_recorder.dump(failure)

    def _failure(self, reason: str, kind: str, *, silent: tuple[int, ...] = ()) -> Failure:
        return Failure(reason, kind=kind, step=self.step, rank=self.rank, silent=silent)

    # ---- the monitor's thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        tick_s = min(BEAT_S, self.beat_s, self.step_limit_s / 4 or BEAT_S)
        rounds, silent_s = -1, 0.0
        # Counted in ticks and not by a clock, which goes on while this process is stopped.
        while not self._closed.wait(tick_s):
            self._touch_lock()
            if self._finished.is_set() or self._leaving.is_set():
                continue
            # Before `connect` there is nothing to hear: torch is imported, which may take long.
            is_quiet = self._store is not None and self._rounds == rounds
            silent_s = silent_s + tick_s if is_quiet else 0
            rounds = self._rounds
            if 0 < self.heartbeat_s < silent_s - 2 * self.beat_s:
                self._exit_on(self._lost_store(), alone=True)
            # Publish what the beats show; this takes some beats, and must not keep others from beating.
            if self._peer_is_silent:
                self._peer_is_silent = False
                self._report(self._find_silent_ranks)
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")  # once is enough
                self._report(self._find_hanging_ranks)

    def _touch_lock(self) -> None:
        try:
            if self.lock is not None:
                self.lock.touch()
        except RunLocked as error:
            if not self._closed.is_set():
                print(f"{error}: process {os.getpid()} ends", file=sys.stderr, flush=True)
                os._exit(EXIT_FAILED)

    def _report(self, find: Callable[[], Failure | None]) -> None:
        """Publish a failure. This rank then reads it with its next beat, like all others."""
        # Two readings of all beats, some beats apart; the store may be gone, too.
        failure = call_with_timeout(2 * LINGER_S + 3 * self.beat_s, find)
        if failure is not None and self._agree(failure) is None:
            self._exit_on(failure, alone=True)

    def _find_silent_ranks(self) -> Failure | None:
        """Return which ranks are silent; None if all have come back."""
        beats, silent = self._compare_beats()
        if not silent:
            return None
        reason, host_is_lost = describe_silence(beats, silent, limit_s=self.heartbeat_s)
        kind = "host_lost" if host_is_lost else "rank_silent"
        return self._failure(reason, kind, silent=tuple(silent))

    def _find_hanging_ranks(self) -> Failure:
        """Return which ranks keep the others waiting in this step."""
        beats, silent = self._compare_beats()
        title = f"step {self.step} hangs: it has taken longer than {self.step_limit_s:g} s"
        reason = f"{title}; {describe_hang(beats, silent)}. Stacks: {self.run_dir}/logs/rank-*.stacks.txt"
        return self._failure(reason, "rank_silent" if silent else "hang", silent=tuple(silent))

    def _lost_store(self) -> Failure:
        if (
            self._first.is_here()
        ):  # the store is rank 0's, or torchrun's; a lost process takes it along
            reason = f"rank 0 on {self._me.host} has not been heard of for {self.heartbeat_s:g} s: "
            reason += why_silent(self._first)
            return self._failure(reason, "rank_silent", silent=(0,))
        host, here = store_host(), self._me.host
        reason = (
            f"the ranks' store on {host} has not answered rank {self.rank} on {here} for {self.heartbeat_s:g} s: "
            f"{host} is lost, or {here} is cut off from it"
        )
        return self._failure(reason, "host_lost")

    # ---- the thread that carries messages ----------------------------------------------------------

    def _exchange(self) -> None:
        """Beat, read the failure, and look at the next rank."""
        neighbour, last, unchanged = (self.rank + 1) % self.world_size, b"", 0
        while not self._finished.wait(self.beat_s):
            try:
                self._store.set(_beat_key(self.rank), self._beat())
                if self._store.check([_FAILURE]):
                    self._exit_on(_parse_failure(self._store.get(_FAILURE)))
                beat = b""
                if self._store.check([_beat_key(neighbour)]):
                    beat = self._store.get(_beat_key(neighbour))
                self._rounds += 1
            except Exception:  # the connection is lost; the monitor counts
                continue
            # A rank that has signed off is not silent.
            unchanged = unchanged + 1 if beat == last and beat != _GONE.encode() else 0
            last = beat
            if self.heartbeat_s and unchanged * self.beat_s >= self.heartbeat_s:
                self._peer_is_silent, unchanged = True, 0

    def _beat(self) -> str:
        activity = main_thread()
        beat = Beat(self._rounds, self.step, activity.text, activity.waits, self._me)
        return json.dumps(asdict(beat))

    def _read_beats(self) -> dict[int, str]:
        keys = {rank: _beat_key(rank) for rank in range(self.world_size)}
        there = [rank for rank, key in keys.items() if self._store.check([key])]
        texts = self._store.multi_get([keys[rank] for rank in there])
        return {rank: text.decode() for rank, text in zip(there, texts, strict=True)}

    def _compare_beats(self) -> tuple[dict[int, Beat], list[int]]:
        """Return the beats of all ranks that have not ended, and the ranks that are silent."""
        if self._store is None:
            return {self.rank: Beat.parse(self._beat())}, []
        before = self._read_beats()
        time.sleep(3 * self.beat_s)  # a busy machine may delay one or two
        after = self._read_beats()
        beats = {rank: Beat.parse(text) for rank, text in after.items() if text != _GONE}
        return beats, [rank for rank in beats if after[rank] == before.get(rank)]

    def _agree(self, mine: Failure) -> Failure | None:
        """Return the first failure that any rank has published; None if the store cannot be asked."""
        if self._store is None:
            return None
        text = json.dumps(asdict(mine))
        # compare_set sets a key that is not there yet, and returns what it holds afterwards.
        first = call_with_timeout(LINGER_S, lambda: self._store.compare_set(_FAILURE, "", text))
        return _parse_failure(first) if first else None

    # ---- the end -----------------------------------------------------------------------------------

    def _exit_on(self, failure: Failure, *, alone: bool = False) -> None:
        """End the process, unless the main thread is about to: it may have failed of the same, and says more.

        Args:
            alone: the other ranks do not hear of it from here.
        """
        faulthandler.cancel_dump_traceback_later()  # the interpreter is not locked
        if not self._leaving.is_set():
            call_with_timeout(_STUCK_S, lambda: self._write_dumps(failure))
        if not alone and self._leaving.wait(1):
            time.sleep(_STUCK_S)  # the process has ended by then, as a rule
            os._exit(failure.exit_code)

        def report() -> None:
            self._write_status(failure)
            logging.getLogger("titan").error(failure.reason, extra={"last_words": True})
            if self.rank == 0 or alone or failure.rank == self.rank:
                self._print(failure.reason)
            if not alone:
                self.wait_for_peers()
            elif failure.kind == "host_lost":  # no other rank can end the agent any more
                _end_agent()

        leave(failure.exit_code, report, within_s=2 * LINGER_S + 2)

    def _write_dumps(self, failure: Failure) -> None:
        flight_recorder.dump(failure)
        if not failure.silent:
            return
        # Have silent ranks on this machine write their stacks and end, stopped or not. torchrun would give them
        # 30 seconds first.
        processes = {0: self._first}
        if set(failure.silent) != {0}:  # the store may be gone with rank 0
            processes |= {rank: Beat.parse(t).process for rank, t in self._read_beats().items()}
        for rank in failure.silent:
            with suppress(LookupError, OSError):
                process = processes[rank]
                if process.is_here() and process.is_running():
                    signal_main_thread(process.pid, signal.SIGABRT)
                    os.kill(process.pid, signal.SIGCONT)

    def _write_status(self, failure: Failure) -> None:
        write_status(
            self.run_dir,
            state=failure.state,
            exit_code=failure.exit_code,
            step=failure.step or None,
            reason=failure.reason,
            kind=failure.kind,
            rank=failure.rank,
        )

    def _print(self, text: str) -> None:
        name = "" if self.rank == 0 else f"[rank {self.rank}] "
        print(f"{name}{text}", file=sys.stderr, flush=True)


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | None:
    """Return what a call returns; None if it fails, or does not return in time."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, name="call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _parse_failure(text: bytes) -> Failure:
    content = json.loads(text)
    return Failure(**(content | {"silent": tuple(content["silent"])}))


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _end_agent() -> None:
    """End this machine's torchrun after its other ranks had time for their reports. They end with it."""
    parent = os.getppid()
    with suppress(OSError):
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        known = (b"torchrun", b"torch.distributed.run", b"titan.health.launch")
        if has_agent() and any(name in command for name in known):
            time.sleep(LINGER_S)
            os.kill(parent, signal.SIGKILL)
