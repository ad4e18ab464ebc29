"""Command `titan swap RUN --to NEW.toml`: whether a run may go on as another job, and the folder in which it does.

From the newest whole checkpoint, both jobs train the same steps on the same samples, each in its own environment. A third run, of
the old job, measures rounding as for `titan diff`. If nothing differs by more, the new job's folder gets the checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree, which
from typing import Any

from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError
from titan.checkpoint.identity import (
    change_lines,
    changed_settings,
    differing,
    freedom,
    job_facts,
    leaves,
    require_same_model,
)
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv, parse_args
from titan.config.options import mistake, put_json
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.data.special_tokens import fingerprint
from titan.numerics.diff.command import differing_keys
from titan.numerics.experiment import (
    Facts,
    Proof,
    Side,
    newest_start,
    open_run,
    ranks_of,
    require_permissions,
    sequences_of,
)
from titan.numerics.tables import parser_of

from .handover import Handover, toml_lines
from .trial import FOLDER, SwapTrial, verdict_of

_REFUSED = 3  # exit code of --or-refuse


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the run was handed over, 1 (with --or-refuse 3) if the new job differs."""
    parser = parser_of("swap")
    parser.set_defaults(python=sys.executable)
    options, keys = parser.parse_known_args(argv)
    return swap(options, keys)


def swap(options: argparse.Namespace, keys: Sequence[str]) -> int:
    """Plan, prove and hand over. Return the exit code."""
    begun = time.monotonic()
    trial = plan(options, keys)
    new, handover = trial.goes_on, trial.handover
    again = shlex.join(["titan", "train", *new.words, f"--nproc={new.ranks}"])
    goes_on = f"`{again}` goes on in {handover.target}"
    step = handover.begin()
    if step is None:
        print(f"handed over before: {goes_on}")
        return 0
    proofs = trial.prove(step, options.steps)
    found = _facts(trial, proofs) | {"seconds": time.monotonic() - begun}
    left_out = "; ".join([*trial.left_out, *found["changes"]])
    found["result"] = [
        verdict_of(proofs, f"{trial.span}, and what is saved after step {trial.last:,}"),
        f"not compared: {left_out}",
        _outlook(found),
    ]
    if not put_json(found, options.json):
        lines = differing_keys(to_toml(trial.old.config), to_toml(new.config), "old and new")
        for proof in proofs.values():
            lines += proof.lines()
        print("\n".join([*lines, *found["result"]]))
    if FOLDER not in proofs or not proofs[FOLDER].passes:
        rmtree(handover.work)
        return _REFUSED if options.or_refuse else 1
    handover.finish(found)
    print(f"handed over after step {step:,}: {goes_on}", file=sys.stderr)
    return 0


def plan(options: argparse.Namespace, keys: Sequence[str]) -> SwapTrial:
    """Read both jobs.

    Raises:
        InputError: the run cannot go on, such as one without a checkpoint.
        ConfigError: a job is wrong, or the new one changes what is learned and --changes does not say so.
    """
    run = options.run
    config, saved, lost = open_run(run, keys)
    require_permissions(lost, config, has_base=True)
    size = RunFolder(run).facts(Facts).world_size
    base = newest_start(saved, before=config.training.steps)
    if base is None:
        last = config.training.steps
        raise InputError(f"{run} has no whole checkpoint before its last step, {last:,}")
    if not which(options.python):
        raise mistake("--python", f"there is no {options.python}")
    given = parse_args([options.to, *keys])
    # That key says where the run's checkpoints are.
    keys = [f"--{key}" for key in given.overrides if not key.startswith("checkpoint.folder=")]
    words = [*map(str, (given.job, *given.overlays)), *keys]
    asked = load_from_argv(words, warn=False)
    require_same_model(saved[base], asked)
    ranks = options.nproc or ranks_of(asked, size)
    sequences = sequences_of(config, size), sequences_of(asked, ranks)
    terms = differing(job_facts(config), job_facts(asked))

    def changed(before: str) -> dict[str, Any]:
        found = changed_settings(before, asked, sequences=sequences)
        # A number format is compared, within its own bounds.
        return {key: pair for key, pair in found.items() if freedom(key) != "format"} | terms

    # Keys of the command line say where the old job finds its data, too. They may not hide that the new job has other data.
    changes = changed(RunFolder(run).config.read_text("utf-8"))
    _require_named(changes, asked, options.changes)
    old_toml = to_toml(config)
    kept = _job_lines(asked, changed(old_toml))
    identity = fingerprint(vars(options), old_toml, kept)
    handover = Handover(Path(asked.job.dump_folder), identity, run, saved, base)
    new = Side(words, asked, ranks, options.python)
    return SwapTrial(handover, Side([], config, size), new, kept, changes)


def _facts(trial: SwapTrial, proofs: Mapping[str, Proof]) -> dict[str, Any]:
    """Return the facts of a swap for --json and swap.json, without its time and its result."""
    run, step = trial.handover.old, trial.steps[0] - 1
    newest = max([row["step"] for row in RunFolder(run).rows()], default=step)
    return {
        "run": str(run),
        "step": step,
        "changes": change_lines(trial.changes),
        "proofs": [*map(asdict, proofs.values())],
        **trial.figures(),
        "again": max(newest - step, 0),
    }


def _require_named(
    changes: Mapping[str, tuple[Any, Any]], new: JobConfig, named: Sequence[str]
) -> None:
    """Require that --changes names all changes of what is learned.

    Args:
        changes: the old and the new value of each key that differs.
        new: the new job.
        named: keys that --changes names.

    Raises:
        ConfigError: one is not named, or the new job could not go on.
    """
    wrong = {}
    for key, _, values in (line.partition(": ") for line in change_lines(changes)):
        if not any(f"{key}.".startswith(f"{name}.") for name in named):
            wrong[key] = (
                f"{values} changes what is learned or measured: set it back, or, if that is meant, add --changes {key}"
            )
    section = new.checkpoint
    outside = {"/", ".."} & {*Path(section.folder).parts}
    if section.why_unsaved or "://" in section.folder or outside:
        wrong["checkpoint.folder"] = "the new job has to save in a folder below its run folder"
    if wrong:
        raise ConfigError(new.source_map.problem(*each) for each in wrong.items())


def _job_lines(job: JobConfig, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the keys that a job sets as TOML, with the old values of some. Another titan may not know the others."""
    given = dict(leaves(job.whole.model_dump(exclude_unset=True)))
    return toml_lines(given | {key: old for key, (old, _) in changes.items()})


def _outlook(found: Mapping[str, Any]) -> str:
    """Describe the losses and gains of the run."""
    text = f"{found['again']:,} steps since step {found['step']:,} will be trained again"
    if speed := found["new"]["tokens_per_s"]:
        text += f"; {speed:,.0f} tokens/s"
    return f"{text}; compared in {found['seconds']:,.0f} s"
