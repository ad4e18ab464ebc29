"""Cause faults, and say what each has cost. `python scripts/drill.py PIECE --help` tells about a piece.

python scripts/drill.py faults STATE.json      # each fault of drill.toml, by its tests
python scripts/drill.py groups FOLDER          # replica groups that are killed at random
python scripts/drill.py hosts FOLDER           # replica groups on two hosts, and faults between them
python scripts/drill.py fuzz --count 2000      # files of a run, damaged at random
"""

from __future__ import annotations

import argparse
import sys

from drills import faults, fuzz, groups, hosts


def main() -> int:
    """Run a piece, and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pieces = parser.add_subparsers(required=True, metavar="PIECE")
    for module in (faults, groups, hosts, fuzz):
        name = module.__name__.rpartition(".")[2]
        piece = pieces.add_parser(
            name, description=module.__doc__, formatter_class=parser.formatter_class
        )
        module.add_options(piece)
        piece.set_defaults(run=module.run)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
