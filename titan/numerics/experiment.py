"""Two jobs trained for some steps, and their records compared, for `titan diff`, `titan audit` and `titan swap`.

    Side            a job, its ranks and its environment
    open_run        opens the job of a run folder, with the permissions that it has
    recomputation   the keys with which a side computes the steps of a run again
    record          trains a side in a run folder, and returns its Records: rows, recorded steps, the step that it saved
    compare         says whether the records of two sides are equal, with a third run that tells what rounding does
    settle          trains that third run if the bits of the first two differ

`titan certify` needs whole gradients, so its sides stay in memory, on the gloo ranks of certify/ranks.py. Which settings of two sides may
differ says titan/checkpoint/free_keys.toml alone.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.base.rows import Row
from titan.base.run_folder import CONFIG, RunFolder
from titan.base.signals import child_environment
from titan.base.untrusted import InputError
from titan.checkpoint.identity import differing, freedom, job_facts, read_metadata, settings
from titan.checkpoint.manifest import find_damage, list_steps
from titan.checkpoint.storage import Location, as_location, join
from titan.checks.rules import check_to_run, load_to_run, resolve_layout
from titan.config.errors import ConfigError
from titan.config.keys import field_at
from titan.config.load import load_config, print_warnings
from titan.config.permissions import Loss, permission_of, without_permissions
from titan.config.phases import phases_of
from titan.config.schema import JobConfig
from titan.data.tokenizer_files import with_tokenizer
from titan.numerics.diff.compare import compare as compare_steps

from .recorded import FOLDER, read_steps
from .tables import TABLES

VERDICTS = EQUAL, ROUNDED, DIFFERS = ("equal bits", "equal but for rounding", "differs")
AGAIN_ROUNDED = " again with rounding noise, to measure what is normal"
_SHOWN = 8
_REPLACED = ("job.dump_folder", "metrics.enable_wandb")


def computes_alike(a: JobConfig, b: JobConfig, *, but: Collection[str] = ()) -> bool:
    """Return whether two jobs compute the same bits on the same machine: free_keys.toml lets all settings that differ do so.

    Args:
        a: a job.
        b: another one.
        but: settings that may differ in any case.
    """
    found = differing(settings(a), settings(b)).keys() - but
    return job_facts(a) == job_facts(b) and all(freedom(key) == "same" for key in found)


# ---- a side, and its records ----------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A job, and where it is trained.

    Attributes:
        words: its files and keys.
        config: the job.
        ranks: its ranks.
        python: interpreter of its environment.
    """

    words: Sequence[str]
    config: JobConfig
    ranks: int
    python: str = sys.executable

    def check(self, folder: Path) -> None:
        """Raise ConfigError if the job cannot run on its ranks in a run folder."""
        words = [*self.words, f"--job.dump_folder={folder}"]
        load_to_run(words, world_size=self.ranks, warn=False)


@dataclass(frozen=True)
class Facts:
    """Part of environment.json. Runs of a job with the same facts give the same bits."""

    world_size: int = 1
    titan: str = ""
    git: dict[str, Any] | None = None
    torch: str = ""
    platform: str = ""
    hostname: str = ""
    device_names: list[str] = field(default_factory=list)


@dataclass
class Records:
    """Records of a run: rows and recorded steps, and the checkpoint of its last step.

    Attributes:
        folder: run folder.
        saved: the checkpoint, if there is one.
    """

    folder: Path
    saved: Location | None

    def __post_init__(self) -> None:
        run = RunFolder(self.folder)
        rows = run.rows()
        self.rows: dict[int, Row] = {row["step"]: row for row in rows}
        times = Counter(row["step"] for row in rows)
        self.repeated = {step for step in times if times[step] > 1}
        has_steps = any((self.folder / FOLDER).glob("step-*.json"))
        self.recorded = read_steps(self.folder) if has_steps else []
        self.facts = run.facts(Facts)


def record(side: Side, folder: Path, *, what: str, saves: int | None = None) -> Records:
    """Train a side, and return its records.

    Args:
        side: the side.
        folder: its run folder.
        what: the job in words.
        saves: step that it saves. None: none that is compared.
    """
    words = [*side.words, f"--job.dump_folder={folder}"]
    train(words, ranks=side.ranks, what=what, python=side.python)
    return Records(folder, None if saves is None else folder / f"checkpoint/step-{saves}")


def train(job: Sequence[str], *, ranks: int, what: str, python: str) -> None:
    """Train a job on ranks of this machine, and print one line.

    Args:
        job: files and keys.
        ranks: number of ranks.
        what: the job in words.
        python: interpreter of the environment to train in.

    Raises:
        InputError: the run failed.
    """
    print(f"training {what} on {ranks} rank{'s'[: ranks != 1]}", file=sys.stderr, flush=True)
    command = [python, "-m", "titan.cli", "train", *job, f"--nproc={ranks}", "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise InputError(f"the run of {what} failed: {' / '.join(lines[-3:])}")


# ---- steps computed again --------------------------------------------------------------------------


def recomputation(
    side: Side,
    *,
    base: Location | None,
    step: int,
    record: Sequence[int],
    saves: bool = False,
) -> dict[str, Any]:
    """Return the keys that make a job compute again the steps up to one, and their values.

    Args:
        side: the job, on the ranks of its run.
        base: checkpoint to begin from. None: from the start.
        step: the last step.
        record: steps to record.
        saves: whether to save that step.
    """
    config = side.config
    changes: dict[str, Any] = {
        **TABLES["records"],
        **TABLES["recomputed"],
        "training.steps": step,
        # That of the run, on any number of ranks.
        "training.global_batch_size": sequences_of(config, side.ranks),
        "lr_scheduler.total_steps": config.lr_scheduler.total_steps or config.training.steps,
        "checkpoint.enable": base is not None or saves,
        "checkpoint.interval": step,
        "debug.record_steps": [*record],
    }
    if config.phase:
        _, *later = phases_of(config, world_size=side.ranks)
        changes["phase"] = [
            table.model_dump(exclude_none=True) | {"global_batch_size": phase.sequences}
            for table, phase in zip(config.phase, later, strict=False)
            if phase.first_step <= step
        ]
    if getattr(config, "evaluation", None):
        changes["evaluation"] = []
    if base is not None:
        changes |= {"checkpoint.initial_load_path": str(base), **TABLES["loaded"]}
    return changes


def sequences_of(config: JobConfig, world_size: int) -> int:
    """Return the sequences of a step."""
    layout = resolve_layout(config, world_size)
    return layout.dp * layout.accumulation * config.training.local_batch_size


def ranks_of(config: JobConfig, world_size: int) -> int:
    """Return the least number of ranks, from a run's own on, that the layout of a job fits."""
    for ranks in range(world_size, 8 * world_size + 64):
        with suppress(ConfigError):
            check_to_run(config, world_size=ranks)
            return ranks
    return world_size


# ---- the job of a run folder ----------------------------------------------------------------------


def open_run(
    run: Path, keys: Sequence[str]
) -> tuple[JobConfig, dict[int, Location], dict[str, Loss]]:
    """Return the job of a run folder, its checkpoints by step, and the keys that the job lost.

    Args:
        run: run folder.
        keys: "--section.key=value"; those that are permissions hold for the run's job.

    Raises:
        InputError: the folder is no run.
        ConfigError: the checkpoints are elsewhere, and no key permits that.
    """
    if not (run / CONFIG).is_file():
        raise InputError(f"{run} is no run folder: it has no {CONFIG}")
    granted = _granted(keys)
    config = load_config(run / CONFIG, overrides=granted.values())
    config = with_tokenizer(config, run=run)  # its copy
    config, lost = without_permissions(
        config, run=run, granted=[*granted, *_REPLACED], takes_keys=True
    )
    if "checkpoint.folder" in lost:  # only a part of what is asked later, which may need it
        raise ConfigError([lost["checkpoint.folder"].problem])
    named = config.checkpoint.folder
    folder = as_location(named) if "://" in named else run / named
    return config, {n: join(folder, f"step-{n}") for n in list_steps(folder)}, lost


def _granted(keys: Sequence[str]) -> dict[str, str]:
    """Return those of the command line's `--key=value` that are permissions, by key."""
    granted = {}
    for key in keys:
        name = key.lstrip("-").partition("=")[0]
        field = field_at(tuple(name.split(".")))
        if field and permission_of(field):
            granted[name] = key
    return granted


def require_permissions(lost: dict[str, Loss], config: JobConfig, *, has_base: bool) -> None:
    """Print the keys that a job lost and that only say where files are written.

    Args:
        lost: the keys. Those that nothing reads are taken out.
        config: the job.
        has_base: whether it begins from one of the run's own checkpoints.

    Raises:
        ConfigError: without another key, the job would compute something else.
    """
    if has_base:
        lost.pop("checkpoint.initial_load_path", None)
    if config.tokenizer.path and (has_base or not config.checkpoint.initial_load_in_hf):
        lost.pop("model.hf_assets_path", None)  # nothing is read there
    if needed := [loss.problem for loss in lost.values() if loss.permission.to != "write"]:
        raise ConfigError(needed)
    print_warnings(str(loss.problem) for loss in lost.values())


def newest_start(saved: Mapping[int, Location], *, before: int) -> int | None:
    """Return the newest step before another one that a run can continue from."""
    for step in sorted(saved, reverse=True):
        path = saved[step]
        if step < before and not (find_damage(path) or read_metadata(path).get("model_only")):
            return step
    return None


# ---- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepProof:
    """Comparison of a step.

    Attributes:
        step: its number.
        old_loss: loss of the reference.
        new_loss: loss of the other side.
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


def compare(
    old: Records,
    new: Records,
    spread: Records | None = None,
    *,
    is_exact: bool = False,
    rounds: bool = True,
    why: str = "",
) -> Proof:
    """Compare the steps of two sides, and what they saved at the end.

    Args:
        old: records of the reference.
        new: those of the other side.
        spread: the reference once more, disturbed by rounding or as it was. None: the bits have to be equal.
        is_exact: nothing rounds otherwise, so any difference is one.
        rounds: the new side rounds otherwise.
        why: reason for which rounding can hide anything.
    """
    from titan.numerics.diff.saved import compare_steps as compare_saved

    third, third_saved = (spread.recorded, spread.saved) if spread else ((), None)
    steps = []
    for a, b in zip(old.recorded, new.recorded, strict=False):
        found = compare_steps([a], [b], third, exact=is_exact)
        first = str(found.differences[0]) if found.differences else ""
        verdict = DIFFERS if first else ROUNDED if found.worst else EQUAL
        steps.append(StepProof(a.step, a.loss, b.loss, verdict, found.worst, first))
    verdicts, texts = [step.verdict for step in steps] or [DIFFERS], list[str]()
    if old.saved is not None and new.saved is not None:
        saved = compare_saved(new.saved, old.saved, third_saved, rounds=rounds)
        texts = [f"saved: {text}" for text in (*saved.other, *saved.wrong)]
        verdicts.append(DIFFERS if texts else EQUAL if saved.equal_bits else ROUNDED)
    verdict = max(verdicts, key=VERDICTS.index)
    whole = compare_steps(old.recorded, new.recorded, third, exact=is_exact)
    dtypes = [run.recorded[0].computes_in for run in (old, new) if run.recorded]
    limits = TABLES["limits"]
    wide = [
        f"{limit:.0%} of {kind}s"
        for kind, limit in whole.limits.items()
        if limit > limits.get(kind, math.inf) and (kind != "update" or {*dtypes} != {"float32"})
    ]
    hides = f"rounding may hide {', '.join(wide)}" if wide else ""
    return Proof(
        verdict,
        " (old) and ".join(dtypes) + " (new)",
        whole.compared,
        whole.left_out,
        whole.limits,
        steps,
        [text.replace("when computed again", "in the old job") for text in texts],
        (why or hides) if verdict == ROUNDED else "",
    )


def settle(
    one: Records, two: Records, again: Callable[[], Records], *, is_same: bool, why: str = ""
) -> Proof:
    """Compare two runs, with a third one if they have other bits.

    Args:
        one: the reference.
        two: the other run.
        again: trains the reference once more.
        is_same: nothing in the two rounds otherwise, so the third run is as the first, and shows whether the machine repeats its bits.
        why: reason why the comparison can tell equal bits only.
    """
    proof = compare(one, two)
    if proof.verdict == EQUAL:
        return proof
    third = again()
    is_exact = is_same and compare(one, third).verdict == EQUAL
    return compare(one, two, third, is_exact=is_exact, rounds=not is_same, why=why)
