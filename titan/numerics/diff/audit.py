"""Command `titan audit RUN --step N`: a step of a run, computed again from the checkpoint before it, and compared with its records.

The same job on the same machine gives the same bits. In another layout, or elsewhere, a second recomputation with
`debug.record_perturbed` measures what rounding does. So hardware that computes wrongly is found by other hardware, or by another
order of the same sums, though it may repeat its own fault.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from titan.base.rows import number
from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError
from titan.checkpoint.manifest import find_damage
from titan.config.base import LIMIT
from titan.config.load import load_config, load_from_argv
from titan.config.options import put_json
from titan.config.render import to_toml
from titan.numerics.certify.shrink import changed
from titan.numerics.experiment import (
    AGAIN_ROUNDED,
    Records,
    Side,
    computes_alike,
    newest_start,
    open_run,
    ranks_of,
    recomputation,
    record,
    require_permissions,
)
from titan.numerics.tables import TABLES, parser_of
from titan.observe.columns import COLUMNS

from .compare import BEYOND, UNIT, apart, compare, shown, values

if TYPE_CHECKING:
    from .saved import SavedTensor

_CLOCKS = ("throughput/", "memory/")
_COLUMNS, _OTHERS = TABLES["columns"], TABLES["uncompared"]["columns"]
# A wrong update moves the next loss by less than this share, and other samples by more.
_OTHER_SAMPLES = 1e-3
_FEW = 8  # wrong values of a tensor


@dataclass
class Audit:
    """Result of an audit.

    Attributes:
        step: the step.
        since: step of the checkpoint that the recomputation began from; 0: from the start.
        is_same: whether layout and machine are those of the run.
        rows: number of rows of metrics that were compared.
        tensors: number of tensors of the checkpoint that were compared.
        equal_bits: whether everything has the same bits.
        findings: differences beyond rounding.
        guilty: what is wrong, in words. "": nothing.
        limits: for each kind of tensor, the largest change that may be rounding.
        due: steps that have a row of metrics, as far as the run's job tells.
        starts: steps from which the run was started again.
        documents: rows and lines of documents.json, if they were asked for.
    """

    step: int
    since: int = 0
    is_same: bool = False
    rows: int = 0
    tensors: int = 0
    equal_bits: bool = True
    findings: list[str] = field(default_factory=list)
    guilty: str = ""
    limits: dict[str, float] = field(default_factory=dict)
    due: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)

    def base_after(self, step: int) -> str:
        """Return the checkpoint after a step as another cause, if the recomputation began with it."""
        text = f", or the checkpoint of step {step}, from which it was computed again"
        return text if 0 < step == self.since else ""

    def blame(self, text: str, *findings: str) -> None:
        """Keep differences, and what is wrong, if nothing that comes earlier is."""
        self.equal_bits &= not findings
        self.findings += findings
        self.guilty = self.guilty or text

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        where = (
            "same layout and machine" if self.is_same else "another layout, machine or start"
        )
        what = f"steps {self.since + 1} to {self.step} computed again ({where}): {self.rows} rows of metrics"
        what += f", {self.tensors} tensors of the checkpoint" if self.tensors else ""
        if self.equal_bits:
            return [f"equal bits: {what}"]
        lines = [f"{'differs' if self.findings else 'equal but for rounding'}: {what}"]
        lines += shown(self.findings)
        lines += [f"guilty: {self.guilty}"] * bool(self.guilty)
        limits = [f"{kind} {limit:.1e}" for kind, limit in self.limits.items() if limit]
        return lines + [f"smaller changes may be rounding: {', '.join(limits)}"] * bool(limits)


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the records of the run are equal but for rounding, else 1."""
    options, keys = parser_of("audit").parse_known_args(argv)
    keys += ["--model.trust_remote_code=true"] * options.trust_remote_code
    if options.rows or options.against:
        return show_rows(options, keys)
    found = audit(options.run, options.step, keys=keys, nproc=options.nproc)
    if not put_json(asdict(found), options.json):
        print("\n".join(found.lines()))
    return int(bool(found.findings))


def show_rows(options: Namespace, keys: Sequence[str]) -> int:
    """Print the documents of a step, and those of a quiet step beside it. Return 0."""
    found = {}
    for n in filter(None, (options.step, options.against)):
        again = audit(options.run, n, keys=keys, nproc=options.nproc, rows=True)
        found[n] = again.documents
    if not put_json(found, options.json):
        print(*(line for of in found.values() for line in of["lines"]), sep="\n")
    return 0


def audit(
    run: Path,
    step: int,
    *,
    keys: Sequence[str] = (),
    nproc: int | None = None,
    rows: bool = False,
) -> Audit:
    """Compute a step of a run again, and compare.

    Args:
        run: run folder.
        step: the step.
        keys: "--section.key=value", such as another layout, or a permission that the run's job needs.
        nproc: ranks. None: those of the run, or the next larger number that the layout fits.
        rows: measure the step's documents, and compare nothing. Without a checkpoint before the step, the newest one serves.

    Raises:
        InputError: the folder is no run, or has no records of the step.
        ConfigError: the run's job needs permissions that the keys do not give.
    """
    config, saved, lost = open_run(run, keys)
    written = RunFolder(run).config
    given = load_from_argv([str(written), *keys], warn=False)
    # It says where the run's checkpoints are. Those of the recomputation are elsewhere.
    keys = [key for key in keys if not key.startswith("--checkpoint.folder=")]
    original = Records(run, saved.get(step))
    # A step whose documents are asked for needs no record: a run that stops at a loss of NaN has none of that step.
    if step not in {*original.rows, *saved} and not (rows and step <= config.training.steps):
        raise InputError(f"{run} has neither a row of metrics nor a checkpoint of step {step}")
    base = newest_start(saved, before=step)
    if rows and base is None and not config.phase:
        base = newest_start(saved, before=LIMIT)
    require_permissions(lost, config, has_base=base is not None)
    # The job and the facts of a run folder are those of its last start.
    events = RunFolder(run).events()
    starts = [int(number(e.get("step")) or 0) for e in events if e["event"] == "resume"]
    since = base or 0
    last = max(step, since + 1)
    found = Audit(step, since=since, starts=starts)
    if all(start <= since for start in starts):
        found.due = [1, config.training.steps, *range(0, step + 1, config.metrics.log_freq)]
    size, saves = original.facts.world_size, None if original.saved is None else step
    changes = recomputation(
        Side([], config, size),
        base=None if base is None else saved[base],
        step=last,
        record=[each.step for each in original.recorded if each.step <= step],
        saves=saves is not None,
    )
    changes["debug.document_losses"] = step if rows else 0
    what = f"steps {since + 1} to {last} of {run}"
    with tempfile.TemporaryDirectory(prefix="titan-audit-") as place:
        job = Path(place, "job.toml")
        job.write_text(to_toml(changed(config, changes)), encoding="utf-8")
        asked = load_from_argv([str(job), *keys], warn=False)
        side = Side([str(job), *keys], asked, nproc or ranks_of(asked, size))
        folder = Path(place, "first")
        side.check(folder)
        if rows:
            found.documents = _documents(side, folder, what)
            return found
        first = record(side, folder, what=what, saves=saves)
        found.is_same = (
            computes_alike(load_config(written), given)
            and all(n < step for n in starts)
            and first.facts == original.facts
        )
        _compare(found, original, first, None)
        if found.equal_bits:
            return found
        if not found.is_same:
            steps = [*range(since + 1, step + 1)]
            moved = (f"--debug.record_steps={steps}", "--debug.record_perturbed=1")
            side = replace(side, words=[*side.words, *moved])
        what += " once more" if found.is_same else AGAIN_ROUNDED
        again = record(side, Path(place, "again"), what=what, saves=saves)
        found = replace(found, findings=[], guilty="", equal_bits=False)
        _compare(found, original, first, again)
    return found


def _documents(side: Side, folder: Path, what: str) -> dict[str, Any]:
    """Train a side up to a step whose documents are measured, and return them."""
    file = folder / "documents.json"
    try:
        record(side, folder, what=what)
    except InputError:
        # The step may stop this run, too, as with a loss of NaN. They were measured before it.
        if not file.exists():
            raise
    return json.loads(file.read_text(), parse_constant=lambda _: None)


def _compare(found: Audit, original: Records, first: Records, again: Records | None) -> None:
    """Compare the records of a run with those of its recomputation.

    Args:
        found: gets the result.
        original: records of the run.
        first: those of the recomputation.
        again: those of a second one, whose distance from the first is what rounding does. None: only look for other bits.
    """
    if original.saved is not None and (damages := find_damage(original.saved)):
        texts = (f"{original.saved}: {damage}" for damage in damages)
        found.blame("the files of the checkpoint: they changed after they were saved", *texts)
    if original.recorded and again is not None:
        runs = (record.recorded for record in (first, original, again))
        if differences := compare(*runs).differences:
            worst = differences[0]
            named = f"the {worst.kind} of {worst.name} in"
            what = "the samples of" if worst.kind == "batch" else named
            found.blame(f"{what} step {worst.step}", str(worst))
    blamed, wrong_row = _compare_rows(found, original, first, again)
    from .saved import SavedStep, compare_steps

    saved, follows = SavedStep(), wrong_row < max(first.rows)
    if original.saved and first.saved:
        third = again.saved if again else None
        saved = compare_steps(original.saved, first.saved, third, rounds=not found.is_same)
        follows = True
    found.tensors, found.limits = saved.tensors, saved.limits
    found.equal_bits &= saved.equal_bits
    if wrong_row and follows and not saved.wrong:
        blamed = f"the row of step {wrong_row} in metrics.jsonl: all that follows is equal"
    texts = (f"step {found.step}: {text}" for text in (*saved.other, *saved.wrong))
    found.blame(blamed, *texts)
    if saved.wrong:
        found.blame(_blame_of(saved.wrong, found))
    elif saved.other:
        found.blame(f"the files of step {found.step}, or what the run counts")


def _blame_of(wrong: Sequence[SavedTensor], found: Audit) -> str:
    """Describe a checkpoint whose tensors differ after rows that are equal."""
    from .saved import kind_of

    if {kind_of(tensor.name) for tensor in wrong} == {"weights"}:
        return "the weights of the checkpoint: what the optimizer keeps is equal"
    # What an update changes wrongly changes all gradients of the next step.
    if found.since + 1 == found.step or max(tensor.wrong for tensor in wrong) <= _FEW:
        return f"the update of step {found.step}{found.base_after(found.step - 1)}"
    return (
        f"an update of steps {found.since + 1} to {found.step}: their rows of metrics are equal"
    )


def _compare_rows(
    found: Audit, original: Records, first: Records, again: Records | None
) -> tuple[str, int]:
    """Compare rows of metrics. Return the fault of the first row that differs, and the step of the last one ("" and 0: none)."""
    ours, theirs = original.rows, {step: values(row) for step, row in first.rows.items()}
    moved = {step: values(row) for step, row in again.rows.items()} if again else {}
    for step in sorted({*found.due} - ours.keys() | original.repeated):
        if found.since < step <= min(found.step, max(ours, default=0)):
            rows = "several rows" if step in ours else "no row"
            found.blame(
                "metrics.jsonl: its rows are not those of the steps",
                f"step {step}: metrics.jsonl has {rows} of it",
            )
    blamed, last = "", 0
    steps = [step for step in sorted(theirs) if step in ours and step > found.since]
    found.rows = len(steps)
    for step in steps:
        mine, right = values(ours[step]), theirs[step]
        begin = max(n for n in (0, *ours, *found.starts) if n < step)
        losses = [
            x for n in range(begin + 1, step + 1) if n in theirs for x in theirs[n]["loss"]
        ]
        is_known = begin >= found.since and None not in losses
        right["loss_mean"] = [fmean(losses)] if is_known else []
        for column in {**_COLUMNS, **mine}:
            a, b = mine.get(column, []), right.get(column, [])
            if _is_clock(column) or None in b or not b or not (a or column in _COLUMNS):
                continue  # not measured in that step
            if not (away := apart(a, b)):
                continue
            found.equal_bits = False
            # The largest of all steps: in a single one, two roundings may cancel.
            name = column.removesuffix("_mean")
            spread = (
                apart(theirs[n].get(name, []), row.get(name, [])) for n, row in moved.items()
            )
            if away <= BEYOND * max(UNIT["float32"] * (not found.is_same), *spread, 0.0):
                continue
            found.findings.append(
                f"step {step}: {column} is {', '.join(map(repr, a))}, and {', '.join(map(repr, b))} when computed again"
            )
            guess = _COLUMNS.get(column, f"the {column} of step {{}}")
            if column in ("loss", "grad_norm"):
                guess += found.base_after(step - 1)
            if column == "loss" and step > found.since + 1 and away < _OTHER_SAMPLES:
                before = steps[steps.index(step) - 1]
                guess = f"the update of step {before}, or of one up to step {step - 1}"
            blamed, last = blamed or guess.format(step), step
    return blamed, last


def _is_clock(column: str) -> bool:
    """Return whether a column is of clocks and machines, or of more than the steps since a checkpoint."""
    curve = COLUMNS[column].curve if column in COLUMNS else ""
    return curve.startswith(_CLOCKS) or column.endswith("_s") or column in _OTHERS
