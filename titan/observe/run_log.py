"""events.jsonl: what happened to a run, over all its starts; and goodput, the share of wall time that trained.

Wall time since the first start is cut into parts that add up to it:

    trained      steps that were kept, less what is below
    data_wait, validation, checkpoint, profiling    the training loop stood still for it
    setup        from a process's start to its first step
    compile      the first step of each start, with its compilations
    lost         steps that were not kept: rewound, or after the checkpoint that a later start went back to
    down         from the last sign of life to the next start

Each event carries the parts up to it, so that whoever goes back to a checkpoint finds what was kept by then. The last sign of life
of a process that was killed is the newest row of events.jsonl or logs/rank-0.times.jsonl. Rank 0 writes; imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("titan")

WASTED = ("trained", "data_wait", "validation", "checkpoint", "profiling")
"""Parts that become `lost` where their steps are lost."""
PARTS = (*WASTED, "setup", "compile", "lost", "down")
Seconds = dict[str, float]
_DATA = "data"  # StepTimer's name of data_wait


def goodput(seconds: Mapping[str, float]) -> float:
    """Share of the wall time since the first start that trained steps which were kept."""
    wall_s = sum(seconds.values())
    return seconds.get("trained", 0.0) / wall_s if wall_s > 0 else 0.0


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run, oldest first, without a torn one; none where there is no such file."""
    rows = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) and "event" in row else []
    return rows


class EventLog:
    """A run's events and the account of its time; only rank 0 has a file.

    `step`: where this start goes on, 0 for a fresh run. started_unix_s: of this process, the present one's where None.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        step: int,
        started_unix_s: float | None = None,
        clock: Callable[[], float] = time.time,
        **facts: Any,
    ) -> None:
        self.path, self.clock = run_dir / "events.jsonl", clock
        self.is_on, self.restarts, self.lost_steps = rank == 0, 0, 0
        self.seconds: Seconds = dict.fromkeys(PARTS, 0.0)
        self.is_over, self._part = False, "setup"
        self._spent: Seconds = {}  # by the step timer when last asked
        self._rows: list[dict[str, Any]] = []
        self._since = min(started_unix_s or process_start_unix_s(), clock())
        if self.is_on:
            self._continue(run_dir, step=step)
        self.write("resume" if self.restarts else "start", step=step, **facts)

    def begin_steps(self) -> None:
        """The first step of this start begins; `warm` tells its end."""
        self._account({})
        self._part = "compile"

    def warm(self, spent: Mapping[str, float]) -> None:
        self._account(spent)
        self._part = "trained"

    def share(self, spent: Mapping[str, float]) -> float:
        """Goodput up to now. spent: seconds that the step timer took out so far, by what for."""
        self._account(spent)
        return goodput(self.seconds)

    def write(
        self, event: str, *, step: int, spent: Mapping[str, float] | None = None, **facts: Any
    ) -> None:
        """A row; `spent` as above."""
        if not self.is_on:
            return
        self._account(self._spent if spent is None else spent)
        row = {"event": event, "unix_s": round(self.clock(), 3), "step": step, **facts}
        row |= {"restarts": self.restarts, "lost_steps": self.lost_steps}
        row["seconds"] = {part: round(s, 3) for part, s in self.seconds.items()}
        self._rows.append(row)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self.is_on = False
            _LOG.warning(f"{self.path} cannot be written ({error}); training goes on without it")

    def rewind(self, step: int, *, to: int, spent: Mapping[str, float]) -> None:
        """Back to a checkpoint in this very process: the time since then is lost. The step timer begins anew after it."""
        self._account(spent)
        self._spent = {}
        if self.is_on:
            self._go_back(to, from_step=step)
            self.write("rewind", step=to, at=step)

    def end(self, state: str, *, step: int, **facts: Any) -> None:
        """The last event, once."""
        if not self.is_over:
            self.is_over = True
            self.write("end", step=step, state=state, **facts)

    def discard(self, step: int, *, kept: int) -> None:
        """Count the steps after `kept` as lost, for the summary: the next start finds that out by itself."""
        self._go_back(kept, from_step=step)

    def summary(self) -> str:
        """One line for people."""
        wall_s = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda x: -x[1])
        shares = (f"{name.replace('_', ' ')} {s / wall_s:.1%}" for name, s in parts)
        told = ", ".join(t for t in shares if not t.endswith(" 0.0%"))
        restarts, steps = ("s" * (n != 1) for n in (self.restarts, self.lost_steps))
        return (
            f"goodput {goodput(self.seconds):.1%} of {wall_s:,.0f} s since the first start, "
            f"{self.restarts} restart{restarts}, {self.lost_steps:,} step{steps} lost ({told})"
        )

    def _account(self, spent: Mapping[str, float]) -> None:
        """Time since the last call: what the step timer took out by its name, the rest to what goes on."""
        now = self.clock()
        rest = now - self._since
        for name, total in spent.items():
            taken = total - self._spent.get(name, 0.0)
            part = "data_wait" if name == _DATA else name
            self.seconds[part] += taken
            rest -= taken
        self.seconds[self._part] += max(rest, 0.0)
        self._since, self._spent = now, {**self._spent, **spent}

    def _continue(self, run_dir: Path, *, step: int) -> None:
        """Take over the account of the starts before."""
        rows = read_events(self.path)
        if not rows:
            return
        last = rows[-1]
        if step == 0 and last["event"] == "end" and last.get("state") == "done":
            self.path.replace(self.path.with_name("events.previous.jsonl"))  # another run's
            return
        self._rows = rows
        self.restarts, self.lost_steps = last.get("restarts", 0) + 1, last.get("lost_steps", 0)
        self.seconds |= {p: s for p, s in last.get("seconds", {}).items() if p in PARTS}
        beat_s, reached = _last_beat(run_dir)
        self._since = max(self._since, last["unix_s"])  # a second start in one process
        alive_s = min(max(beat_s, last["unix_s"]), self._since)
        self.seconds["trained"] += alive_s - last["unix_s"]
        if last.get("state") != "done":  # else nobody missed it
            self.seconds["down"] += self._since - alive_s
        self._go_back(step, from_step=max(reached, last["step"]))

    def _go_back(self, step: int, *, from_step: int) -> None:
        """Whatever was done since `step` was saved is lost."""
        kept = next((row["seconds"] for row in reversed(self._rows) if row["step"] <= step), {})
        if from_step > step:
            for part in WASTED:
                wasted = self.seconds[part] - kept.get(part, 0.0)
                self.seconds[part] -= wasted
                self.seconds["lost"] += wasted
            self.lost_steps += from_step - step


def _last_beat(run_dir: Path) -> tuple[float, int]:
    """Time and step of rank 0's newest row of times; zeros where there is none."""
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
        text = (run_dir / "logs" / "rank-0.times.jsonl").read_text(encoding="utf-8")
        row = json.loads(text[: text.rindex("\n")].rpartition("\n")[2])
        return float(row["unix_s"]), int(row["step"])
    return 0.0, 0


def process_start_unix_s() -> float:
    """When this process was started; now, where there is no /proc."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
    return time.time()
