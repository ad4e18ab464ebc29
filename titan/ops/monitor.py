"""Monitor of a run: all ranks learn of a failure in seconds, not at the collectives' time limit.

    heartbeat  each rank writes a heartbeat (a count, its step, its main thread's activity) under its own key of the
               ranks' store, over a second connection. Neither a collective nor a compilation of minutes silences it
    watch      each rank reads the heartbeat of the next rank: a ring, so that the cost for a rank does not grow with
               their number. If it has not changed for `comm.heartbeat_timeout_seconds`, the rank reads all heartbeats,
               twice
    step       a step that lasts longer than `fault_tolerance.step_timeout_seconds` is a failure, too: the heartbeats
               show which ranks do not wait for others, and where they are. A rank that hangs keeps all others in the
               same step, so the time of all ranks is up together
    failure    the first rank to notice a failure (one of these or an exception) writes a `Failure` under one key, which
               every rank reads with each heartbeat. All ranks write the same status.json, dump flight recorder and
               stacks, and end
    loss       if the store does not answer, its host is lost, or this host is cut off. Each rank ends by itself, and
               ends its torchrun, which would wait a quarter of an hour for TCP to give up

One thread, "monitor", decides all this and touches the run lock. It never waits for the store: a
request to a store whose host is lost does not return (docs/architecture.md). A second thread, "beats",
carries the messages (peers.py).

Each rank measures time by its own heartbeats, so a rank that was itself paused does not report its
peers as silent. The monitor sends SIGABRT to a silent rank on a machine where others live:
faulthandler, which needs no interpreter, writes its stack. A rank that does not hear of this (on
another machine, its interpreter locked by a C extension that holds the GIL) is ended by a timer of
faulthandler, LOCKED_S after the limit of its step.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from titan.base.errors import COMMUNICATION, Failure, explains_itself
from titan.base.run_folder import write_status
from titan.base.signals import EXIT_FAILED, StopRequest, has_agent, leave, signal_main_thread

from . import flight_recorder
from .activity import main_thread, open_stacks, stacks_file, where_failed
from .heartbeats import describe_hang, describe_silence, store_host, why_silent
from .peers import LINGER_S, Peers, call_with_timeout
from .run_lock import BEAT_S, RunLock, RunLocked

LOCKED_S = 10.0  # after a step's limit, until a rank whose interpreter is locked is ended
_STUCK_S = 20.0  # wait for a main thread that ends, and for a disk that may hang


@dataclass(eq=False)
class Monitor:
    """Monitor of one rank from `start` to `close`, and of its peers from `connect` to `finish`.

    Args:
        run_dir: run folder.
        rank: this rank.
        world_size: number of ranks.
        heartbeat_s: silence after which a rank counts as lost; 0: silence is no failure.
        step_limit_s: time between `begin` and `end` of a step; 0: no limit.
        lock: run lock, on rank 0.
    """

    run_dir: Path
    rank: int = 0
    world_size: int = 1
    heartbeat_s: float = 0
    step_limit_s: float = 0
    lock: RunLock | None = None

    def __post_init__(self) -> None:
        self.step = 0
        self.peers = Peers(
            self.rank, self.world_size, self.heartbeat_s, lambda: self.step, self._exit_on
        )
        self._deadline = float("inf")  # of the step
        self._stacks: IO[str] | None = None
        self._leaving = threading.Event()  # the main thread has failed, and will end
        self._closed = threading.Event()

    # ---- calls of the main thread ------------------------------------------------------------------

    def start(self) -> None:
        """Start to watch this rank."""
        # Only a step limit needs the file now. Other failures open it when they write.
        if self.step_limit_s:
            # Now, since a locked interpreter opens no file.
            self._stacks = open_stacks(self.run_dir, self.rank)
        threading.Thread(target=self._watch, name="monitor", daemon=True).start()

    def connect(self) -> None:
        """Start to exchange heartbeats. Call it when the process group exists."""
        flight_recorder.begin()
        if self.world_size == 1 or not (self.heartbeat_s or self.step_limit_s):
            return
        self.peers.connect()

    def begin(self, step: int, *, extra_s: float = 0) -> None:
        """Begin a step.

        Args:
            step: number of the step.
            extra_s: seconds that the step has beyond the limit.
        """
        self.step = step
        if self._stacks is not None:
            limit_s = self.step_limit_s + extra_s
            self._deadline = time.monotonic() + limit_s
            # Armed again for each step. The timer is C code, so it ends even a rank whose
            # interpreter is locked.
            faulthandler.dump_traceback_later(limit_s + LOCKED_S, exit=True, file=self._stacks)

    def end(self) -> None:
        """End a step. No limit applies until the next step begins."""
        if self._stacks is not None:
            self._deadline = float("inf")
            faulthandler.cancel_dump_traceback_later()

    def fail(self, error: Exception) -> int:
        """Report an error that ends the run, to the user and to the other ranks. Return the exit code."""
        mine = Failure.of(error, rank=self.rank, step=self.step)
        # The message is written for the user, so that no stacks are needed.
        expected = explains_itself(error) and mine.kind not in COMMUNICATION
        agreed = self.report_failure(mine)
        if self.world_size > 1 or not expected:
            flight_recorder.dump(mine, at=where_failed(error), stacks=not expected)
        # All ranks write the same text, so the order does not matter. The failure that the ranks agreed on may be another rank's.
        self._write_status(agreed)
        logging.getLogger("titan").error(mine.reason, extra={"last_words": True})
        self._print(mine.reason)
        if self.rank == 0 and agreed.reason != mine.reason:
            self._print(agreed.reason)
        # Other ranks must read the failure before the store's process or agent is gone.
        self.peers.wait()
        return mine.exit_code

    def report_failure(self, mine: Failure) -> Failure:
        """Publish this rank's failure. Return the run's failure, which may be another rank's."""
        # First: a failure of others that arrives now must not end this process before its own report.
        self._leaving.set()
        self.end()
        return self.peers.agree(mine) or mine

    def finish(self) -> None:
        """Stop the watch: the rank has ended, and its silence is no failure any more."""
        self.end()
        self.peers.finished.set()
        # A failed rank does not sign off.
        if not self._leaving.is_set():
            self.peers.leave()

    def close(self) -> None:
        """Stop the thread, and with it the heartbeats of the run lock."""
        self.finish()
        self._closed.set()
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        # A file that stayed empty would only raise questions.
        with suppress(OSError):
            if not (path := stacks_file(self.run_dir, self.rank)).stat().st_size:
                path.unlink()

    # ---- calls of other threads, which do not wait for the main thread -----------------------------

    def stop_too_late(self, stop: StopRequest, grace_s: float) -> None:
        """Report that a signal's grace time is over, and this rank's activity."""
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
        self._print(f"{reason}. Stacks of all threads: {stacks}")
        flight_recorder.dump(failure)  # last, for it takes longest, and there is not much time

    def dump_on_request(self) -> None:
        """Answer SIGUSR2: write this rank's activity, and go on."""
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
        # At least four checks before a step's limit, and one for each heartbeat.
        tick_s = min(BEAT_S, self.peers.beat_s, self.step_limit_s / 4 or BEAT_S)
        rounds, silent_s = -1, 0.0
        # Count ticks: a clock goes on while this process is stopped.
        while not self._closed.wait(tick_s):
            self._touch_lock()
            if self.peers.finished.is_set() or self._leaving.is_set():
                continue
            # Before `connect` no rank sends heartbeats: importing torch may take long.
            is_quiet = self.peers.store is not None and self.peers.rounds == rounds
            silent_s = silent_s + tick_s if is_quiet else 0
            rounds = self.peers.rounds
            # Two heartbeats of tolerance, since another thread counts the rounds.
            if 0 < self.heartbeat_s < silent_s - 2 * self.peers.beat_s:
                self._exit_on(self._lost_store(), alone=True)
            # Publish the failure that the heartbeats show. This takes the time of some heartbeats, which go on.
            if self.peers.one_is_silent:
                self.peers.one_is_silent = False
                self._report(self._find_silent_ranks)
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")  # once is enough
                self._report(self.find_hanging_ranks)

    def _touch_lock(self) -> None:
        try:
            if self.lock is not None:
                self.lock.touch()
        except RunLocked as error:
            if not self._closed.is_set():
                self._print(f"{error}: process {os.getpid()} ends")
                # Another run owns the folder now: end without writing into it.
                os._exit(EXIT_FAILED)

    def _report(self, find: Callable[[], Failure | None]) -> None:
        """Publish a failure. This rank then reads it with its next heartbeat, like all others."""
        # `find` reads all heartbeats twice, some heartbeats apart. The store may be gone, too.
        failure = call_with_timeout(2 * LINGER_S + 3 * self.peers.beat_s, find)
        # The store did not take the failure, so no other rank learns of it.
        if failure is not None and self.peers.agree(failure) is None:
            self._exit_on(failure, alone=True)

    def _find_silent_ranks(self) -> Failure | None:
        """Describe the silent ranks; None if all have come back."""
        beats, silent = self.peers.compare_beats()
        if not silent:
            return None
        reason, host_is_lost = describe_silence(beats, silent, limit_s=self.heartbeat_s)
        kind = "host_lost" if host_is_lost else "rank_silent"
        return self._failure(reason, kind, silent=tuple(silent))

    def find_hanging_ranks(self) -> Failure:
        """Describe the ranks that keep the others waiting in this step."""
        beats, silent = self.peers.compare_beats()
        title = f"step {self.step} hangs: it has taken longer than {self.step_limit_s:g} s"
        reason = f"{title}; {describe_hang(beats, silent)}. Stacks: {self.run_dir}/logs/rank-*.stacks.txt"
        return self._failure(reason, "rank_silent" if silent else "hang", silent=tuple(silent))

    def _lost_store(self) -> Failure:
        # The store belongs to rank 0 or to torchrun, and is lost with that process.
        if self.peers.first.is_here():
            reason = f"rank 0 on {self.peers.me.host} has not been heard of for {self.heartbeat_s:g} s: "
            reason += why_silent(self.peers.first)
            return self._failure(reason, "rank_silent", silent=(0,))
        host, here = store_host(), self.peers.me.host
        reason = (
            f"the ranks' store on {host} has not answered rank {self.rank} on {here} for {self.heartbeat_s:g} s: "
            f"{host} is lost, or {here} is cut off from it"
        )
        return self._failure(reason, "host_lost")

    # ---- the end -----------------------------------------------------------------------------------

    def _exit_on(self, failure: Failure, *, alone: bool = False) -> None:
        """End the process, unless the main thread is about to fail of the same, with a better message.

        Args:
            failure: reason.
            alone: whether this rank cannot tell the other ranks.
        """
        faulthandler.cancel_dump_traceback_later()  # the interpreter is not locked
        # A failed main thread has written its dumps already.
        if not self._leaving.is_set():
            call_with_timeout(_STUCK_S, lambda: self._write_dumps(failure))
        # Wait a second for the main thread to fail: its message names the line that failed.
        if not alone and self._leaving.wait(1):
            time.sleep(_STUCK_S)  # the process has ended by then, as a rule
            os._exit(failure.exit_code)

        def report() -> None:
            self._write_status(failure)
            logging.getLogger("titan").error(failure.reason, extra={"last_words": True})
            if self.rank == 0 or alone or failure.rank == self.rank:
                self._print(failure.reason)
            if not alone:
                self.peers.wait()
            elif failure.kind == "host_lost":  # no other rank can end the agent any more
                _end_agent()

        leave(failure.exit_code, report, within_s=2 * LINGER_S + 2)

    def _write_dumps(self, failure: Failure) -> None:
        flight_recorder.dump(failure)
        if not failure.silent:
            return
        # Make silent ranks on this machine write their stacks and end, stopped or not. torchrun would
        # give them 30 seconds first.
        processes = {0: self.peers.first}
        if set(failure.silent) != {0}:  # the store may be gone with rank 0
            processes |= self.peers.processes()
        for rank in failure.silent:
            with suppress(LookupError, OSError):
                process = processes[rank]
                if process.is_here() and process.is_running():
                    signal_main_thread(process.pid, signal.SIGABRT)
                    # A stopped process takes the signal only when it continues.
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
        # Standard error may be a file on a full disk, or a pipe that nobody reads any more.
        with suppress(OSError):
            print(f"{name}{text}", file=sys.stderr, flush=True)


def _end_agent() -> None:
    """End this machine's torchrun, after its other ranks had time for their reports. They end with it."""
    parent = os.getppid()
    with suppress(OSError):
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        known = (b"torchrun", b"torch.distributed.run", b"titan.ops.launch")
        # Only a parent that is torchrun: an interactive shell must survive.
        if has_agent() and any(name in command for name in known):
            time.sleep(LINGER_S)
            os.kill(parent, signal.SIGKILL)
