"""Both jobs of a swap, trained from one checkpoint on the same samples, and compared.

    old, new            the two jobs: the steps are recorded, and the last step is saved whole
    old again           if layout, precision, torch and machine are the same: equal bits mean that nothing rounds otherwise
    disturbed old       otherwise: its distance from the old job is what rounding does

Where modules draw random numbers, as dropout does, and the layouts differ, all of them train without draws (`debug.draws`). If bf16 hides
too much, all of them train once more in float32, and that decides.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from titan.checks.rules import load_to_run
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.numerics.experiment import (
    DIFFERS,
    Proof,
    Records,
    Side,
    computes_alike,
    recomputation,
    record,
    settle,
)
from titan.numerics.tables import TABLES

from .handover import Handover, toml_lines

AS_THEY_ARE, FLOAT32 = "", "in float32, "
FOLDER = "with the command that goes on, in the new folder, "
_PLAIN = 3  # steps without a record, whose time counts
_PRECISION = ("mixed_precision_param", "mixed_precision_reduce")
_SHORT = ("training.steps", "lr_scheduler.total_steps", "phase", "debug.record_steps")


@dataclass
class SwapTrial:
    """Comparison of two jobs.

    Attributes:
        handover: has the folders of the runs.
        old: the old job.
        goes_on: the new one.
        kept: the new job as TOML, with the old values of `changes`: the comparison keeps them.
        changes: changes of what is learned, which --changes names: old and new value by key.
        quiet: keys that turn draws off, once a job turns out to draw.
        steps: steps to compare.
        last: step that both save.
    """

    handover: Handover
    old: Side
    goes_on: Side
    kept: str
    changes: Mapping[str, tuple[Any, Any]]
    quiet: dict[str, Any] = field(default_factory=dict)

    def prove(self, step: int, num_steps: int) -> dict[str, Proof]:
        """Return the comparisons of both jobs by their names.

        Args:
            step: step of the checkpoint that both begin from.
            num_steps: steps to compare.
        """
        handover, config = self.handover, self.old.config
        job = handover.job("new", self.kept)
        compared, _ = load_to_run([job], world_size=self.goes_on.ranks, warn=False)
        self.new = replace(self.goes_on, words=[job], config=compared)
        self.old = replace(self.old, words=[handover.job("old", to_toml(config))])
        self.start = handover.copy(step, self.goes_on.config.checkpoint.folder)
        end = min(step + num_steps, config.training.steps)
        self.steps = range(step + 1, end + 1)
        self.last = min(end + _PLAIN, config.training.steps)
        self.span = f"steps {step + 1:,} to {end:,}"
        proofs = {AS_THEY_ARE: (proof := self.compare({}))}
        # Float32 may tell what the precision of the jobs does not.
        if proof.unclear and proof.precision != "float32 (old) and float32 (new)":
            proofs[FLOAT32] = proof = self.compare(TABLES["float32"])
        if proof.passes:
            proofs[FOLDER] = self.compare_first()
        return proofs

    def compare(self, keys: dict[str, Any]) -> Proof:
        """Train both jobs with some keys, and compare them."""
        one, two = self._trained("old", self.old, keys), self._trained("new", self.new, keys)
        # A record has the precision itself.
        alike = computes_alike(
            self.old.config, self.new.config, but=["training.mixed_precision_param"]
        )
        is_same = alike and _facts(one) == _facts(two)
        draws = any(step.about["draws"] for step in (*one.recorded, *two.recorded))
        rounds = self.old.config.any_optimizer.stochastic_rounding
        if (draws or rounds) and not is_same and not self.quiet:
            self.quiet = {"debug.draws": False}
            if rounds:
                self.quiet["optimizer.stochastic_rounding"] = False
            return self.compare(keys)
        name, why = "old again", ""
        if not is_same:
            name, keys = "disturbed old", _disturbance(self.new.config) | keys
            why = "the model draws random numbers outside of modules" if draws else ""
        again = partial(self._trained, name, self.old, keys)
        return settle(one, two, again, is_same=is_same, why=why)

    @property
    def left_out(self) -> list[str]:
        """Describe the parts that are not compared."""
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
            speed = median([row["tokens_per_s"] for row in rows] or [0.0])
            found[name] = run.recorded[0].about | {"tokens_per_s": speed}
        return found

    def compare_first(self) -> Proof:
        """Compare the first step of the new job with the same step, trained in a copy of the new folder by the command that goes on."""
        # With --changes, the comparison keeps the old values.
        words = self.new.words if self.changes else self.goes_on.words
        side, step = replace(self.new, words=words), self.steps[0]
        keys = recomputation(side, base=None, step=step, record=[step])
        keys = {key: keys[key] for key in _SHORT if key in keys} | self.quiet

        def trained(name: str) -> Records:
            what = f"{name}, step {step:,} in the new folder"
            return Records(self._folder(name, side, what, keys, copied=True), None)

        on, first = trained("going on"), self._trained("new", self.new, {})
        return settle(on, first, partial(trained, "going on again"), is_same=True)

    def _trained(self, name: str, side: Side, more: Mapping[str, Any]) -> Records:
        """Return the records of a job, with the keys `more`."""
        keys = recomputation(
            side, base=self.start, step=self.last, saves=True, record=[*self.steps]
        )
        keys |= {"validation.enable": False, **more, **self.quiet}
        is_exact = TABLES["float32"].items() <= more.items()
        full = f"{name}{' in float32' * is_exact}{' without draws' * bool(self.quiet)}"
        folder = self._folder(full, side, f"{self.span} of the {full} job", keys)
        return Records(folder, folder / f"checkpoint/step-{self.last}")

    def _folder(
        self, name: str, side: Side, what: str, keys: Mapping[str, Any], *, copied: bool = False
    ) -> Path:
        """Return the run folder of a job, which is trained unless a killed command has done so.

        Args:
            name: name of the folder.
            side: the job.
            what: the job in words.
            keys: keys that replace those of its words.
            copied: whether the run goes on in a copy of the new run folder.
        """

        def make(place: Path) -> None:
            if copied:
                shutil.copytree(self.handover.run, place)
            # A file, since a command line has no tables.
            overlay = self.handover.job("keys", toml_lines(keys))
            words = [word for word in side.words if word[2:].partition("=")[0] not in keys]
            record(replace(side, words=[*words, overlay]), place, what=what)

        return self.handover.part(name, make)


def _facts(run: Records) -> tuple[object, ...]:
    """Return the facts that decide how a run rounds, except its job."""
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
