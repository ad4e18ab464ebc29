"""Two micro-batches that take turns compute what they compute one after the other, to the last bit, and what one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.parity.conftest import References
from tests.parity.test_moe import BY_OP, DEEPSEEK, FULL, GPT_OSS, TERMS, ep
from tests.support.layouts import (
    BOUND,
    IN_UNITS,
    NEVER,
    REPLICAS,
    RING,
    TRACED,
    ULYSSES,
    Layout,
    cp,
    fsdp,
    tp,
    train,
)
from tests.support.planted import train_with
from tests.support.ranks import Pool, RankFailed
from titan.models.common.moe import MoE
from titan.numerics.certify.steps import WHAT, largest

QWEN = ("qwen3", "tiny_moe")
OVERLAP, ONCE = (("expert_overlap", True),), (("expert_overlap_reduce_once", True),)
STEPS = 2  # the first update, and a step from weights that it has changed
SLOW: dict[str, Any] = {"repeats": True}
LAYOUTS = [
    Layout(
        name,
        degrees,
        settings=(*ep(2), *settings),
        **{"model": QWEN, "accumulation": 2, **options},  # pyrefly: ignore[bad-argument-type]
    )
    for name, degrees, settings, options in (
        ("FSDP2", fsdp(2), (), {}),
        ("FSDP2, four micro-batches", fsdp(2), (), {"accumulation": 4, **SLOW}),
        ("FSDP2 within and beside experts", fsdp(4), (), {}),
        ("FSDP2, ZeRO-2", fsdp(4), NEVER, SLOW),
        ("FSDP2, two blocks in a unit", fsdp(2), IN_UNITS, SLOW),
        ("FSDP2, two units ahead", fsdp(4), (("fsdp_prefetch", 2),), SLOW),
        ("FSDP2, parameters on the host", fsdp(2), (), {"offload": True, **SLOW}),
        ("HSDP", (*REPLICAS, *fsdp(2)), (), {"accumulation": 2}),
        ("TP+SP", tp(2), (), SLOW),
        ("DDP x TP+SP", (*REPLICAS, *tp(2)), (), SLOW),
        ("FSDP2 x TP+SP, op AC", (*fsdp(2), *tp(2)), (), BY_OP),
        ("FSDP2 x TP+SP, EP 4", (*fsdp(2), *tp(2)), ep(4), SLOW),
        ("CP all-gather, op AC", cp(2), (), {**BY_OP, **SLOW}),
        ("CP ring", cp(2), RING, {"documents": False, **SLOW}),
        ("CP Ulysses x FSDP2", (*cp(2), *fsdp(2)), ULYSSES, SLOW),
        ("CP x TP+SP, full AC", (*cp(2), *tp(2)), (), {**FULL, **SLOW}),
        ("FSDP2, full AC on the host", fsdp(2), (), {**FULL, "keep_in": "host", **SLOW}),
        ("FSDP2, compiled, op AC", fsdp(2), (), {**BY_OP, "compiled": TRACED}),
        ("FSDP2 x TP+SP, compiled, full AC", (*fsdp(2), *tp(2)), (), {**FULL, "compiled": TRACED, **SLOW}),
        ("shared expert, FSDP2, full AC", fsdp(2), (), {"model": DEEPSEEK, **FULL}),
        ("shared expert, two targets, FSDP2", fsdp(2), (), {"model": DEEPSEEK, "overrides": (("num_mtp_modules", 2),), **SLOW}),
        ("shared expert, CP x TP+SP", (*cp(2), *tp(2)), (), {"model": DEEPSEEK, **SLOW}),
        ("sinks and biases, FSDP2 x TP+SP", (*fsdp(2), *tp(2)), (), {"model": GPT_OSS, **SLOW}),
    )
]  # fmt: skip


def rows(layouts: list[Layout]) -> list[Any]:
    return [
        pytest.param(layout, id=layout.name, marks=[pytest.mark.slow] if layout.repeats else [])
        for layout in layouts
    ]


@pytest.mark.parametrize("layout", rows(LAYOUTS))
def test_no_bit_changes(layout: Layout, pool: Pool, references: References) -> None:
    layout = replace(layout, overrides=(*TERMS, *layout.overrides))
    alone = pool.run(layout.ranks, train, layout, "float32", STEPS)
    paired = pool.run(layout.ranks, train, overlapped(layout), "float32", STEPS)
    assert [*map(different_bits, alone, paired)] == [[]] * layout.ranks
    require_equal(paired, layout, references)


def test_no_bit_changes_in_transformers_experts(pool: Pool, references: References) -> None:
    """Its experts' module exchanges tokens itself, so that both micro-batches are within it at once."""
    model = ("transformers", str(Path(__file__).with_name("qwen3_moe.json")))
    layout = Layout(
        "FSDP2", fsdp(2), settings=ep(2), accumulation=2, model=model, documents=False
    )
    alone = pool.run(2, train, layout, "float32", STEPS)
    paired = pool.run(2, train, overlapped(layout), "float32", STEPS)
    assert [*map(different_bits, alone, paired)] == [[], []]
    require_equal(paired, layout, references)


def train_with_draws(layout: Layout) -> None:
    """Train a model that multiplies by random numbers in a function, where no module tells."""
    combine = MoE.combine

    def draw(self: MoE, *args: Tensor) -> Tensor:
        return combine(self, *args) * torch.rand(())

    with patch.object(MoE, "combine", draw):
        train(layout, "float32", 1)


def test_random_numbers_of_a_function_are_refused(pool: Pool) -> None:
    text = r"draws random numbers, .* parallelism\.expert_overlap = false"
    with pytest.raises(RankFailed, match=text):
        pool.run(2, train_with_draws, overlapped(LAYOUTS[0]))


# Which reduce gradients over ranks, except that the compiled ones would show nothing more.
REDUCED = [row for row in LAYOUTS if {*dict(row.degrees)} - {"cp", "tp"} and not row.compiled]


@pytest.mark.parametrize("layout", rows(REDUCED))
def test_one_reduction_for_both(layout: Layout, pool: Pool, references: References) -> None:
    layout = replace(layout, overrides=(*TERMS, *layout.overrides))
    once = pool.run(layout.ranks, train, overlapped(layout, *ONCE), "float32", STEPS)
    require_equal(once, layout, references)


@pytest.mark.parametrize(
    "fault",
    ["lost_row", "row_sent_twice", "mixed_gradients", "second_before_first", "freed_early"],
)
def test_a_planted_fault_is_seen(fault: str, pool: Pool) -> None:
    layout = replace(LAYOUTS[0], accumulation=4)
    alone = pool.run(2, train, layout, "float32", STEPS)
    try:
        found = pool.run(2, train_with, fault, overlapped(layout), STEPS)
    except Exception as error:
        assert fault == "freed_early" and "storage" in str(error)
        return
    assert all(map(different_bits, alone, found))


def overlapped(layout: Layout, *more: Any) -> Layout:
    return replace(layout, settings=(*layout.settings, *OVERLAP, *more))


def require_equal(
    results: list[dict[str, Any]], layout: Layout, references: References
) -> None:
    same = ("documents", "blocks", "model", "overrides", "optimizer")
    reference = references.run(steps=STEPS, **{name: getattr(layout, name) for name in same})
    found = {name: largest(results, reference, name) for name in WHAT}
    assert max(found.values()) < BOUND, found
    assert all(result["loads"] == reference["loads"] for result in results)


def different_bits(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Return what differs in any bit between two results of a rank."""
    numbers = [k for k in ("losses", "norms", "loads", "biases") if one[k] != two[k]]
    assert one["gradients"].keys() == two["gradients"].keys() and one["gradients"]
    return numbers + [
        f"{kind} of {name}"
        for kind in ("gradients", "weights")
        for name, value in one[kind].items()
        if not torch.equal(value, two[kind][name])
    ]
