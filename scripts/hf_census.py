"""Compare transformers' causal language models on titan's layouts with transformers alone.

    python scripts/hf_census.py                    # all families
    python scripts/hf_census.py qwen3 phi3 -v      # some of them, with each gradient that differs
    python scripts/hf_census.py --write docs/zoo.md

Each family is made small. Its reference is transformers' own model with its own attention, masks and experts, in one process. Each
layout takes three steps of AdamW on gloo ranks, and its loss, each gradient of the first step and each updated weight are compared
with the reference's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.hf_families import LAYOUTS, families, row_of  # noqa: E402
from tests.support.ranks import PRELOAD, Pool  # noqa: E402


def main() -> None:
    """Run the census."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    args = parser.parse_args()
    PRELOAD.extend(
        ("transformers", "transformers.modeling_utils", "titan.models.transformers.model")
    )
    known = families()
    kinds = {k: known[k] for k in args.families} if args.families else known
    chosen = {k: v for k, v in LAYOUTS.items() if k in args.layouts.split(",")}

    pool, results = Pool(), {}
    for kind in kinds:
        results[kind] = row_of(pool, kind, chosen, verbose=args.verbose)
        print(f"{kind:22s} {results[kind]}", file=sys.stderr, flush=True)
    for kind, row in results.items():
        print(kind)
        for name, text in row.items():
            print(f"    {name:14s} {text}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
