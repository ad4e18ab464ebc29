"""Sparse attention of DeepSeek-V3.2, GLM-5, GLM-5.2 and MiniMax M3 against transformers alone, in one process and on layouts."""

from __future__ import annotations

import pytest

from tests.support.hf_families import LAYOUTS, PACKED, row_of
from tests.support.ranks import Pool

# GLM-5 in its layers that choose, and GLM-5.2 in those that read the choice of the layer before.
KINDS = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text")
WHOLE = {"one process": {}, "one process, documents": {}}


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_equal_transformers_alone(kind: str, pool: Pool) -> None:
    """Logits decide losses; each gradient and updated weight is compared too. Scores of zero are equal to each other."""
    layouts = WHOLE | LAYOUTS | PACKED
    row = row_of(pool, kind, layouts)
    assert {name: row[name] for name in layouts} == {n: row[n][:7] for n in layouts}, row
    assert all(float(row[name]) < 1e-5 for name in layouts)
