"""Both jobs of a swap, trained from one checkpoint on the same samples, and compared.

    old, new            the two jobs: the steps are recorded, and the last step is saved whole
    old again           if layout, precision, torch and machine are the same: equal bits mean that nothing rounds otherwise
    disturbed old       otherwise: its distance from the old job is what rounding does

Where modules draw random numbers, as dropout does, and the layouts differ, all of them train without draws (`debug.draws`). If bf16 hides
too much, all of them train once more in float32, and that decides.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from titan.checkpoint.identity import differing, freedom, settings
from titan.config.schema import JobConfig
from titan.numerics.diff.command import train
from titan.numerics.diff.compare import compare
from titan.numerics.diff.recompute import Record, recomputation
from titan.numerics.swap.handover import Handover, toml_lines
from titan.numerics.tables import TABLES

AS_THEY_ARE, FLOAT32 = "", "in float32, "
FOLDER = "with the command that goes on, in the new folder, "
VERDICTS = EQUAL, ROUNDED, DIFFERS = ("equal bits", "equal but for rounding", "differs")
_SHOWN = 8
_PLAIN = 3  # steps without a record, whose time counts
_PRECISION = ("mixed_precision_param", "mixed_precision_reduce")
_SHORT = ("training.steps", "lr_scheduler.total_steps", "phase", "debug.record_steps")


@dataclass(frozen=True)
class Side:
    """One of the two jobs.

    Attributes:
        words: its files and keys.
        config: the job.
        ranks: its ranks.
        python: interpreter of its environment.
    """

    words: list[str]
    config: JobConfig
    ranks: int
    python: str


@dataclass
class Experiment:
    """Comparison of two jobs.

    Attributes:
        handover: has the folders of the runs.
        start: the checkpoint.
        steps: steps to compare.
        old: the old job.
        new: the new one, with the settings that the comparison keeps.
        quiet: keys that turn draws off, once a job turns out to draw.
    """

    handover: Handover
    start: Path
    steps: range
    old: Side
    new: Side
    quiet: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Return the step that both save."""
        return min(self.steps[-1] + _PLAIN, self.old.config.training.steps)

    def prove(self, words: list[str]) -> dict[str, Proof]:
        """Return the comparisons of both jobs by their names.

        Args:
            words: files and keys of the command that goes on.
        """
        proofs = {AS_THEY_ARE: (proof := self.compare())}
        # Float32 may tell what the precision of the jobs does not.
        if proof.unclear and proof.precision != "float32 (old) and float32 (new)":
            proofs[FLOAT32] = proof = self.compare(exact=True)
        if proof.passes:
            proofs[FOLDER] = self.compare_first(words)
        return proofs

    def compare(self, *, exact: bool = False) -> Proof:
        """Train both jobs, `exact` in float32, and compare them."""
        keys = TABLES["float32"] if exact else {}
        one, two = self._trained("old", self.old, keys), self._trained("new", self.new, keys)
        others = differing(settings(self.old.config), settings(self.new.config))
        others.pop("training.mixed_precision_param", None)  # a record has the precision itself
        is_same = {*map(freedom, others)} <= {"same"} and _facts(one) == _facts(two)
        draws = any(step.about["draws"] for step in (*one.recorded, *two.recorded))
        rounds = getattr(self.old.config.optimizer, "stochastic_rounding", False)
        if (draws or rounds) and not is_same and not self.quiet:
            self.quiet = {"debug.draws": False}
            if rounds:
                self.quiet["optimizer.stochastic_rounding"] = False
            return self.compare(exact=exact)
        name, why = "old again", ""
        if not is_same:
            name, keys = "disturbed old", _disturbance(self.new.config) | keys
            why = "the model draws random numbers outside of modules" if draws else ""
        again = partial(self._trained, name, self.old, keys)
        return settle(one, two, again, is_same=is_same, why=why)

    @property
    def what(self) -> str:
        """Return the steps that are compared, in words."""
        return f"steps {self.steps[0]:,} to {self.steps[-1]:,}, and what is saved after step {self.last:,}"

    @property
    def left_out(self) -> list[str]:
        """Return what is not compared, in words."""
        found = [f"steps after {self.last:,}", "validation", "the saves of the new job"]
        old = self._trained("old", self.old, {})
        if max(step.grad_norm for step in old.recorded) <= self.old.config.training.max_norm:
            found.append("clipping: no gradient was longer than training.max_norm")
        if self.quiet:
            found.append("what modules draw, such as dropout: both jobs computed without it")
        return found

    def figures(self) -> dict[str, Any]:
        """Return versions and speed of both jobs. A speed of 0 is not known."""
        found = {}
        for name, side in (("old", self.old), ("new", self.new)):
            run = self._trained(name, side, {})
            rows = [row for step, row in run.rows.items() if step > self.steps[-1]]
            found[name] = dict(run.recorded[0].about)
            found[name]["tokens_per_s"] = median([r["tokens_per_s"] for r in rows] or [0.0])
        return found

    def compare_first(self, words: list[str]) -> Proof:
        """Compare the first step of the new job with the same step, trained in a copy of the new folder by the command that goes on.

        Args:
            words: files and keys of the command.
        """
        new, step = self.new, self.steps[0]
        keys = recomputation(
            new.config, world_size=new.ranks, base=None, step=step, record=[step]
        )
        keys = {key: keys[key] for key in _SHORT if key in keys} | self.quiet

        def trained(name: str) -> Record:
            what = f"{name}, step {step:,} in the new folder"
            folder = self._folder(name, new, words, what, keys, begun=self.handover.run)
            return Record(folder, None)

        on, first = trained("going on"), self._trained("new", new, {})
        return settle(on, first, partial(trained, "going on again"), is_same=True)

    def _trained(self, name: str, side: Side, more: Mapping[str, Any]) -> Record:
        """Return the records of a job, which is trained unless a killed command has done so."""
        keys = recomputation(
            side.config,
            world_size=side.ranks,
            base=self.start,
            step=self.last,
            saves=True,
            record=[*self.steps],
        )
        keys |= {"validation.enable": False, **more, **self.quiet}
        is_exact = TABLES["float32"].items() <= more.items()
        full = f"{name}{' in float32' * is_exact}{' without draws' * bool(self.quiet)}"
        what = f"steps {self.steps[0]:,} to {self.steps[-1]:,} of the {full} job"

        folder = self._folder(full, side, side.words, what, keys)
        return Record(folder, folder / "checkpoint" / f"step-{self.last}")

    def _folder(
        self,
        name: str,
        side: Side,
        words: list[str],
        what: str,
        keys: Mapping[str, Any],
        *,
        begun: Path | None = None,
    ) -> Path:
        """Return the run folder of a job, which is trained unless a killed command has done so.

        Args:
            name: name of the folder.
            side: its environment and ranks.
            words: its files and keys.
            what: the job in words.
            keys: keys that replace those of the words.
            begun: a run folder that the run goes on in a copy of.
        """

        def make(place: Path) -> None:
            if begun is not None:
                shutil.copytree(begun, place)
            lines = {**keys, "job.dump_folder": str(place)}
            # A file, since a command line has no tables.
            overlay = self.handover.job("keys", toml_lines(lines))
            kept = [word for word in words if word[2:].partition("=")[0] not in lines]
            train([*kept, overlay], ranks=side.ranks, what=what, python=side.python)

        return self.handover.part(name, make)


def settle(
    one: Record, two: Record, again: Callable[[], Record], *, is_same: bool, why: str = ""
) -> Proof:
    """Compare two runs, with a third one if they have other bits.

    Args:
        one: the reference.
        two: the other run.
        again: trains the reference once more.
        is_same: nothing in the two rounds otherwise, so the third run is as the first, and shows whether the machine repeats its bits.
        why: reason for which the comparison can tell nothing, but for equal bits.
    """
    proof = prove(one, two)
    if proof.verdict == EQUAL:
        return proof
    third = again()
    is_exact = is_same and prove(one, third).verdict == EQUAL
    return prove(one, two, third, is_exact=is_exact, rounds=not is_same, why=why)


def _facts(run: Record) -> tuple[Any, ...]:
    """Return what decides how a run rounds, but for its job."""
    step = run.recorded[0]
    return step.about["torch"], step.about["host"], step.computes_in, step.axes


def _disturbance(new: JobConfig) -> dict[str, Any]:
    """Return keys that disturb the old job by rounding, in the new job's precision if that is below float32."""
    keys: dict[str, Any] = {"debug.record_perturbed": 1}
    if new.training.mixed_precision_param != "float32":
        keys |= {f"training.{name}": getattr(new.training, name) for name in _PRECISION}
    if new.model.converters:
        keys["model.converters"] = new.model.converters
        keys["quantize"] = new.quantize.model_dump(exclude_none=True)
    return keys


# ---- what the steps say -----------------------------------------------------------------------------


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
