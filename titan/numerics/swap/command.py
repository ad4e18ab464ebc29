"""Command `titan swap RUN --to NEW.toml`: whether a run may go on as another job, and the folder in which it does.

From the newest whole checkpoint, both jobs train the same steps on the same samples, each in its own environment. A third run, of
the old job, measures rounding as for `titan diff`. If nothing differs by more, the new job's folder gets the checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree, which
from typing import Any

from titan.base.untrusted import InputError, read_json
from titan.checkpoint.identity import changed_settings, require_same_model
from titan.checks.rules import load_to_run
from titan.commands import summary_of
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv, parse_args
from titan.config.options import command_parser, mistake, positive, put_json
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.config.toml import format_value
from titan.data.special_tokens import fingerprint
from titan.numerics.diff import recompute
from titan.numerics.diff.command import differing_keys, train
from titan.numerics.recorded import read_steps
from titan.numerics.swap.handover import BEFORE, Handover, lineage
from titan.numerics.swap.proof import DIFFERS, EQUAL, Proof, predict, prove, speed

_PLAIN = 3  # steps without a record, whose time counts
_REFUSED = 3  # exit code of --or-refuse
_FLOAT8 = "quantize.linear.float8"
_PRECISION = ("mixed_precision_param", "mixed_precision_reduce")
_EXACT: dict[str, Any] = {
    **dict.fromkeys((f"training.{name}" for name in _PRECISION), "float32"),
    "model.converters": [],
    f"{_FLOAT8}.enable_fsdp_float8_all_gather": False,
    f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp": False,
    f"{_FLOAT8}.emulate": False,
}


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


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the run was handed over, 1 (with --or-refuse 3) if the new job differs."""
    usage = (
        "RUN --to NEW.toml [--KEY=VALUE ...] [--python PYTHON] [--nproc M] [--steps N] [--changes KEY] [--exact] [--or-refuse]\n"
        "       titan swap RUN --back --job.dump_folder=FOLDER [...]"
    )
    parser = command_parser("swap", usage, summary=summary_of("swap"))
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run folder; nothing in it changes")
    add("--to", metavar="NEW.toml", help="the job to go on as, with a folder of its own")
    add("--back", action="store_true", help="go on as the job before the last swap")
    add(
        "--python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of the new job's environment, such as one with another torch or titan",
    )
    add(
        "--nproc",
        type=positive,
        metavar="M",
        help="ranks of the new job; default: those of the run (with --back, of the one before), or the next larger number that the layout fits",
    )
    add("--steps", type=positive, default=20, metavar="N", help="steps to compare; default: 20")
    add(
        "--changes",
        action="append",
        default=[],
        metavar="KEY",
        help="a setting that is to differ, such as optimizer.lr; the comparison keeps the old job's",
    )
    add("--exact", action="store_true", help="compare in float32, too, which hides less")
    add(
        "--or-refuse",
        action="store_true",
        help="exit code 3 if the new job differs, so that a script can tell that from a failure",
    )
    parser.add_json()
    options, keys = parser.parse_known_args(argv)
    if options.back == bool(options.to):
        raise mistake("--to", "name the new job, or write --back for the one before the swap")
    if options.back:
        options.to = _before(options.run, keys)
        # A run of an earlier titan does not say them.
        options.nproc = options.nproc or lineage(options.run)["swaps"][-1].get("ranks")
    return swap(options, keys)


def swap(options: argparse.Namespace, keys: Sequence[str]) -> int:
    """Compare two jobs, print the result, and hand over. Return the exit code."""
    run = options.run
    config, saved, lost = recompute.open_run(run, keys)
    recompute.require_permissions(lost, config, has_base=True)
    size = read_json(run / "environment.json", recompute.Facts, within=run).world_size
    last = config.training.steps
    base = recompute.newest_start(saved, before=last)
    if base is None:
        raise InputError(f"{run} has no whole checkpoint before its last step, {last:,}")
    if not which(options.python):
        raise mistake("--python", f"there is no {options.python}")
    given = parse_args([options.to, *keys])
    # That key says where the run's checkpoints are.
    keys = [f"--{key}" for key in given.overrides if not key.startswith("checkpoint.folder=")]
    words = [*map(str, (given.job, *given.overlays)), *keys]
    asked = load_from_argv(words, warn=False)
    require_same_model(saved[base], asked)
    ranks = options.nproc or recompute.ranks_of(asked, size)
    before, now = recompute.sequences_of(config, size), recompute.sequences_of(asked, ranks)

    def changed(old_toml: str) -> list[str]:
        # A precision is compared, within its own bounds.
        return [
            line
            for line in changed_settings(old_toml, asked, sequences=(before, now))
            if not line.startswith("model.converters:")
        ]

    # Keys of the command line say where the old job finds its data, too. They may not hide that the new job has other data.
    changes = changed((run / "config.toml").read_text("utf-8"))
    _require_named(changes, asked, options.changes)
    kept = [
        *words,
        *(
            f"--{x.replace(': ', '=', 1).partition(' -> ')[0]}"
            for x in changed(to_toml(config))
        ),
    ]
    compared, _ = load_to_run(kept, world_size=ranks, warn=False)
    plan = fingerprint(vars(options), to_toml(config), to_toml(compared))
    handover = Handover(Path(asked.job.dump_folder), plan)
    again = shlex.join(["titan", "train", *words, f"--nproc={ranks}"])
    goes_on = f"`{again}` goes on in {handover.target}"
    step = handover.begin(base)
    if step is None:
        print(f"handed over before: {goes_on}")
        return 0
    job = handover.work / "old.toml"
    job.write_text(to_toml(config), encoding="utf-8")
    old = Side([str(job)], config, size, sys.executable)
    new = Side(kept, compared, ranks, options.python)
    start = handover.copy(run, saved, step, asked.checkpoint.folder)
    predicted = predict(compared, ranks)
    steps = [*range(step + 1, min(step + options.steps, last) + 1)]
    train_both = partial(_train_both, handover, start, steps, old, new)
    proof, sides = train_both({})
    proofs = [proof]
    if options.exact and proof.verdict != DIFFERS:
        proofs.append(train_both(_EXACT)[0])
    found: dict[str, Any] = {
        "run": str(run),
        "step": step,
        "ranks": size,  # of the old job, for --back
        "changes": changes,
        "proofs": [asdict(each) for each in proofs],
        **sides,
        "predicted": predicted,
    }
    if not put_json(found, options.json):
        keys = differing_keys(to_toml(config), to_toml(asked))
        lines = [line.replace("A and B", "old and new") for line in keys]
        lines += [f"not compared: {line}" for line in changes]
        lines += [line for each in proofs for line in each.lines()]
        lines += [f"{name}: {_figures(found[name])}" for name in ("old", "new", "predicted")]
        print("\n".join(lines))
    if proofs[-1].verdict == DIFFERS:
        rmtree(handover.work)
        return _REFUSED if options.or_refuse else 1
    handover.finish(run, found)
    print(f"handed over after step {step:,}: {goes_on}", file=sys.stderr)
    return 0


def _before(run: Path, keys: Sequence[str]) -> str:
    """Return the job before the last swap. It came with the run folder, so only the keys give it permissions."""
    is_named = any(key.startswith("--job.dump_folder=") for key in keys)
    if not is_named or not (run / BEFORE).is_file():
        needs = "needs a run that began with a swap, and a new folder, --job.dump_folder=FOLDER"
        raise mistake("--back", needs)
    if lost := recompute.open_run(run, keys, file=BEFORE)[2]:
        raise ConfigError(loss.problem for loss in lost.values())
    return str(run / BEFORE)


def _require_named(changes: Sequence[str], new: JobConfig, named: Sequence[str]) -> None:
    """Require that --changes names all changes of what is learned.

    Args:
        changes: the changes, as "key: old -> new".
        new: the new job.
        named: keys that --changes names.

    Raises:
        ConfigError: one is not named, or the new job could not go on.
    """
    wrong = {}
    for key, _, values in (line.partition(": ") for line in changes):
        if not any(f"{key}.".startswith(f"{name}.") for name in named):
            wrong[key] = (
                f"{values} changes what is learned: set it back, or, if that is meant, add --changes {key}"
            )
    section = new.checkpoint
    if not section.enable or "://" in section.folder or Path(section.folder).is_absolute():
        wrong["checkpoint.folder"] = "the new job has to save in a folder below its run folder"
    if wrong:
        raise ConfigError(new.source_map.problem(*each) for each in wrong.items())


def _train_both(
    handover: Handover,
    start: Path,
    steps: list[int],
    old: Side,
    new: Side,
    exact: Mapping[str, Any],
) -> tuple[Proof, dict[str, Any]]:
    """Train both jobs from a checkpoint. Return the comparison, and facts about the two.

    Args:
        handover: has their folders.
        start: the checkpoint.
        steps: steps to compare.
        old: the old job.
        new: the new one.
        exact: more keys of all jobs.
    """

    def trained(name: str, side: Side, more: Mapping[str, Any]) -> Path:
        keys = recompute.recomputation(
            side.config,
            world_size=side.ranks,
            base=start,
            step=min(steps[-1] + _PLAIN, old.config.training.steps),
            record=steps,
        )
        keys |= {"validation.enable": False, "checkpoint.last_save_model_only": True}

        def make(place: Path) -> None:
            lines = {**keys, **more, **exact, "job.dump_folder": str(place)}
            text = "".join(f"{key} = {format_value(value)}\n" for key, value in lines.items())
            # A file, since a command line has no tables.
            overlay = handover.work / f"{name}-keys.toml"
            overlay.write_text(text, encoding="utf-8")
            words = [word for word in side.words if word[2:].partition("=")[0] not in lines]
            what = f"steps {steps[0]:,} to {steps[-1]:,} of the {name} job"
            train([*words, str(overlay)], ranks=side.ranks, what=what, python=side.python)
            rmtree(place / "checkpoint")

        return handover.part(f"{name}-exact" if exact else name, make)

    runs = trained("old", old, {}), trained("new", new, {})
    one, two = map(read_steps, runs)
    proof = prove(one, two, [])
    if proof.verdict != EQUAL:
        moved = trained("disturbed old", old, _disturbance(new.config))
        proof = prove(one, two, read_steps(moved))
    after = steps[-1]
    return proof, {
        "old": one[0].about | speed(runs[0], after=after),
        "new": two[0].about | speed(runs[1], after=after),
    }


def _disturbance(new: JobConfig) -> dict[str, Any]:
    """Return keys that disturb the old job by rounding, in the new job's precision if that is below float32."""
    keys: dict[str, Any] = {"debug.record_perturbed": 1}
    if new.training.mixed_precision_param != "float32":
        keys |= {f"training.{name}": getattr(new.training, name) for name in _PRECISION}
    if new.model.converters:
        keys["model.converters"] = new.model.converters
        keys["quantize"] = new.quantize.model_dump(exclude_none=True)
    return keys


def _figures(facts: Mapping[str, Any]) -> str:
    """Return versions, speed and memory in words."""
    words = {k: f"{v:,.2f}" if isinstance(v, float) else v for k, v in facts.items()}
    return ", ".join(f"{name} {word}" for name, word in words.items() if isinstance(word, str))
