"""Experts on every layout compute what one process does; each token goes to the same experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support import parity_page
from tests.support.layouts import (
    BOUND,
    CUT,
    FOUR_AXES,
    IN_UNITS,
    NEVER,
    REPLICAS,
    RING,
    TRACED,
    ULYSSES,
    ZERO_BUBBLE,
    Layout,
    cp,
    differences,
    fsdp,
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
BY_OP: Options = {"recompute": "selective"}
MUON: Options = {"optimizer": (("name", "Muon"), ("ns_dtype", "float32"))}
EIGHT_BITS: Options = {"optimizer": (("name", "AdamW8bit"),)}
EARLY: Options = {"optimizer": (("early_step_in_backward", True),)}
HALF: Options = {"overrides": (("num_experts", 4), ("top_k", 2))}
SLOW: Options = {"repeats": True}
LAYOUTS = [
    # Data parallelism
    Layout("one process", accumulation=2),
    Layout("FSDP2, EP 1", fsdp(2)),
    Layout("FSDP2, EP 2", fsdp(2), settings=ep(2)),
    Layout("FSDP2, EP 2, two blocks in a unit", fsdp(2), settings=(*ep(2), *IN_UNITS)),
    Layout("FSDP2, EP 2", fsdp(4), settings=ep(2), accumulation=2),
    Layout("FSDP2, EP 4", fsdp(4), settings=ep(4), **SLOW),
    Layout("FSDP2, EP 8", fsdp(8), settings=ep(8), **SLOW),
    Layout(
        "FSDP2 within experts, EP 2",
        fsdp(8),
        settings=ep(2),
        overrides=(("num_experts", 4),),
        **SLOW,
    ),
    Layout("FSDP2, EP 2, ZeRO-2", fsdp(4), settings=(*ep(2), *NEVER), **SLOW),
    Layout("HSDP, EP 2", (*REPLICAS, *fsdp(2)), settings=ep(2)),
    Layout("HSDP, EP 2", (*REPLICAS, *fsdp(4)), settings=ep(2), **SLOW),
    Layout("DDP, EP 1", REPLICAS, **SLOW),
    Layout("FSDP2, EP 2, parameters on the host", fsdp(2), settings=ep(2), offload=True),
    # Tensor and context parallelism
    Layout("TP+SP, EP 1", tp(2)),
    Layout("TP+SP, EP 2", tp(2), settings=ep(2)),
    Layout("DDP x TP+SP, EP 2", (*REPLICAS, *tp(2)), settings=ep(2)),
    Layout("FSDP2 x TP+SP, EP 2", (*fsdp(2), *tp(2)), settings=ep(2), **SLOW),
    Layout("FSDP2 x TP+SP, EP 4", (*fsdp(2), *tp(2)), settings=ep(4), accumulation=2),
    Layout("HSDP x TP+SP, EP 4", (*REPLICAS, *fsdp(2), *tp(2)), settings=ep(4), **SLOW),
    Layout("CP all-gather, EP 2", cp(2), settings=ep(2)),
    Layout("CP Ulysses, EP 2", cp(2), settings=(*ep(2), *ULYSSES), **SLOW),
    Layout("CP ring, EP 2", cp(2), settings=(*ep(2), *RING), documents=False),
    Layout("FSDP2 x CP, EP 4", (*fsdp(2), *cp(2)), settings=ep(4), **SLOW),
    Layout("CP x TP+SP, EP 4", (*cp(2), *tp(2)), settings=ep(4), **SLOW),
    Layout("FSDP2 x CP x TP+SP, EP 8", (*fsdp(2), *cp(2), *tp(2)), settings=ep(8), **SLOW),
    # Pipelines
    Layout("PP 1F1B, EP 1", pp(2), accumulation=2, **SLOW),
    Layout("PP 1F1B x FSDP2, EP 2", (*pp(2), *fsdp(2)), settings=ep(2)),
    *(
        Layout(
            f"PP {name} x FSDP2, EP 2",
            (*pp(2), *fsdp(2)),
            settings=(*ep(2), *schedule(name)),
            repeats=name != "InterleavedZeroBubble",
        )
        for name in (
            "GPipe",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        )
    ),
    Layout("PP x HSDP, EP 2", (*pp(2), *REPLICAS, *fsdp(2)), settings=ep(2), **SLOW),
    Layout("PP x CP, EP 2", (*pp(2), *cp(2)), settings=ep(2), **SLOW),
    Layout("PP x TP+SP, EP 2", (*pp(2), *tp(2)), settings=ep(2), **SLOW),
    Layout("PP x FSDP2 x TP+SP, EP 4", (*pp(2), *fsdp(2), *tp(2)), settings=ep(4), **SLOW),
    Layout("PP x FSDP2 x CP x TP+SP, EP 8", FOUR_AXES, settings=ep(8), **SLOW),
    # Recomputed, compiled
    Layout("FSDP2, EP 2, full AC", fsdp(2), settings=ep(2), **FULL),
    Layout("FSDP2, EP 2, selective AC", fsdp(2), settings=ep(2), **BY_OP),
    Layout("FSDP2 x TP+SP, EP 4, full AC", (*fsdp(2), *tp(2)), settings=ep(4), **FULL, **SLOW),
    Layout(
        "FSDP2 x TP+SP, EP 4, selective AC", (*fsdp(2), *tp(2)), settings=ep(4), **BY_OP, **SLOW
    ),
    Layout(
        "PP zero bubble x FSDP2, EP 2, full AC",
        (*pp(2), *fsdp(2)),
        settings=(*ep(2), *ZERO_BUBBLE),
        **FULL,
        **SLOW,
    ),
    Layout(
        "FSDP2, EP 2, activations on the host", fsdp(2), settings=ep(2), keep_in="host", **SLOW
    ),
    Layout("FSDP2, EP 2, compiled", fsdp(2), settings=ep(2), compiled=TRACED),
    Layout(
        "FSDP2 x TP+SP, EP 4, compiled",
        (*fsdp(2), *tp(2)),
        settings=ep(4),
        compiled=TRACED,
        **SLOW,
    ),
    Layout(
        "FSDP2, EP 2, compiled, full AC",
        fsdp(2),
        settings=ep(2),
        compiled=TRACED,
        **FULL,
        **SLOW,
    ),
    Layout(
        "FSDP2, EP 2, compiled, selective AC",
        fsdp(2),
        settings=ep(2),
        compiled=TRACED,
        **BY_OP,
        **SLOW,
    ),
    Layout(
        "FSDP2, EP 2, compiled, memory budget",
        fsdp(2),
        settings=ep(2),
        compiled=CUT,
        recompute="memory_budget",
        **SLOW,
    ),
    Layout(
        "PP x FSDP2 x CP x TP+SP, EP 8, compiled, selective AC",
        FOUR_AXES,
        settings=ep(8),
        compiled=TRACED,
        **BY_OP,
        **SLOW,
    ),
    # Optimizers
    Layout("FSDP2, EP 2, Muon", fsdp(4), settings=ep(2), **MUON),
    Layout(
        "FSDP2 within experts, EP 2, Muon",
        fsdp(8),
        settings=ep(2),
        overrides=(("num_experts", 4),),
        **MUON,
        **SLOW,
    ),
    Layout("FSDP2 x TP+SP, EP 2, Muon", (*fsdp(2), *tp(2)), settings=ep(2), **MUON, **SLOW),
    Layout("FSDP2, EP 2, 8-bit moments", fsdp(4), settings=ep(2), **EIGHT_BITS),
    Layout(
        "FSDP2 x TP+SP, EP 4, 8-bit moments",
        (*fsdp(2), *tp(2)),
        settings=ep(4),
        **EIGHT_BITS,
        **SLOW,
    ),
    Layout("FSDP2, EP 2, early step", fsdp(4), settings=ep(2), **EARLY),
    # Latent attention, a shared expert, groups, and a dense block
    *(
        Layout(f"latent {name}", degrees, settings=settings, model=DEEPSEEK, **options)
        for name, degrees, settings, options in (
            ("FSDP2, EP 2", fsdp(2), ep(2), {}),
            ("FSDP2, EP 2", fsdp(4), ep(2), SLOW | {"accumulation": 2}),
            ("FSDP2, EP 8", fsdp(8), ep(8), SLOW),
            ("HSDP, EP 2", (*REPLICAS, *fsdp(2)), ep(2), SLOW),
            ("TP+SP, EP 2", tp(2), ep(2), SLOW),
            ("FSDP2 x TP+SP, EP 4", (*fsdp(2), *tp(2)), ep(4), {}),
            ("CP all-gather, EP 2", cp(2), ep(2), {}),
            ("CP Ulysses, EP 2", cp(2), (*ep(2), *ULYSSES), SLOW),
            ("CP ring, EP 2", cp(2), (*ep(2), *RING), SLOW | {"documents": False}),
            ("CP x TP+SP, EP 4", (*cp(2), *tp(2)), ep(4), SLOW),
            ("PP 1F1B x FSDP2, EP 2", (*pp(2), *fsdp(2)), ep(2), {}),
            ("PP zero bubble x FSDP2, EP 2", (*pp(2), *fsdp(2)), (*ep(2), *ZERO_BUBBLE), SLOW),
            ("PP DualPipeV, EP 1", pp(2), schedule("DualPipeV"), SLOW),
            ("PP x FSDP2 x TP+SP, EP 4", (*pp(2), *fsdp(2), *tp(2)), ep(4), SLOW),
            ("FSDP2, EP 2, full AC", fsdp(2), ep(2), {**FULL, **SLOW}),
            ("FSDP2 x TP+SP, EP 2, selective AC", (*fsdp(2), *tp(2)), ep(2), {**BY_OP, **SLOW}),
            (
                "FSDP2 x TP+SP, EP 4, compiled",
                (*fsdp(2), *tp(2)),
                ep(4),
                SLOW | {"compiled": TRACED},
            ),
            ("FSDP2, EP 2, Muon", fsdp(4), ep(2), {**MUON, **SLOW}),
            ("FSDP2, EP 2, 8-bit moments", fsdp(4), ep(2), {**EIGHT_BITS, **SLOW}),
        )
    ),
    # Windows, sinks, and biases everywhere
    *(
        Layout(f"sinks {name}", degrees, settings=settings, model=GPT_OSS, **options)
        for name, degrees, settings, options in (
            ("FSDP2, EP 2", fsdp(2), ep(2), {}),
            ("FSDP2 within experts, EP 2", fsdp(8), ep(2), {**HALF, **SLOW}),
            ("HSDP, EP 2", (*REPLICAS, *fsdp(2)), ep(2), SLOW),
            ("TP+SP, EP 2", tp(2), ep(2), {}),
            ("TP+SP, EP 1, more ranks than key/value heads", tp(4), (), SLOW),
            ("FSDP2 x TP+SP, EP 4", (*fsdp(2), *tp(2)), ep(4), SLOW | {"accumulation": 2}),
            ("CP all-gather, EP 2", cp(2), ep(2), {}),
            ("CP Ulysses, EP 2", cp(2), (*ep(2), *ULYSSES), SLOW),
            ("CP ring, EP 2", cp(2), (*ep(2), *RING), SLOW | {"documents": False}),
            ("CP ring, EP 2, document masks", cp(2), (*ep(2), *RING), SLOW),
            ("CP x TP+SP, EP 4", (*cp(2), *tp(2)), ep(4), SLOW),
            ("PP 1F1B, EP 1", pp(2), (), SLOW),
            ("PP zero bubble x FSDP2, EP 2", (*pp(2), *fsdp(2)), (*ep(2), *ZERO_BUBBLE), SLOW),
            ("PP x FSDP2 x TP+SP, EP 4", (*pp(2), *fsdp(2), *tp(2)), ep(4), SLOW),
            ("FSDP2, EP 2, compiled", fsdp(2), ep(2), SLOW | {"compiled": TRACED}),
            (
                "FSDP2, EP 2, compiled, selective AC",
                fsdp(2),
                ep(2),
                SLOW | BY_OP | {"compiled": TRACED},
            ),
            (
                "PP x FSDP2 x CP x TP+SP, EP 8, compiled, selective AC",
                FOUR_AXES,
                ep(8),
                SLOW | BY_OP | {"compiled": TRACED},
            ),
            ("FSDP2 x TP+SP, EP 2, full AC", (*fsdp(2), *tp(2)), ep(2), {**FULL, **SLOW}),
            ("FSDP2, EP 2, Muon", fsdp(4), ep(2), {**MUON, **SLOW}),
        )
    ),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout,
            id=f"{layout.name}-{layout.ranks}x{layout.accumulation}",
            marks=[pytest.mark.slow] if layout.repeats else [],
        )
        for layout in LAYOUTS
    ],
)
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
