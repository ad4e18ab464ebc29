"""Which techniques a layout combines, and layouts that together combine every three of them.

Techniques are values of factors: a layout has at most one of each factor. `drawn` is deterministic, so that a failing row can be
named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import Any

from tests.support.layouts import (
    CUT,
    GLOBAL_BATCH,
    NEVER,
    RING,
    TRACED,
    ULYSSES,
    Layout,
    job_of,
    schedule,
)
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.contrib.chat.tests.test_chat import chat_batch
from titan.data.base import TensorBatch
from titan.losses.loss import IGNORED

# Two modules, of a weight that shows in the gradients. Four stages have two blocks each, and both modules are in the last:
# the ends count for nothing.
MTP = (("num_mtp_modules", 2), ("mtp_coeff", 1.0))
ENDS = tuple((f"pipeline_parallel_{end}_stage_less_layers", 0) for end in ("first", "last"))


def answers_alone(layout: Layout, step: int) -> TensorBatch:
    """Return packed conversations, with loss on their answers. The first row has none, so that a microbatch counts no token."""
    batch = chat_batch(layout, step)
    batch.labels_BS[0] = IGNORED
    return batch


# factor -> technique -> what it changes of a layout. "degrees" and "settings" are added, the rest is replaced.
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "data parallelism": {
        "FSDP2": {"degrees": (("dp_shard", 2),)},
        "DDP": {"degrees": (("dp_replicate", 2),)},
        "HSDP": {"degrees": (("dp_replicate", 2), ("dp_shard", 2))},
    },
    "resharding": {"ZeRO-2": {"settings": NEVER}},
    "tensor parallelism": {"TP": {"degrees": (("tp", 2),)}},
    "context parallelism": {
        "CP all-gather": {"degrees": (("cp", 2),)},
        "CP ring": {"degrees": (("cp", 2),), "settings": RING},
        "CP Ulysses": {"degrees": (("cp", 2),), "settings": ULYSSES},
    },
    "pipeline": {
        name: {"degrees": (("pp", 2),), "settings": schedule(name)}
        for name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    },
    "experts": {
        "experts": {"model": ("qwen3", "tiny_moe")},
        "EP": {"model": ("qwen3", "tiny_moe"), "settings": (("expert_parallel_degree", 2),)},
    },
    "recomputation": {
        "full AC": {"recompute": "full"},
        "op AC": {"recompute": "selective"},
        "AC of every second block": {"recompute": "2"},
        "memory budget": {"recompute": "memory_budget", "compiled": CUT},
    },
    "compile": {"compile": {"compiled": TRACED}},
    "float8": {"float8": {"float8": "rowwise"}},
    "masks": {
        "document masks": {"documents": True},
        "answers": {"documents": True, "batch": answers_alone},
    },
    "further targets": {"MTP": {"overrides": MTP, "settings": ENDS, "blocks": 6}},
    "accumulation": {"accumulation": {"accumulation": 2}},
    "optimizer": {"Muon": {"optimizer": (("name", "Muon"), ("ns_dtype", "float32"))}},
    "frozen": {
        "frozen": {"freeze": ("layers.*.attention_norm.*", "layers.*.attention.wv.weight")}
    },
    "weights": {"weights on the host": {"offload": True}},
}
FACTOR_OF = {technique: factor for factor, values in FACTORS.items() for technique in values}
MOST_RANKS = 8
# What is no factor, since it is not of one step: with what other tests cross it, and what nothing crosses with it.
BESIDE = {
    "phases": "tests/test_phases.py crosses them with FSDP2, CP, PP, TP x FSDP2 with accumulation; and in one run with a blend of "
    "conversations, MTP, the average of the weights and PP x FSDP2. Nothing crosses them with experts, recomputation, compile, "
    "float8, Muon, frozen parameters or the host",
    "conversations": "the technique 'answers' is their batch in every triple. tests/test_phases.py blends, stops and resumes runs on "
    "them with positions that restart at each document (data.reset_positions), on one process and PP x FSDP2. No triple has such positions",
    "linear attention": "tests/models/test_hybrids.py crosses Qwen3-Next and Granite's hybrid with FSDP2, TP, CP of 2 and 4 by all-gather, "
    "ring and Ulysses, contiguous parts, 1F1B, Interleaved1F1B, EP, documents with positions that restart, compile, full and op AC, up to "
    "three at a time. Nothing crosses it with DDP, HSDP, ZeRO-2, InterleavedZeroBubble, float8, MTP, Muon, "
    "frozen parameters or the host; accumulation only through pipelines",
    "average of the weights": "titan/contrib/averages/tests/test_average.py crosses it with FSDP2, DDP, HSDP, TP, CP and 1F1B, one at a time. Nothing "
    "crosses it with experts, compile, float8, Muon, frozen parameters or weights on the host",
}


def layout_of(techniques: Iterable[str]) -> Layout | None:
    """Return the layout with these techniques; None if two of them exclude each other here: one factor, too many ranks."""
    chosen = sorted(techniques, key=[*FACTOR_OF].index)
    if len({FACTOR_OF[t] for t in chosen}) < len(chosen):
        return None
    fields: dict[str, Any] = {"documents": False}
    for technique in chosen:
        for name, value in FACTORS[FACTOR_OF[technique]][technique].items():
            fields[name] = (
                (*fields.get(name, ()), *value) if name in ("degrees", "settings") else value
            )
    layout = Layout(", ".join(chosen), **fields)
    return layout if layout.ranks <= MOST_RANKS else None


def techniques_of(layout: Layout) -> frozenset[str]:
    """Return the techniques of a layout that was written by hand."""
    degrees = {axis for axis, degree in layout.degrees if degree > 1}
    settings = dict(layout.settings)
    has_experts = layout.model[0] != "llama3"
    rotate = settings.get("context_parallel_rotate_method", "allgather")
    data = {"dp_shard": "FSDP2", "dp_replicate": "DDP"}
    found = {
        "HSDP" if data.keys() <= degrees else next((data[a] for a in data if a in degrees), ""),
        "ZeRO-2" if settings.get("fsdp_reshard_after_forward") == "never" else "",
        "TP" if "tp" in degrees else "",
        {"allgather": "CP all-gather", "ring": "CP ring", "ulysses": "CP Ulysses"}[rotate] if "cp" in degrees else "",
        settings.get("pipeline_parallel_schedule", "1F1B") if "pp" in degrees else "",
        ("EP" if settings.get("expert_parallel_degree", 1) > 1 else "experts") if has_experts else "",
        {"full": "full AC", "selective": "op AC", "2": "AC of every second block"}.get(layout.recompute, ""),
        "memory budget" if layout.recompute == "memory_budget" else "",
        "compile" if layout.compiled else "",
        "float8" if layout.float8 else "",
        "" if not layout.documents else "answers" if layout.batch is answers_alone else "document masks",
        "MTP" if "num_mtp_modules" in dict(layout.overrides) else "",
        "accumulation" if layout.accumulation > 1 else "",
        "Muon" if dict(layout.optimizer).get("name") == "Muon" else "",
        "frozen" if layout.freeze else "",
        "weights on the host" if layout.offload else "",
    }  # fmt: skip
    return frozenset(found & FACTOR_OF.keys())


@cache
def refusal(techniques: frozenset[str]) -> str:
    """Return why titan refuses a job with these techniques; "" if it does not."""
    layout = layout_of(techniques)
    if layout is None:
        return f"two of one kind, or more than {MOST_RANKS} ranks"
    sizes = dict(layout.degrees)
    if GLOBAL_BATCH % (
        sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1) * layout.accumulation
    ):
        return "the batch does not divide"
    try:
        check_to_run(job_of(layout), world_size=layout.ranks)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""


def triples() -> Iterator[frozenset[str]]:
    """Return every three techniques of three factors."""
    for three in combinations(FACTOR_OF, 3):
        if len({FACTOR_OF[t] for t in three}) == 3:
            yield frozenset(three)


def triples_within(techniques: Iterable[str]) -> set[frozenset[str]]:
    return {frozenset(three) for three in combinations(sorted(techniques), 3)}


# What techniques may need to be allowed.
HELPERS = ((), ("compile",), ("FSDP2",), ("experts",), ("compile", "FSDP2"))


def possible(three: frozenset[str]) -> frozenset[str] | None:
    """Return the smallest set of techniques with these three that titan does not refuse; None if there is none."""
    for helpers in HELPERS:
        if not refusal(three.union(helpers)):
            return three.union(helpers)
    return None


@cache
def drawn() -> tuple[Layout, ...]:
    """Return layouts that together have every possible triple, each with as many techniques as it takes."""
    every = {three: base for three in triples() if (base := possible(three)) is not None}
    rows: list[Layout] = []
    # Float8 rounds away small faults of others, so all that does without it is crossed first.
    for rounds in (False, True):
        left = {three: base for three, base in every.items() if ("float8" in three) is rounds}
        rows += _cover(left, [t for t in FACTOR_OF if rounds or t != "float8"])
    return tuple(rows)


def _cover(
    left: dict[frozenset[str], frozenset[str]], techniques: Sequence[str]
) -> Iterator[Layout]:
    """Return layouts that have every triple of `left`, which is from a triple to techniques that titan takes with it."""
    while left:
        chosen = next(iter(left.values()))
        # Add what covers the most of what is left, as long as titan takes it.
        while True:
            gains = [
                (len((triples_within(more) & left.keys()) - triples_within(chosen)), technique)
                for technique in techniques
                if technique not in chosen and not refusal(more := chosen | {technique})
            ]
            if not gains or max(gains)[0] == 0:
                break
            chosen = chosen | {max(gains)[1]}
        for three in triples_within(chosen):
            left.pop(three, None)
        layout = layout_of(chosen)
        assert layout is not None
        yield layout
