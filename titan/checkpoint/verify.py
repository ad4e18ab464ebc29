"""`titan verify STEP_DIR`: is this checkpoint what was saved? Reads every byte, and imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from titan.checkpoint import CheckpointError
from titan.checkpoint.manifest import METADATA, NAME, as_json, find_damage, list_steps
from titan.checkpoint.storage import Location, as_location, join, name_of, storage_of


def main(argv: Sequence[str] | None = None) -> int:
    """0: whole; 1: damaged, with a line for each damage; 2: there is no checkpoint."""
    parser = argparse.ArgumentParser(
        prog="titan verify",
        description="Check a checkpoint's files against its manifest.json, which was written with them.",
    )
    parser.add_argument("step", metavar="STEP_DIR", help="a step-N folder, or its URL")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    args = parser.parse_args(argv)
    step = as_location(args.step)
    try:
        _require_step(step)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    damages = find_damage(step)
    if args.json:
        print(json.dumps({"whole": not damages, "damages": as_json(damages)}, indent=2))
    else:
        print(
            "\n".join([f"{step} is damaged", *map(str, damages)]) if damages else f"{step} is whole"
        )
    return 1 if damages else 0


def _require_step(folder: Location) -> None:
    """Raises CheckpointError where there is not even a damaged checkpoint, such as for a run's folder."""
    names = storage_of(folder).listdir(folder)
    if not names:
        raise CheckpointError(f"{folder}: there is no such folder, or nothing in it")
    if {NAME, METADATA} & {*names}:
        return
    places = [folder, *(join(folder, name) for name in names)]
    steps = [(step, join(place, f"step-{step}")) for place in places for step in list_steps(place)]
    if steps or not name_of(folder).startswith("step-"):
        hint = f"; did you mean {max(steps)[1]}?" if steps else ""
        raise CheckpointError(f"{folder} is no checkpoint{hint}")
