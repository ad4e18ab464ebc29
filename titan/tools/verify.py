"""Command `titan verify STEP_DIR`: every byte of a checkpoint, compared with the manifest. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from titan.checkpoint import CheckpointError
from titan.checkpoint.formats import DAMAGED, LOST, NEWER
from titan.checkpoint.manifest import METADATA, NAME, find_damage, list_steps
from titan.checkpoint.storage import Location, as_location, join, name_of, storage_of
from titan.config.options import put_json

from .tables import parser_of

# What is said of a step with damages of several kinds: the first of them.
_WORDS = {NEWER: "is of a newer titan", LOST: "cannot be read", DAMAGED: "is damaged"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 for a whole checkpoint, 1 for a damaged one (it prints a line for each damage) and one
        that cannot be read, 2 if there is none, or a newer titan wrote it.
    """
    args = parser_of("verify").parse_args(argv)
    step = as_location(args.step)
    try:
        _require_step(step)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, OSError) or error.kind == LOST else 2
    damages = sorted(find_damage(step))
    answer = {"whole": not damages, "damages": [asdict(damage) for damage in damages]}
    if not put_json(answer, args.json):
        kinds = {damage.kind for damage in damages}
        what = next((_WORDS[kind] for kind in _WORDS if kind in kinds), "is whole")
        print(f"{step} {what}", *damages, sep="\n")
    return 2 if any(damage.kind == NEWER for damage in damages) else bool(damages)


def _require_step(folder: Location) -> None:
    """Check that a folder is a checkpoint, perhaps a damaged one.

    Raises:
        CheckpointError: it is none. The message names the newest step of a run's folder.
    """
    names = storage_of(folder).listdir(folder)
    if not names:
        raise CheckpointError(f"{folder}: there is no such folder, or nothing in it")
    # A manifest, or DCP's index, makes a folder worth verifying.
    if {NAME, METADATA} & {*names}:
        return
    parents = [folder, *(join(folder, name) for name in names)]
    # In the folder itself, or in a folder below it: a run's folder holds a folder of checkpoints.
    steps = [(step, join(p, f"step-{step}")) for p in parents for step in list_steps(p)]
    if steps or not name_of(folder).startswith("step-"):
        hint = f"; did you mean {max(steps)[1]}?" if steps else ""
        raise CheckpointError(f"{folder} is no checkpoint{hint}")
