"""Norms of each block are those of one process, under every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.support import layouts
from tests.support.layouts import REPLICAS, ZERO_BUBBLE, Layout, fsdp, pp, tp
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.observe.norms import LayerNorms

LAYOUTS = [
    Layout("FSDP2 x TP+SP", (*fsdp(2), *tp(2))),
    Layout("HSDP", (*REPLICAS, *fsdp(2))),
    Layout("PP zero bubble, several stages a rank", pp(2), settings=ZERO_BUBBLE),
    Layout("PP x FSDP2, accumulation", (*pp(2), *fsdp(2)), accumulation=2),
    Layout(
        "HSDP, EP 2",
        (*REPLICAS, *fsdp(2)),
        settings=(("expert_parallel_degree", 2),),
        model=("qwen3", "tiny_moe"),
    ),
]


def norms(layout: Layout) -> dict[str, Any]:
    """On one rank: norms in the first step, and the global norm that is clipped by."""
    found: list[dict[str, Any]] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        train_step = build_step(*args, **kwargs)
        norms = LayerNorms(train_step.model_parts, stages=train_step.groups.stages)
        train_step.call_with_gradients(lambda: found.append(norms.row(norms.measure())))
        return train_step

    layouts.build_step, layouts.STEPS = build, 1  # type: ignore
    total = layouts.train(layout)["norms"][0]
    return found[0] | {"total": total}


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Callable[..., dict[str, Any]]:
    return cache(lambda model: pool.run(1, norms, Layout("one process", model=model))[0])


def test_the_norms_add_up_to_the_one_that_is_clipped_by(one_process) -> None:
    reference = one_process(Layout("").model)
    squares = sum(norm**2 for norm in reference["grad_norm"].values())
    assert squares**0.5 == pytest.approx(reference["total"], rel=1e-6)
    assert list(reference["grad_norm"])[:2] == ["tok_embeddings", "layers.0"]
    assert all(norm > 0 for norm in reference["weight_norm"].values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_norms_equal_those_of_one_process(layout: Layout, one_process, pool: Pool) -> None:
    reference = one_process(layout.model)
    for found in pool.run(layout.ranks, norms, layout):
        for kind in ("grad_norm", "weight_norm"):
            assert found[kind].keys() == reference[kind].keys()
            for block, expected in reference[kind].items():
                assert found[kind][block] == pytest.approx(expected, rel=1e-6), (kind, block)
