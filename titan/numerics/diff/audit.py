"""Command `titan audit RUN --step N`: a step of a run, computed again from the checkpoint before it, and compared with its records.

The same job on the same machine gives the same bits. In another layout, or elsewhere, a second recomputation with
`debug.record_perturbed` measures what rounding does. So hardware that computes wrongly is found by other hardware, or by another
order of the same sums, though it may repeat its own fault.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titan.base.untrusted import InputError, read_json
from titan.checkpoint.identity import read_metadata
from titan.checkpoint.manifest import find_damage
from titan.checkpoint.storage import Location
from titan.checks.rules import load_to_run
from titan.commands import summary_of
from titan.config.load import load_config, load_from_argv
from titan.config.options import TRUST_OPTION, command_parser, positive, put_json
from titan.config.render import to_toml
from titan.numerics.certify.shrink import changed
from titan.numerics.diff.command import ROUNDED, train
from titan.numerics.diff.compare import BEYOND, UNIT, compare
from titan.numerics.diff.recompute import (
    Facts,
    newest_start,
    open_run,
    ranks_of,
    recomputation,
    require_permissions,
)
from titan.numerics.recorded import FOLDER, RecordedStep, read_steps
from titan.observe.rows import Row, number, read_rows
from titan.observe.run_log import read_events

if TYPE_CHECKING:
    from titan.numerics.diff.saved import SavedTensor

# Columns that follow from the job alone, with what is wrong if one is the first that differs, in the order in which a step computes them.
_COLUMNS = {
    "tokens": "the data of step {}: the run read another number of tokens",
    "first_sample": "the data of step {}: the run read other samples",
    "lr": "the learning rate of step {}: the run had another schedule",
    "loss": "the samples of step {}, or its forward pass",
    "mtp_loss": "the forward pass of step {}",
    "grad_norm": "the gradients of step {}: its loss is equal",
    "validation_loss": "the update of step {}: its loss and gradient norm are equal",
    "bits_per_byte": "the update of step {}: its loss and gradient norm are equal",
}
# A wrong update moves the next loss by less than this share, and other samples by more.
_OTHER_SAMPLES = 1e-3
_FEW = 8  # wrong values of a tensor
_SHOWN = 8


@dataclass
class _Record:
    """Records of a run, or of its recomputation: rows and recorded steps by step, and the checkpoint of the audited step."""

    folder: Path
    saved: Location | None

    def __post_init__(self) -> None:
        metrics = self.folder / "metrics.jsonl"
        rows = read_rows(metrics) if metrics.exists() else []
        self.rows: dict[int, Row] = {row["step"]: row for row in rows}
        has_steps = any((self.folder / FOLDER).glob("step-*.json"))
        steps = read_steps(self.folder) if has_steps else []
        self.recorded: dict[int, RecordedStep] = {step.step: step for step in steps}
        self.facts = read_json(self.folder / "environment.json", Facts, within=self.folder)


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

    def blame(self, text: str) -> None:
        """Keep what is wrong, if nothing that comes earlier is."""
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
        lines += [f"  {text}" for text in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"  and {len(self.findings) - _SHOWN} more")
        lines += [f"guilty: {self.guilty}"] * bool(self.guilty)
        limits = [f"{kind} {limit:.1e}" for kind, limit in self.limits.items() if limit]
        return lines + [f"smaller changes may be rounding: {', '.join(limits)}"] * bool(limits)


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the records of the run are equal but for rounding, else 1."""
    usage = "RUN --step N [--KEY=VALUE ...] [--nproc M] [--trust-remote-code] [--json [FILE]]"
    parser = command_parser("audit", usage, summary=summary_of("audit"))
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--step",
        type=positive,
        required=True,
        metavar="N",
        help="the step to compute again, from the newest checkpoint before it",
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="M",
        help="ranks; default: those of the run, or the next larger number that the layout fits",
    )
    parser.add_json()
    parser.add_argument("--trust-remote-code", **TRUST_OPTION)
    options, keys = parser.parse_known_args(argv)
    keys += ["--model.trust_remote_code=true"] * options.trust_remote_code
    found = audit(options.run, options.step, keys=keys, nproc=options.nproc)
    if not put_json(asdict(found), options.json):
        print("\n".join(found.lines()))
    return int(bool(found.findings))


def audit(run: Path, step: int, *, keys: Sequence[str] = (), nproc: int | None = None) -> Audit:
    """Compute a step of a run again, and compare.

    Args:
        run: run folder.
        step: the step.
        keys: "--section.key=value", such as another layout, or a permission that the run's job needs.
        nproc: ranks. None: those of the run, or the next larger number that the layout fits.

    Raises:
        InputError: the folder is no run, or has no records of the step.
        ConfigError: the run's job needs permissions that the keys do not give.
    """
    config, saved, lost = open_run(run, keys)
    written = run / "config.toml"
    is_same_job = load_from_argv([str(written), *keys], warn=False) == load_config(written)
    # It says where the run's checkpoints are. Those of the recomputation are elsewhere.
    keys = [key for key in keys if not key.startswith("--checkpoint.folder=")]
    original = _Record(run, saved.get(step))
    known = {*original.rows, *saved}
    if step not in known:
        last = ", ".join(map(str, sorted(known)[-_SHOWN:])) or "none"
        lacks = f"neither a row of metrics nor a checkpoint of step {step}"
        raise InputError(f"{run} has {lacks}; the last steps that have: {last}")
    base = newest_start(saved, before=step)
    require_permissions(lost, config, has_base=base is not None)
    found = Audit(step, since=base or 0)
    changes = recomputation(
        config,
        world_size=original.facts.world_size,
        base=None if base is None else saved[base],
        step=step,
        saves=original.saved is not None,
        record=[n for n in original.recorded if n <= step],
    )
    config = changed(config, changes)
    with tempfile.TemporaryDirectory(prefix="titan-audit-") as place:
        job = Path(place, "job.toml")
        job.write_text(to_toml(config), encoding="utf-8")
        asked = load_from_argv([str(job), *keys], warn=False)
        ranks = nproc or ranks_of(asked, original.facts.world_size)

        def compute(name: str, *more: str, what: str = "") -> _Record:
            at = Path(place, name)
            words = [str(job), *keys, *more, f"--job.dump_folder={at}"]
            load_to_run(words, world_size=ranks, warn=False)
            train(words, ranks=ranks, what=f"steps {found.since + 1} to {step} of {run}{what}")
            return _Record(at, original.saved and at / "checkpoint" / f"step-{step}")

        first = compute("first")
        # The job and the facts of a run folder are those of its last start.
        starts = [e for e in read_events(run / "events.jsonl") if e["event"] == "resume"]
        is_last = all((number(start.get("step")) or 0) < step for start in starts)
        found.is_same = is_same_job and is_last and first.facts == original.facts
        _compare(found, original, first, None)
        if found.equal_bits:
            return found
        steps = [*range(found.since + 1, step + 1)]
        moved = (f"--debug.record_steps={steps}", "--debug.record_perturbed=1")
        more, what = ((), " once more") if found.is_same else (moved, ROUNDED)
        again = compute("again", *more, what=what)
        found = Audit(step, since=found.since, is_same=found.is_same, equal_bits=False)
        _compare(found, original, first, again)
        return found


def _compare(found: Audit, original: _Record, first: _Record, again: _Record | None) -> None:
    """Compare the records of a run with those of its recomputation.

    Args:
        found: gets the result.
        original: records of the run.
        first: those of the recomputation.
        again: those of a second one, whose distance from the first is what rounding does. None: only look for other bits.
    """
    damages = [] if original.saved is None else find_damage(original.saved)
    if damages:
        found.equal_bits = False
        found.findings += [f"{original.saved}: {damage}" for damage in damages]
        found.blame("the files of the checkpoint: they changed after they were saved")
    if original.recorded and again is not None:
        _compare_recorded(found, original, first, again)
    _compare_rows(found, original.rows, first.rows, again.rows if again else None)
    if original.saved is None or first.saved is None:
        return
    # The last save may hold weights alone.
    is_whole = not read_metadata(original.saved).get("model_only")
    from titan.numerics.diff.saved import compare_saved, names_apart

    names = names_apart(original.saved, first.saved) if is_whole else []
    found.findings += [
        f"{name} is in one checkpoint only, or has another shape" for name in names
    ]
    found.equal_bits &= not names
    wrong: list[SavedTensor] = []
    tensors = compare_saved(
        original.saved, first.saved, again.saved if again else None, rounds=not found.is_same
    )
    for tensor in tensors:
        found.tensors += 1
        found.equal_bits &= not tensor.other
        kind = _kind(tensor.name)
        found.limits[kind] = max(found.limits.get(kind, 0.0), tensor.limit)
        if tensor.wrong:
            wrong.append(tensor)
    wrong.sort(key=lambda tensor: -tensor.share)
    found.findings += [f"step {found.step}: {tensor}" for tensor in wrong]
    if names or wrong:
        found.blame(_blame_of(wrong, found))


def _blame_of(wrong: Sequence[SavedTensor], found: Audit) -> str:
    """Return what is wrong if tensors of the checkpoint differ, and no row of metrics before."""
    if wrong and {_kind(tensor.name) for tensor in wrong} == {"weights"}:
        return "the weights of the checkpoint: what the optimizer keeps is equal"
    # What an update changes wrongly changes all gradients of the next step.
    if (
        max((tensor.wrong for tensor in wrong), default=0) <= _FEW
        or found.since + 1 == found.step
    ):
        return f"the update of step {found.step}"
    return (
        f"an update of steps {found.since + 1} to {found.step}: their rows of metrics are equal"
    )


def _kind(name: str) -> str:
    """Return "weights", or the last part of the name for what the optimizer keeps, and for the loads of experts."""
    group, last = name.partition(".")[0], name.rpartition(".")[2]
    return "weights" if group in ("model", "average") and last != "last_loads" else last


def _compare_recorded(found: Audit, original: _Record, first: _Record, again: _Record) -> None:
    runs = ([*record.recorded.values()] for record in (first, original, again))
    if differences := compare(*runs).differences:
        found.findings.append(str(differences[0]))
        step, kind, name = differences[0].step, differences[0].kind, differences[0].name
        is_data = kind == "batch"
        found.blame(
            f"the samples of step {step}" if is_data else f"the {kind} of {name} in step {step}"
        )


def _compare_rows(
    found: Audit,
    ours: Mapping[int, Row],
    theirs: Mapping[int, Row],
    again: Mapping[int, Row] | None,
) -> None:
    steps = [step for step in sorted(theirs) if step in ours and step > found.since]
    # The largest of all steps: in a single one, two roundings may cancel.
    spread = {
        column: max(
            0.0 if found.is_same else UNIT["float32"], *_moves(column, theirs, again or {})
        )
        for column in _COLUMNS
    }
    found.rows, before = len(steps), found.since
    for step in steps:
        for column, blamed in _COLUMNS.items():
            a, b = (rows[step].get(column) for rows in (ours, theirs))
            if not isinstance(a, int | float) or not isinstance(b, int | float):
                continue  # not measured in that step
            if a == b or (math.isnan(a) and math.isnan(b)):
                continue
            found.equal_bits = False
            size = abs(b) or 1.0
            if abs(a - b) <= BEYOND * spread[column] * size:
                continue
            found.findings.append(
                f"step {step}: {column} is {a!r}, and {b!r} when computed again"
            )
            if (
                column == "loss"
                and step > found.since + 1
                and abs(a - b) < _OTHER_SAMPLES * size
            ):
                blamed = f"the update of step {before}, or of one up to step {step - 1}"
            found.blame(blamed.format(step))
        before = step


def _moves(column: str, rows: Mapping[int, Row], again: Mapping[int, Row]) -> Iterator[float]:
    """Yield the relative distances of two runs in a column."""
    yield 0.0
    for step in rows.keys() & again.keys():
        b, c = number(rows[step].get(column)), number(again[step].get(column))
        if b is not None and c is not None:
            yield abs(b - c) / (abs(b) or 1.0)
