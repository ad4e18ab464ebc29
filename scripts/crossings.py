"""List which triples of techniques no parity test crosses, and which titan refuses.

python scripts/crossings.py            what the layouts written by hand leave out, the refused triples by reason, and what is no factor
python scripts/crossings.py --rows     the layouts that tests/parity/test_triples.py draws to cross all others
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.parity import test_composition, test_moe, test_mtp
from tests.support import layouts
from tests.support.crossings import (
    BESIDE,
    drawn,
    possible,
    refusal,
    techniques_of,
    triples,
    triples_within,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print the drawn layouts")
    if parser.parse_args().rows:
        for number, layout in enumerate(drawn()):
            print(f"{number:3}  {layout.ranks} ranks  {layout.name}")
        return
    further = map(test_mtp.layout_of, test_mtp.LAYOUTS)
    rows = (*layouts.LAYOUTS, *test_moe.LAYOUTS, *further)
    by_hand = [techniques_of(layout) for layout in rows]
    stacked = {"compile", "op AC"}, {"float8"}
    by_hand += [
        techniques_of(one) | more for one in test_composition.LAYOUTS for more in stacked
    ]
    crossed = set().union(*map(triples_within, by_hand))
    every = [*triples()]
    refused = {three for three in every if possible(three) is None}
    missing = [three for three in every if three not in crossed | refused]
    print(
        f"{len(every)} triples, of them {len(refused)} refused, {len(missing)} in no layout written by hand"
    )
    print(
        f"{len(drawn())} drawn layouts cross all that are not refused: pytest -m slow tests/parity/test_triples.py\n"
    )
    reasons = defaultdict[str, list[frozenset[str]]](list)
    for three in refused:
        reasons[refusal(three)].append(three)
    for reason, group in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(
            f"refused {len(group):4}: {reason}; such as {', '.join(sorted(min(group, key=sorted)))}"
        )
    print()
    for technique, crossed_with in BESIDE.items():
        print(f"not a factor: {technique}. {crossed_with}")
    print()
    for three in missing:
        print(f"not written by hand: {', '.join(sorted(three))}")


if __name__ == "__main__":
    main()
