"""A step that takes too long ends the run, and says why: the stacks of all ranks, and the rank to look at.

    T         every rank whose step has lasted `fault_tolerance.step_timeout_seconds` writes the stacks of its threads
              into logs/rank-N.stacks.txt, and into logs/.hung-N.json whether it waits for others, and where
    T + 5 s   status.json: the ranks that do not wait, or say nothing (stopped, or the interpreter is locked). Exit 1.
              The others hear it, as any verdict on the run: those that lose their connection now do not call that the cause
    T + 10 s  a rank whose interpreter is locked (a C extension holds the GIL) cannot run the thread that does all this:
              faulthandler, which needs no interpreter, writes its stacks, and ends it

A rank that hangs is waited for by all the others in the same step, so that their time is up together.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from titan.health import flight_recorder
from titan.health.monitor import Failure
from titan.health.signals import EXIT_FAILED, leave
from titan.health.stacks import Whereabouts, dump_stacks, main_thread, stacks_file
from titan.observe.runinfo import write_status, write_text_atomically

SHARE_S, LOCKED_S = 5.0, 10.0
_POLL_S = 0.5


class Watchdog:
    """Watches from `begin` to `end` of each step, in a thread of its own; a limit of 0 switches it off. agree: tells the
    other ranks, and returns what holds for all."""

    def __init__(
        self,
        limit_s: float,
        *,
        run_dir: Path,
        rank: int,
        world_size: int,
        agree: Callable[[Failure], Failure] = lambda mine: mine,
    ) -> None:
        self.limit_s, self.run_dir = limit_s, run_dir
        self.rank, self.world_size = rank, world_size
        self.agree = agree
        self.step = 0
        self._deadline = float("inf")
        self._closed = threading.Event()
        if limit_s:
            self._note(rank).unlink(missing_ok=True)  # of a run before
            # Now, since a locked interpreter opens no file.
            self._file = stacks_file(run_dir, rank).open("a")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, step: int, *, extra_s: float = 0) -> None:
        if self.limit_s:
            limit_s = self.limit_s + extra_s
            self.step, self._deadline = step, time.monotonic() + limit_s
            faulthandler.dump_traceback_later(limit_s + LOCKED_S, exit=True, file=self._file)

    def end(self) -> None:
        if self.limit_s:
            self._deadline = float("inf")
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        self.end()
        self._closed.set()
        if self.limit_s:
            self._file.close()
            if not stacks_file(self.run_dir, self.rank).stat().st_size:
                stacks_file(self.run_dir, self.rank).unlink()

    def _note(self, rank: int) -> Path:
        return self.run_dir / "logs" / f".hung-{rank}.json"

    def _watch(self) -> None:
        while not self._closed.wait(min(_POLL_S, self.limit_s / 4)):
            if time.monotonic() > self._deadline:
                leave(EXIT_FAILED, self._report, within_s=SHARE_S + LOCKED_S)

    def _report(self) -> None:
        title = f"rank {self.rank}: step {self.step} takes longer than fault_tolerance.step_timeout_seconds"
        text = json.dumps(asdict(main_thread()))
        dump_stacks(stacks_file(self.run_dir, self.rank), title)
        flight_recorder.dump(title, stacks=False)
        write_text_atomically(self._note(self.rank), text, durable=False)
        time.sleep(SHARE_S)
        run = self.agree(Failure(self._reason(), step=self.step, state="hung", rank=self.rank))
        reason, said = run.reason, {"exit_code": run.exit_code, "step": run.step}
        write_status(self.run_dir, state=run.state, reason=reason, **said)
        logging.getLogger("titan").error(reason, extra={"last_words": True})
        print(f"{'' if self.rank == 0 else f'[rank {self.rank}] '}{reason}", file=sys.stderr)

    def _reason(self) -> str:
        """The same on every rank that has come this far."""
        found = {rank: self._whereabouts(rank) for rank in range(self.world_size)}
        waiting = {rank: at.text for rank, at in found.items() if at is not None and at.waits}
        suspects = [
            f"rank {rank} is in {at.text}"
            if at
            else f"rank {rank} says nothing (stopped, or its interpreter is locked)"
            for rank, at in found.items()
            if rank not in waiting
        ]
        if not suspects:
            suspects = ["every rank waits for another"]
        if waiting:
            rank = min(waiting)
            suspects.append(f"{_ranks(list(waiting))} in {waiting[rank]}")
        return (
            f"step {self.step} hangs: it has taken longer than {self.limit_s:g} s; {'; '.join(suspects)}. Stacks of all "
            f"threads: {self.run_dir}/logs/rank-*.stacks.txt"
        )

    def _whereabouts(self, rank: int) -> Whereabouts | None:
        try:
            return Whereabouts(**json.loads(self._note(rank).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {named} waits" if len(ranks) == 1 else f"ranks {named} wait"
