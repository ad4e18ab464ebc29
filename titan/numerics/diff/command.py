"""Command `titan diff A B`: where two runs begin to differ. A and B are job files, or folders of runs that recorded steps.

A job is trained for a few steps on this machine, its recorded steps are read, and its run folder is deleted unless --output names a place
for it. The first job trains a third time with `debug.record_perturbed`, which measures what rounding does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from titan.base.untrusted import InputError, read_bytes
from titan.checkpoint.identity import change_lines, differing, saved_settings
from titan.config.load import load_from_argv
from titan.config.options import mistake, put_json
from titan.config.phases import DEGREES
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.config.toml import tomllib
from titan.numerics.certify.command import least_world
from titan.numerics.experiment import AGAIN_ROUNDED, Side, record
from titan.numerics.recorded import RecordedStep, read_steps
from titan.numerics.tables import TABLES, parser_of

from .compare import Comparison, compare, parameters_only, shown

_SHOWN = 8
_ANOTHER = 0.3  # relative distance of most tensors: rounding does less, other samples more
_OFF = ("validation.enable", "checkpoint.load_only", *TABLES["records"])


def main(argv: list[str]) -> int:
    """Run the command. Return 0 if the runs are equal but for rounding, else 1."""
    parser = parser_of("diff")
    options, rest = parser.parse_known_args(argv)
    keys = {
        side: [word for word in rest if not word.startswith(f"--{other}.")]
        for side, other in ("ab", "ba")
    }
    for word in rest:
        if all(Path(getattr(options, side)).is_dir() for side in keys if word in keys[side]):
            message = "a recorded run is read as it is; keys change jobs that are trained"
            raise mistake(word, message)
    with tempfile.TemporaryDirectory(prefix="titan-diff-") as folder:
        place = options.output or Path(folder)
        # All are checked before the first one is trained.
        planned = [_planned(options, keys[side], side, place / side) for side in "ab"]
        for line in differing_keys(*(text for text, _ in planned)):
            print(line, flush=True)
        runs = [run for _, run in planned]
        if options.spread is not None:
            runs.append(partial(list, read_steps(options.spread)))
        elif not Path(options.a).is_dir():
            runs.append(_planned(options, keys["a"], "a", place / "spread", perturbed=True)[1])
        a, b, *last = (run() for run in runs)
    spread: Sequence[RecordedStep] = last[0] if last else ()
    if not {step.step for step in a} & {step.step for step in b}:
        raise InputError(f"{options.a} and {options.b} recorded no step in common")
    names, others = (
        [t.name for step in run for t in step.tensors if t.kind != "batch"] for run in (a, b)
    )
    if not {*names} & {*others}:
        such = f"no name of a tensor is in both, such as {names[:1]} and {others[:1]}"
        raise InputError(f"{options.a} and {options.b} are of different models: {such}")
    if options.spread is not None:
        _check_spread(a, spread, options.spread)
    found = compare(a, b, spread)
    if not put_json(asdict(found), options.json):
        print("\n".join(report(found, measured=bool(spread))))
        if why := parameters_only(a):
            print(why)
    return int(bool(found.differences))


def _check_spread(
    a: Sequence[RecordedStep], spread: Sequence[RecordedStep], folder: Path
) -> None:
    """Raise InputError if a run is no disturbed run of A's job."""
    found, steps = compare(a, spread), {step.step for step in a}
    far = sum(difference.ratio > _ANOTHER for difference in found.differences)
    is_whole = steps <= {step.step for step in spread} and not found.left_out
    is_disturbed = found.worst or found.differences
    if not (is_whole and is_disturbed) or 2 * far > found.compared:
        why = "it has other steps, tensors, weights or samples, or equal bits"
        raise InputError(
            f"--spread: {folder} is no run of A's job with record_perturbed: {why}"
        )


def report(found: Comparison, *, measured: bool) -> list[str]:
    """Return the lines of a comparison.

    Args:
        found: the comparison.
        measured: whether the spread of rounding was measured.
    """
    of = f"{found.compared} tensors compared"
    if found.left_out:
        of += f", {found.left_out} in one run only"
    basis = "; rounding was not measured: its limit follows from the dtype alone"
    basis *= not measured
    if not found.differences:
        share = f"the largest difference is {found.worst:.0%} of what rounding may make"
        return [f"equal: {of}; {share}{basis}"]
    first, *others = found.differences
    lines = [f"differs ({of}{basis})", f"first: {first}"]
    if first.kind == "batch":
        return lines  # all others follow from it
    others = [f"then {d.kind} of {d.name or 'the step'}, by {d.ratio:.1e}" for d in others]
    return [*lines, *shown(others)]


def _planned(
    options: argparse.Namespace,
    keys: Sequence[str],
    side: str,
    folder: Path,
    *,
    perturbed: bool = False,
) -> tuple[str, Callable[[], list[RecordedStep]]]:
    """Return a resolved job as TOML, and what reads the recorded steps of its folder, or trains it, checked here, and reads its steps."""
    given = Path(getattr(options, side))
    if given.is_dir():
        text = ""
        with suppress(InputError):
            text = read_bytes(given / "config.toml", within=given).decode(errors="replace")
        return text, partial(list, read_steps(given))
    job = [str(given), *(word.replace(f"--{side}.", "--", 1) for word in keys)]
    plain = [word for word in job if not word.startswith("--")]
    if len(plain) > 1:
        message = f"unexpected {plain[1]}; write --KEY=VALUE for both jobs, --a.KEY=VALUE or --b.KEY=VALUE for one"
        raise mistake(plain[1], message)
    if folder.exists():
        raise InputError(f"--output: {folder} exists; name a new folder, or delete it")
    config = load_from_argv(job, warn=False)
    ranks = getattr(options, f"nproc_{side}") or options.nproc
    ranks = ranks or least_world(config, shards=1)
    short = _short(config, options.steps, perturbed=perturbed)
    trained = Side([*job, *short], config, ranks)
    trained.check(folder)
    what = f"{given}{AGAIN_ROUNDED if perturbed else ''}"
    return to_toml(config), lambda: record(trained, folder, what=what).recorded


def differing_keys(a: str, b: str, names: str = "A and B") -> list[str]:
    """Return a line for each of the first keys in which two resolved jobs differ; none if a job is not known.

    Args:
        a: the first job, as TOML.
        b: the second one.
        names: both jobs, in words.
    """
    try:
        one, two = (saved_settings(text, {}) for text in (a, b))
    except tomllib.TOMLDecodeError:
        return []
    if not (one and two):
        return []
    found = differing(one, two)
    found = {key: pair for key, pair in found.items() if not key.startswith("job.")}
    lines = [f"{names} differ in {line}" for line in change_lines(found)[:_SHOWN]]
    return lines or [f"{names} are the same job"]


def _short(config: JobConfig, steps: int, *, perturbed: bool) -> list[str]:
    """Return the keys that make a job a short one that records its steps."""
    total = config.lr_scheduler.total_steps or config.training.steps
    # A checkpoint carries a run over a change of its layout.
    saves = any(p.model_dump(include=DEGREES, exclude_none=True) for p in config.phase)
    return [
        *(f"--{key}=false" for key in _OFF),
        f"--checkpoint.enable={str(saves).lower()}",
        "--checkpoint.folder=checkpoint",
        f"--training.steps={min(steps, config.training.steps)}",
        f"--lr_scheduler.total_steps={total}",
        f"--debug.record_steps={[*range(1, steps + 1)]}",
        f"--debug.record_perturbed={int(perturbed)}",
    ]
