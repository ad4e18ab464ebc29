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
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.hf_families import LAYOUTS, families, row_of  # noqa: E402
from tests.support.ranks import Pool  # noqa: E402


def page(results: dict[str, Any]) -> str:
    """Return docs/zoo.md: families that train on every layout, on some, and on none, with the reasons."""
    import transformers

    names = [*LAYOUTS]
    lines, refused, counts = [], [], {"all": 0, "some": 0}
    for kind, row in sorted(results.items()):
        why = row.get("refused") or row.get("error") or row.get("reference")
        if why:
            refused.append(f"| `{kind}` | {_cell(why)} |")
            continue
        cells, notes = [], []
        for name in names:
            text = row.get(name, "-")
            is_equal = text[:1].isdigit()
            cells.append(text if is_equal or text == "-" else "no")
            if not is_equal and text != "-":
                notes.append(f"{name}: {text.removeprefix('refused: ')}")
        counts["some" if notes else "all"] += 1
        note = _cell("; ".join(dict.fromkeys(notes)))
        lines.append(f"| `{families()[kind]}` | {' | '.join(cells)} | {note} |")
    return "\n".join(
        [
            "# The zoo",
            "",
            f'Causal language models of transformers {transformers.__version__} as `model.name = "transformers"`. `python scripts/hf_census.py --write',
            "docs/zoo.md` writes this page. Each family is made small, and trains three steps of AdamW in fp32 on each layout. A cell is the",
            "largest relative difference of a loss, a gradient of the first step or an updated weight from transformers alone, with its own",
            "attention and experts, in one process. At most 1e-5 is equal. `draw 2`: with other weights and tokens, since rounding flipped a ReLU",
            "or the choice of an expert with the first ones.",
            "",
            f"**{counts['all']} families are equal on all of these layouts, and {counts['some']} on some.** Others are refused.",
            "",
            f"| class | {' | '.join(names)} | why not |",
            "|---|" + "---|" * (len(names) + 1),
            *lines,
            "",
            "## Refused",
            "",
            "| family | reason |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def main() -> None:
    """Run the census."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results")
    parser.add_argument("--read", type=Path, help="results of an earlier run, in place of a run")
    parser.add_argument("--write", type=Path, help="write the page")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    args = parser.parse_args()
    known = families()
    kinds = {k: known[k] for k in args.families} if args.families else known
    chosen = {k: v for k, v in LAYOUTS.items() if k in args.layouts.split(",")}

    pool, results = Pool(("transformers.modeling_utils", "titan.models.transformers.model")), {}
    if args.read:
        results, kinds = json.loads(args.read.read_text()), {}
    for kind in kinds:
        results[kind] = row_of(pool, kind, chosen, verbose=args.verbose)
        print(f"{kind:22s} {results[kind]}", file=sys.stderr, flush=True)
    for kind, row in results.items():
        print(kind)
        for name, text in row.items():
            print(f"    {name:14s} {text}")
    if args.write:
        args.write.write_text(page(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
