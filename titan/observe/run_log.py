"""Log of a run's events over all its starts (events.jsonl), and account of its wall time (goodput).

The wall time since the first start is divided into parts:

    trained      steps that were kept, without the times below
    data_wait, validation, checkpoint, profiling, quorum    the training loop waited for this; quorum: for replica groups
    setup        from the start of a process to its first step
    compile      the first step of each start, with its compilations
    lost         steps that were not kept: rewound, or after the checkpoint that a later start resumed from
    down         from the last sign of life to the next start

Each event carries the parts up to it, so a start that resumes from a checkpoint knows which time
was kept by then. A process that was killed lived at least until its newest row in events.jsonl or
logs/rank-0.times.jsonl. Only rank 0 writes. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.base.run_folder import EVENTS, RunFolder
from titan.base.run_writer import run_files
from titan.base.untrusted import Count, Finite, InputError, parse_json, tail_lines

WASTED = ("trained", "data_wait", "validation", "checkpoint", "profiling", "quorum")
"""Parts that become `lost` when their steps are lost."""
PARTS = (*WASTED, "setup", "compile", "lost", "down")
Seconds = dict[str, float]
_DATA = "data"  # StepTimer's name of data_wait


@dataclass
class _Beat:
    """Fields of a row of a rank's times that tell how long the run lived."""

    unix_s: Finite
    step: Count


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the share of the wall time since the first start that trained steps which were kept."""
    wall_s = sum(seconds.values())
    return seconds.get("trained", 0.0) / wall_s if wall_s > 0 else 0.0


class EventLog:
    """Log of a run's events, and account of its time. Only rank 0 has a file.

    Args:
        run_dir: run folder.
        rank: this rank.
        step: step that this start continues from, 0 for a fresh run.
        started_unix_s: start time of the process; None: read from /proc.
        clock: returns the present time; None: the wall clock of now, which later changes of it do not move.
        facts: more fields of the first event.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        step: int,
        started_unix_s: float | None = None,
        clock: Callable[[], float] | None = None,
        **facts: Any,
    ) -> None:
        if clock is None:
            begin_s = time.time() - time.monotonic()
            clock = lambda: begin_s + time.monotonic()  # noqa: E731
        self.path, self.clock, self._files = run_dir / EVENTS, clock, run_files(run_dir)
        self.is_on, self.restarts, self.lost_steps = rank == 0, 0, 0
        self.seconds: Seconds = dict.fromkeys(PARTS, 0.0)
        self.is_over, self._part = False, "setup"
        self._spent: Seconds = {}  # counts of the step timer at the last call
        self._rows: list[dict[str, Any]] = []
        # Imports and setting up belong to this start, so its time begins with the process.
        self._since = min(started_unix_s or process_start_unix_s(), clock())
        if self.is_on:
            self._continue(run_dir, step=step)
        self.write("resume" if self.restarts else "start", step=step, **facts)

    def set_up(self, spent: Mapping[str, float]) -> None:
        """Begin to set up again, in another layout. The next step timer counts from zero.

        Args:
            spent: as in `share`.
        """
        self._account(spent)
        self._part, self._spent = "setup", {}

    def begin_steps(self) -> None:
        """Begin the first step of this start; `warm` ends it."""
        self._account({})
        self._part = "compile"

    def warm(self, spent: Mapping[str, float]) -> None:
        """End the first step: training follows.

        Args:
            spent: as in `share`.
        """
        self._account(spent)
        self._part = "trained"

    def share(self, spent: Mapping[str, float]) -> float:
        """Return the goodput up to now.

        Args:
            spent: seconds that the step timer has taken out so far, by purpose.
        """
        self._account(spent)
        return goodput(self.seconds)

    def account(self, spent: Mapping[str, float]) -> Seconds:
        """Return the seconds of each part of the run's time up to now.

        Args:
            spent: as in `share`.
        """
        self._account(spent)
        return {part: round(s, 3) for part, s in self.seconds.items()}

    def write(
        self, event: str, *, step: int, spent: Mapping[str, float] | None = None, **facts: Any
    ) -> None:
        """Write an event, with the account of time up to it.

        Args:
            event: name of the event.
            step: number of the step.
            spent: as in `share`; None: as in the last call.
            **facts: more fields of the event.
        """
        if not self.is_on:
            return
        spent = self._spent if spent is None else spent
        row = {"event": event, "unix_s": round(self.clock(), 3), "step": step, **facts}
        row |= {"restarts": self.restarts, "lost_steps": self.lost_steps}
        row["seconds"] = self.account(spent)
        self._rows.append(row)
        self._files.append(EVENTS, json.dumps(row) + "\n")

    def rewind(self, step: int, *, to: int, spent: Mapping[str, float]) -> None:
        """Account for a return to a checkpoint within the process: the time since its save is lost.

        Args:
            step: step that rewinds.
            to: step of the checkpoint.
            spent: as in `share`.
        """
        self._account(spent)
        self._spent = {}  # the step timer starts again, too
        if self.is_on:
            self._go_back(to, from_step=step)
            self.write("rewind", step=to, at=step)

    def repeat(self, seconds: float) -> None:
        """Count a repeated step as lost. It was lost with a replica group."""
        self.seconds["trained"] -= seconds
        self.seconds["lost"] += seconds
        self.lost_steps += 1

    def end(self, state: str, *, step: int, **facts: Any) -> None:
        """Write the last event. Later calls do nothing."""
        if not self.is_over:
            self.is_over = True
            self.write("end", step=step, state=state, **facts)

    def discard(self, step: int, *, kept: int) -> None:
        """Count the steps after `kept` as lost in the summary. The next start computes this itself."""
        self._go_back(kept, from_step=step)

    def summary(self) -> str:
        """Return the account as a line for people."""
        wall_s = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda x: -x[1])
        names = {"compile": "first step"}  # it compiles, if anything does
        shares = (
            f"{names.get(name, name).replace('_', ' ')} {s / wall_s:.1%}" for name, s in parts
        )
        shown = ", ".join(share for share in shares if not share.endswith(" 0.0%"))
        restarts, steps = ("s" * (n != 1) for n in (self.restarts, self.lost_steps))
        return (
            f"goodput {goodput(self.seconds):.1%} of {wall_s:,.0f} s since the first start, "
            f"{self.restarts} restart{restarts}, {self.lost_steps:,} step{steps} lost ({shown})"
        )

    def _account(self, spent: Mapping[str, float]) -> None:
        """Add the time since the last call to the parts.

        Time that the step timer took out goes to its own parts, the rest to the current part.
        """
        now = self.clock()
        # The step timer counts up from its start, so each part gets the difference to the last call.
        rest = now - self._since
        for name, total in spent.items():
            taken = total - self._spent.get(name, 0.0)
            part = "data_wait" if name == _DATA else name
            self.seconds[part] += taken
            rest -= taken
        self.seconds[self._part] += max(rest, 0.0)
        self._since, self._spent = now, {**self._spent, **spent}

    def _continue(self, run_dir: Path, *, step: int) -> None:
        """Continue the account of earlier starts."""
        rows = RunFolder(run_dir).events()
        if not rows:
            return
        # The last event's account covers all starts before this one.
        last = rows[-1]
        if step == 0 and last["event"] == "end" and last.get("state") == "done":
            previous = self.path.with_name("events.previous.jsonl")  # of another run
            self._files.attempt(EVENTS, lambda: self.path.replace(previous))
            return
        self._rows = rows
        self.restarts, self.lost_steps = last.get("restarts", 0) + 1, last.get("lost_steps", 0)
        # Parts that another version of titan wrote are left out.
        self.seconds |= {p: s for p, s in last.get("seconds", {}).items() if p in PARTS}
        # The run trained until its last sign of life; from then on it was down.
        beat_s, reached = _last_beat(run_dir)
        self._since = max(self._since, last["unix_s"])  # a second start in one process
        alive_s = min(max(beat_s, last["unix_s"]), self._since)
        self.seconds["trained"] += alive_s - last["unix_s"]
        if last.get("state") != "done":  # a run that is done has nothing to do
            self.seconds["down"] += self._since - alive_s
        self._go_back(step, from_step=max(reached, last["step"]))

    def _go_back(self, step: int, *, from_step: int) -> None:
        """Move the time since the save of `step` to `lost`."""
        # The newest event at or before the step has the account up to that time.
        kept = next((row["seconds"] for row in reversed(self._rows) if row["step"] <= step), {})
        # Nothing is lost if the checkpoint is of the last step.
        if from_step > step:
            for part in WASTED:
                wasted = self.seconds[part] - kept.get(part, 0.0)
                self.seconds[part] -= wasted
                self.seconds["lost"] += wasted
            self.lost_steps += from_step - step


def _last_beat(run_dir: Path) -> tuple[float, int]:
    """Return time and step of rank 0's newest row of times, or zeros."""
    path = run_dir / "logs" / "rank-0.times.jsonl"
    with suppress(InputError, IndexError):
        # The last whole line: a killed process may have left half a row after it.
        beat = parse_json(tail_lines(path, within=run_dir)[-2], _Beat, name=path)
        return beat.unix_s, beat.step
    return 0.0, 0


def process_start_unix_s() -> float:
    """Return the start time of this process, or the present time if there is no /proc."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # Field 22 is the start in clock ticks since boot. The name in parentheses before may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
    return time.time()
