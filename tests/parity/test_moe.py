"""Experts on every layout compute what one process does; each token goes to the same experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support import parity_page
from tests.support.layouts import (
    BOUND,
    Layout,
    differences,
    each,
    fsdp,
    layouts_of,
    mesh_name,
    pp,
    schedule,
    tp,
    train,
)
from tests.support.planted import train_with
from tests.support.ranks import Pool
from titan.numerics.certify.steps import bounds

QWEN, DEEPSEEK = ("qwen3", "tiny_moe"), ("deepseek_v3", "tiny")
GPT_OSS = ("gpt_oss", "tiny")
COLUMNS = ("losses", "norms", "gradients", "weights")
# All balance terms at once, large enough to be seen in the gradients.
TERMS = (
    ("load_balance_coeff", 1e-2),
    ("sequence_balance_coeff", 1e-2),
    ("global_balance_coeff", 1e-2),
    ("router_z_loss_coeff", 1e-2),
)


def ep(n: int) -> tuple[tuple[str, int], ...]:
    return (("expert_parallel_degree", n),)


Options = dict[str, Any]
FULL: Options = {"recompute": "full"}
EIGHT_BITS: Options = {"optimizer": (("name", "AdamW8bit"),)}
BY_OP: Options = {"recompute": "selective"}
LAYOUTS = layouts_of("experts")


@each(LAYOUTS)
def test_equals_one_process(layout: Layout, references, pool: Pool, moe_table) -> None:
    layout, moe_table.expected = with_terms(layout), len(LAYOUTS)
    results = pool.run(layout.ranks, train, layout)
    differ, found = compare(
        results, one_process(layout, references), weights=weights_bound(layout)
    )
    assert not differ, (differ, found)
    moe_table.add(
        layout.name,
        mesh=mesh_name(layout),
        accumulation=layout.accumulation,
        differences={name: found.get(name, 0.0) for name in COLUMNS},
        bound=BOUND,
    )


def with_terms(layout: Layout) -> Layout:
    model = layout.model if layout.model in (DEEPSEEK, GPT_OSS) else QWEN
    return replace(layout, model=model, overrides=(*TERMS, *layout.overrides))


def one_process(layout: Layout, references) -> dict[str, Any]:
    same = ("documents", "blocks", "model", "overrides", "optimizer")
    return references.run(**{name: getattr(layout, name) for name in same})


def compare(
    results: list[dict[str, Any]], reference: dict[str, Any], *, weights: float = BOUND
) -> tuple[set[str], dict[str, float]]:
    """Return what differs, and by how much: loads and biases in any bit, everything else beyond the bound."""
    differ = set()
    for result in results:
        if not result["biases"].items() <= reference["biases"].items():
            differ.add("biases")
        # A rank with the embedding alone has no experts.
        steps = zip(result["loads"], reference["loads"], strict=bool(result["loads"]))
        if not all(step.items() <= expected.items() for step, expected in steps):
            differ.add("loads")
    found = differences(results, reference)
    if not results[0]["gradients"]:  # early steps use them up
        del found["gradients"]
    bounds = {**dict.fromkeys(found, BOUND), "weights": weights}
    return differ | {name for name in found if not found[name] < bounds[name]}, found


def weights_bound(layout: Layout) -> float:
    has_8bit_moments = layout.optimizer == EIGHT_BITS["optimizer"]
    limits = bounds(is_8bit=False, adds_in_parts=False, has_8bit_moments=has_8bit_moments)
    return limits["weights"]


# ---- faults that others had --------------------------------------------------------------------

PLANTED = [
    ("unreduced_router", "gradients", Layout("TP+SP", tp(2), settings=ep(2))),
    ("doubled_experts", "gradients", Layout("FSDP2", fsdp(2), settings=ep(2))),
    ("norm_without_experts", "norms", Layout("FSDP2", fsdp(2), settings=ep(2))),
    ("bias_of_one_rank", "biases", Layout("FSDP2", fsdp(2), settings=ep(2))),
    ("counted_in_evaluation", "loads", Layout("FSDP2", fsdp(2), settings=ep(2))),
    ("counted_in_forward", "loads", Layout("FSDP2", fsdp(2), settings=ep(2), **FULL)),
    ("wrong_tokens", "losses", Layout("TP+SP", tp(2), settings=ep(2))),
]


@pytest.mark.parametrize(("fault", "what", "layout"), PLANTED, ids=[row[0] for row in PLANTED])
def test_a_planted_fault_is_seen(
    fault: str, what: str, layout: Layout, references, pool: Pool
) -> None:
    layout = with_terms(layout)
    results = pool.run(layout.ranks, train_with, fault, layout)
    assert what in compare(results, one_process(layout, references))[0]


def test_an_evaluation_changes_nothing(references, pool: Pool) -> None:
    layout = with_terms(Layout("FSDP2", fsdp(2), settings=ep(2)))
    results = pool.run(layout.ranks, train_with, "evaluate_before_steps", layout)
    assert not compare(results, one_process(layout, references))[0]


def test_there_is_a_row_for_each_layout() -> None:
    names = {row.layout for row in parity_page.read() if row.table == "experts"}
    assert {row.name for row in LAYOUTS} <= names


# ---- routers that collapse ---------------------------------------------------------------------

SKEWED = ("all_to_one_expert", "all_to_one_rank", "none_to_one_rank")
# Between the experts' two exchanges of the backward pass, their reduction is issued.
PRONE_TO_DEADLOCK = [
    Layout("FSDP2, EP 4", fsdp(4), settings=ep(4)),
    Layout("FSDP2 x TP+SP, EP 4", (*fsdp(2), *tp(2)), settings=ep(4)),
    *(
        Layout(
            f"PP {name} x FSDP2, EP 2", (*pp(2), *fsdp(4)), settings=(*ep(2), *schedule(name))
        )
        for name in (
            "1F1B",
            "Interleaved1F1B",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
        )
    ),
    # It wants four microbatches.
    Layout(
        "PP DualPipeV x FSDP2, EP 2",
        (*pp(2), *fsdp(2)),
        settings=(*ep(2), *schedule("DualPipeV")),
    ),
]


@pytest.mark.parametrize(
    ("skew", "layout", "times"),
    [
        pytest.param(skew, layout, times, id=f"{skew}-{layout.name}-{times}", marks=marks)
        for layout in PRONE_TO_DEADLOCK
        for skew, times, marks in (
            *(
                (skew, 1, () if "pp" not in dict(layout.degrees) else pytest.mark.slow)
                for skew in SKEWED
            ),
            ("none_to_one_rank", 20, pytest.mark.slow),
        )
    ],
)
def test_a_collapsed_router_is_computed_right(
    skew: str, layout: Layout, times: int, pool: Pool
) -> None:
    layout = replace(
        layout, model=QWEN, overrides=(("top_k", 1), ("router_z_loss_coeff", 1e-2))
    )
    alone = Layout("one process", model=layout.model, overrides=layout.overrides)
    reference = pool.run(1, train_with, skew, alone)[0]
    for _ in range(times):
        results = pool.run(layout.ranks, train_with, skew, layout)
        # Without a choice the main loss says nothing to the router: its gradient is the z term's.
        assert not compare(results, reference)[0]
