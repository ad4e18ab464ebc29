"""Compare the recorded steps of two jobs (equal bits, equal but for rounding, or different), and how fast both are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan.config.schema import JobConfig
from titan.numerics.diff.compare import compare
from titan.numerics.diff.recompute import Record
from titan.numerics.tables import TABLES

AS_THEY_ARE, FLOAT32 = "", "in float32, "
FOLDER = "with the command that goes on, in the new folder, "
VERDICTS = EQUAL, ROUNDED, DIFFERS = ("equal bits", "equal but for rounding", "differs")
_SHOWN = 8


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
        why = f": {self.first}" if self.first else ""
        if self.verdict == ROUNDED:
            why = f" (largest difference: {self.worst:.0%} of the bound)"
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
        saved: differences of what both saved after the last step, in words.
        unclear: why the verdict says nothing, in words; "": it does.
    """

    verdict: str
    precision: str
    compared: int
    left_out: int
    hidden: dict[str, float]
    steps: list[StepProof]
    saved: list[str]
    unclear: str

    @property
    def first(self) -> str:
        """Return the first difference, in words."""
        found = filter(None, (*(step.first for step in self.steps), *self.saved))
        return next(found, "the step was not trained")

    @property
    def may_be_clear(self) -> bool:
        """Return whether float32 may tell what this precision does not."""
        return bool(self.unclear) and self.precision != "float32 (old) and float32 (new)"

    @property
    def passes(self) -> bool:
        """Return whether the jobs are the same."""
        return self.verdict != DIFFERS and not self.unclear

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        lines = [
            "    step  old loss    new loss",
            *map(str, self.steps),
            *self.saved[:_SHOWN],
            f"{self.verdict}: {self.compared:,} tensors in {self.precision}, {self.left_out:,} in one job only",
        ]
        if self.verdict == ROUNDED:
            text = ", ".join(f"{kind} {limit:.0e}" for kind, limit in self.hidden.items())
            lines.append(f"could not be told, relative to a tensor: changes below {text}")
        return lines


def prove(
    old: Record,
    new: Record,
    spread: Record | None = None,
    *,
    is_exact: bool = False,
    rounds: bool = True,
    why: str = "",
) -> Proof:
    """Compare the steps of two jobs, and what they saved at the end.

    Args:
        old: the old job.
        new: the new one.
        spread: the old one once more, disturbed by rounding or as it was. None: the bits have to be equal.
        is_exact: see `compare`.
        rounds: the new job rounds otherwise.
        why: reason for which rounding can hide anything.
    """
    from titan.numerics.diff.saved import compare_steps

    third, third_saved = (spread.recorded, spread.saved) if spread else ((), None)
    steps, findings = [], list[str]()
    for a, b in zip(old.recorded, new.recorded, strict=False):
        found = compare([a], [b], third, exact=is_exact)
        first = str(found.differences[0]) if found.differences else ""
        verdict = DIFFERS if first else ROUNDED if found.worst else EQUAL
        steps.append(StepProof(a.step, a.loss, b.loss, verdict, found.worst, first))
    verdicts = [step.verdict for step in steps] or [DIFFERS]
    if old.saved is not None and new.saved is not None:
        saved = compare_steps(new.saved, old.saved, third_saved, rounds=rounds)
        texts = (f"saved: {text}" for text in (*saved.other, *saved.wrong))
        findings = [text.replace("when computed again", "in the old job") for text in texts]
        verdicts.append(DIFFERS if findings else EQUAL if saved.equal_bits else ROUNDED)
    verdict = max(verdicts, key=VERDICTS.index)
    whole = compare(old.recorded, new.recorded, third, exact=is_exact)
    both = [run.recorded[0].computes_in for run in (old, new) if run.recorded]
    wide = [
        f"{limit:.0%} of {kind}s"
        for kind, limit in whole.limits.items()
        if limit > TABLES["limits"].get(kind, math.inf)
        and (kind != "update" or {*both} != {"float32"})
    ]
    hides = f"rounding may hide {', '.join(wide)}" if wide else ""
    unclear = (why or hides) if verdict == ROUNDED else ""
    return Proof(
        verdict,
        " (old) and ".join(both) + " (new)",
        whole.compared,
        whole.left_out,
        whole.limits,
        steps,
        findings,
        unclear,
    )


def verdict_of(proofs: Mapping[str, Proof], what: str) -> str:
    """Return the result for whoever signs it, in a line.

    Args:
        proofs: of the jobs as they are, perhaps in float32, and of the first step in the new folder, by their names.
        what: what was compared, in words.
    """
    for name, proof in proofs.items():
        if proof.verdict == DIFFERS:
            return f"REFUSED: {name}{proof.first.splitlines()[0]}"
    first = proofs[AS_THEY_ARE]
    decides = proofs.get(FLOAT32, first)
    if decides.unclear:
        return f"CANNOT BE TOLD: {decides.unclear}"
    worst = max(step.worst for step in decides.steps)
    how = f" (largest difference: {worst:.0%} of the bound)" if worst else ""
    if first.unclear:
        what += f"; float32 decides, since in {first.precision} {first.unclear}"
    return f"PASS: {decides.verdict}{how} in {what}; so is the first step in the new folder"


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
