"""`titan verify STEP_DIR`: is this checkpoint what was saved? Reads every byte, and imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from titan.checkpoint.files import as_location, files_of
from titan.checkpoint.manifest import as_json, find_damage


def main(argv: Sequence[str] | None = None) -> int:
    """0: whole; 1: damaged, with a line for each damage; 2: there is no such folder."""
    parser = argparse.ArgumentParser(
        prog="titan verify",
        description="Check a checkpoint's files against its manifest.json, which was written with them.",
    )
    parser.add_argument("step", metavar="STEP_DIR", help="a step-N folder, or its URL")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    args = parser.parse_args(argv)
    step = as_location(args.step)
    if not files_of(step).names(step):
        print(f"{step}: there is no such folder, or nothing in it", file=sys.stderr)
        return 2
    damages = find_damage(step)
    if args.json:
        print(json.dumps({"whole": not damages, "damages": as_json(damages)}, indent=2))
    else:
        print(
            "\n".join([f"{step} is damaged", *map(str, damages)]) if damages else f"{step} is whole"
        )
    return 1 if damages else 0
