"""The results in docs/zoo.json: each class is equal to transformers alone where they say so, and the pages say what they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.hf_families import LAYOUTS, PROOFS, is_equal, row_of
from tests.support.hf_sizes import overrides_of
from tests.support.ranks import Pool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/zoo.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "docs/zoo.json").read_text(encoding="utf-8"))
CASES = [(k, v) for k, found in RESULTS.items() for v in "012" if "FSDP2" in found.get(v, {})]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_a_class_is_equal_where_the_results_say_so(kind: str, variant: str, pool: Pool) -> None:
    row = row_of(pool, kind, LAYOUTS | PROOFS, variant=int(variant))
    for name in (LAYOUTS | PROOFS).keys() & row.keys():
        assert is_equal(row[name]) == is_equal(RESULTS[kind][variant][name]), (name, row)


def test_the_pages_count_what_the_table_lists() -> None:
    sizes = re.findall(r"^\| `\w+` \| (\d) of (\d) \|", PAGE, re.MULTILINE)
    whole = sum(good == total for good, total in sizes)
    assert (
        f"**{whole} classes are equal in all columns, and {len(sizes) - whole} in some.**"
        in PAGE
    )
    assert f"{(*sizes,).count(('3', '3'))} were run with\n  all three" in PAGE
    assert (
        f"[{whole} more classes of transformers](docs/zoo.md)"
        in (ROOT / "README.md").read_text()
    )


def test_variants_differ_in_heads_and_layers() -> None:
    first, second = (overrides_of("AfmoeForCausalLM", variant) for variant in (1, 2))
    assert first == overrides_of("AfmoeForCausalLM", 1)
    assert {"tie_word_embeddings", "vocab_size", "layer_types"} <= {
        k for k, v in first.items() if v != second[k]
    }
