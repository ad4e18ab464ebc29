"""Compare the recorded steps of two jobs (equal bits, equal but for rounding, or different), and how fast both are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from titan.config.schema import JobConfig
from titan.numerics.diff.compare import compare
from titan.numerics.recorded import RecordedStep
from titan.observe.rows import read_rows

VERDICTS = EQUAL, ROUNDED, DIFFERS = ("equal bits", "equal but for rounding", "differs")


@dataclass(frozen=True)
class StepProof:
    """Comparison of a step.

    Attributes:
        step: its number.
        old_loss: loss of the old job.
        new_loss: loss of the new one.
        verdict: one of `VERDICTS`.
        worst: the largest difference of tensors that are equal, as a share of what rounding may make.
        first: the first tensor that differs, in words.
    """

    step: int
    old_loss: float
    new_loss: float
    verdict: str
    worst: float
    first: str

    def __str__(self) -> str:
        why = (
            f" (largest difference: {self.worst:.0%} of the bound)"
            if self.verdict == ROUNDED
            else ""
        )
        why = f": {self.first}" if self.first else why
        return f"{self.step:>8,}  {self.old_loss:<10.7g}  {self.new_loss:<10.7g}  {self.verdict}{why}"


@dataclass(frozen=True)
class Proof:
    """Comparison of all steps.

    Attributes:
        verdict: the worst of them.
        precision: dtypes that the jobs compute in.
        compared: number of tensors that both recorded.
        left_out: number of those that one of them did.
        hidden: for each kind of tensor, the largest relative change that rounding may hide.
        steps: the steps.
    """

    verdict: str
    precision: str
    compared: int
    left_out: int
    hidden: dict[str, float]
    steps: list[StepProof]

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        what = (
            f"{self.compared:,} tensors in {self.precision}, {self.left_out:,} in one job only"
        )
        lines = [
            "    step  old loss    new loss",
            *map(str, self.steps),
            f"{self.verdict}: {what}",
        ]
        if self.verdict == ROUNDED:
            text = ", ".join(f"{kind} {limit:.0e}" for kind, limit in self.hidden.items())
            lines.append(f"could not be told, relative to a tensor: changes below {text}")
        return lines


def prove(
    old: Sequence[RecordedStep], new: Sequence[RecordedStep], spread: Sequence[RecordedStep]
) -> Proof:
    """Compare the steps of two jobs.

    Args:
        old: recorded steps of the old job.
        new: those of the new one.
        spread: those of the old one, disturbed by rounding. Empty: the bits have to be equal.
    """
    steps = []
    for a, b in zip(old, new, strict=True):
        found = compare([a], [b], spread)
        first = str(found.differences[0]) if found.differences else ""
        verdict = DIFFERS if first else ROUNDED if found.worst else EQUAL
        steps.append(StepProof(a.step, a.loss, b.loss, verdict, found.worst, first))
    worst = max((step.verdict for step in steps), key=VERDICTS.index)
    whole = compare(old, new, spread)
    precision = f"{old[0].computes_in} (old) and {new[0].computes_in} (new)"
    return Proof(worst, precision, whole.compared, whole.left_out, whole.limits, steps)


def speed(run: Path, *, after: int) -> dict[str, float]:
    """Return the median tokens/s, and GiB of a rank, in a run's steps after one."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] > after]
    names = ("tokens_per_s", "memory_gib") if rows else ()
    return {name: median(row[name] for row in rows) for name in names}


def predict(config: JobConfig, ranks: int) -> dict[str, Any]:
    """Return what the simulator says about a job on this machine: its figures, or why there are none."""
    from titan.sim.record.trace_jobs import TraceError
    from titan.sim.search.auto import profile_here
    from titan.sim.simulate import HardwareError, facts, simulate

    profile = profile_here(config, ranks)
    try:
        found = facts(simulate(config, world_size=ranks, profile=profile))
    except (HardwareError, TraceError) as error:
        return {"why_not": str(error)}
    speeds = {"tokens_per_s": found["tokens_per_s_per_gpu"], **found["interval"]}
    speeds = {name: speeds[name] * ranks for name in ("tokens_per_s", "low", "high")}
    return speeds | {"hardware": profile.name, "memory_gib": found["memory"]["needed_gib"]}
