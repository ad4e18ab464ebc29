"""Both jobs of a swap, trained from one checkpoint on the same samples, and compared.

    old, new            the two jobs: the steps are recorded, and the last step is saved whole
    old again           if layout, precision, torch and machine are the same: equal bits mean that nothing rounds otherwise
    disturbed old       otherwise: its distance from the old job is what rounding does

Where modules draw random numbers, as dropout does, and the layouts differ, all of them train without draws (`debug.draws`). If bf16 hides
too much, all of them train once more in float32, and that decides.
"""

from __future__ import annotations

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
from titan.numerics.diff.recompute import Record, recomputation
from titan.numerics.swap.handover import Handover, toml_lines
from titan.numerics.swap.proof import EQUAL, Proof, prove
from titan.numerics.tables import TABLES

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
            speed = median([row["tokens_per_s"] for row in rows] or [0.0])
            found[name] = run.recorded[0].about | {"tokens_per_s": speed}
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
