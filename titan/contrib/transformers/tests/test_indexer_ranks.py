"""Models with indexers on layouts, with the indexer's loss, against one process: loss, norm, each gradient and each weight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.hf_families import std_of
from tests.support.hf_sizes import families, overrides_of
from tests.support.layouts import (
    ALWAYS,
    BOUND,
    GLOBAL_BATCH,
    RING,
    SEQUENCE,
    UNBALANCED,
    VOCABULARY,
    ZERO_BUBBLE,
    Layout,
    cp,
    fsdp,
    job_of,
    largest,
    pp,
    tp,
)
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.contrib.transformers.section import SparseAttentionSection
from titan.contrib.transformers.sparse_attention import SparseAttention
from titan.numerics.certify.steps import WHAT, micro_batches, record
from titan.parallel import build_mesh, initialize
from titan.parallel.init_weights import canonical_name

KINDS = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text")
EP = (("expert_parallel_degree", 2),)
STEPS = 3
# The indexer's gradients count as much as the others, so that the norm and the weights show them.
LEARNS = {"loss_coeff": 1.0}


def model_of(folder: Path, kind: str) -> tuple[str, str]:
    architecture = families()[kind]
    fields = overrides_of(architecture) | {"vocab_size": VOCABULARY}
    config = getattr(transformers, architecture).config_class(**fields)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return "transformers", str(folder)


def of_indexers(name: str) -> float:
    """With small weights, both distributions are next to uniform, and their difference, the gradient, is mostly rounding."""
    return 1.0 if ".indexer." in name and "norm" not in name else std_of(name)


def tied(name: str) -> Any:
    """Keys of the indexer that lie in one direction, and in none for MiniMax M3: most scores are 0, whatever rounding does."""
    if name.endswith("indexer.k_norm.weight"):
        return lambda _: -torch.ones(16)
    return None if name.endswith("indexer.k_norm.bias") else of_indexers(name)


class Choices:
    """Choices of each layer, of all positions, and whether queries had more keys with the last chosen score than places."""

    def __init__(self, sparse: dict[str, SparseAttention]) -> None:
        self.found: dict[str, list[Tensor]] = {}
        self.ties: list[Tensor] = []
        for name, module in sparse.items():
            module.choose = partial(self.choose, name, module, module.choose)

    @torch.no_grad()
    def choose(self, name: str, sparse: Any, choose: Any, *args: Any) -> Tensor:
        chosen, (q, k, w, to) = choose(*args), args
        rows = slice(None)
        scores = sparse.score(q, k, w).masked_fill(~to.mask(rows), -torch.inf)
        scores = scores if to.blocks_BT is None else sparse._pool(scores, to, rows)
        is_in = torch.zeros_like(scores).scatter(-1, chosen.long(), 1).bool()
        last = scores.masked_fill(~is_in, torch.inf).amin(-1, keepdim=True)
        equal = (scores == last) & last.isfinite()
        is_left = equal & ~is_in
        assert not (is_left.cumsum(-1).bool() & equal & is_in).any()  # the lowest index first
        self.ties.append(is_left.any(-1).float().mean())
        self.found.setdefault(name, []).append(sparse.whole(chosen, 2).sort().values)
        return chosen


def train(layout: Layout, section: dict[str, Any], std: Any = of_indexers) -> dict[str, Any]:
    """Run on each rank. With the sums of each layer: loss of the indexer, mass in the choice, queries."""
    mesh = build_mesh("cpu", **dict(layout.degrees))
    job = job_of(layout, steps=STEPS)
    job = job.with_sections({"sparse_attention": SparseAttentionSection(**section)})
    step = build_step(job, mesh)
    for part in step.model_parts:
        initialize(part, seed=0, std_of=std)
    batches = (layout.batch(layout, number) for number in range(1, STEPS + 1))
    sparse = {
        canonical_name(name): module
        for part in step.model_parts
        for name, module in part.named_modules()
        if isinstance(module, SparseAttention)
    }
    choices = Choices(sparse)
    found = record(step, (micro_batches(b, mesh, layout.accumulation) for b in batches))
    sums = {
        name: torch.as_tensor(module.sums, dtype=torch.float64)
        for name, module in sparse.items()
    }
    for name, module in step.balance.counting.items():
        if isinstance(module, SparseAttention):
            assert module.num_tokens == GLOBAL_BATCH * SEQUENCE, name
    assert sums.keys() <= step.balance.counting.keys()
    for part in sums.values():
        if step.groups.tokens is not None and part.ndim:
            torch.distributed.all_reduce(part, group=step.groups.tokens)
    chosen = {name: torch.cat(each) for name, each in choices.found.items()}
    found |= {"chosen": chosen, "ties": sum(choices.ties) / len(choices.ties)}
    return found | {"sums": {name: x for name, x in sums.items() if x.ndim}}


LAYOUTS = [
    Layout("four micro-batches", accumulation=4),
    Layout("FSDP2", fsdp(2), 4),
    Layout("FSDP2, gathered again", fsdp(2), settings=ALWAYS, recompute="full"),
    Layout("DDP", (("dp_replicate", 2),), 2),
    Layout("TP+SP", tp(2)),
    Layout("TP+SP, four micro-batches", tp(2), 4, recompute="selective"),
    Layout("CP", cp(2)),
    Layout("CP, ring, contiguous", cp(2), 4, settings=(*RING, *UNBALANCED)),
    Layout("PP", pp(2), 4),
    Layout("FSDP2, EP", fsdp(2), settings=EP),
    Layout("compiled", accumulation=2, compiled="aot_eager"),
    Layout("compiled, recomputed", compiled="aot_eager", recompute="full"),
    Layout("FSDP2 x TP", (*fsdp(2), *tp(2)), recompute="full"),
    Layout("CP x TP", (*cp(2), *tp(2)), 4),
    Layout("PP x CP", (*pp(2), *cp(2)), 4),
]
# The others differ from GLM-5.2 in what an indexer scores, and in which heads share a choice. One has four micro-batches where the other has one.
TEN = ["FSDP2", "DDP", "TP+SP", "CP", "CP, ring, contiguous", "PP", "FSDP2, EP"]
TEN += ["FSDP2 x TP", "CP x TP", "PP x CP"]
ROWS = [("glm_moe_dsa", row) for row in LAYOUTS]
# Stages of one layer, of which GLM-5.2 has none that reads another's choice.
ROWS += [("deepseek_v32", Layout("PP, zero bubble", pp(2), 4, settings=ZERO_BUBBLE))]
ROWS += [
    (kind, replace(row, accumulation=(1, 4)[(TEN.index(row.name) + number) % 2]))
    for number, kind in enumerate(("deepseek_v32", "minimax_m3_vl_text"))
    for row in LAYOUTS
    if row.name in TEN
]
DENSE_KEYS = [row for row in LAYOUTS if row.name in ("FSDP2", "DDP", "PP", "CP x TP")]


TIED = [row for row in LAYOUTS if row.name in ("TP+SP", "CP")]
TIED += [Layout("PP, recomputed", pp(2), 4, recompute="full")]


def check(pool: Pool, layout: Layout, alone: dict[str, Any], *how: Any) -> list[dict[str, Any]]:
    results = pool.run(layout.ranks, train, layout, *how)
    found = {what: largest(results, alone, what) for what in WHAT}
    assert all(value < BOUND for value in found.values()), found
    for name, expected in alone["sums"].items():
        held = [result["sums"][name] for result in results if name in result["sums"]]
        for sums in held:
            # A schedule that splits the backward pass adds up each query twice.
            means, alone_means = sums / sums[2], expected / expected[2]
            torch.testing.assert_close(means, alone_means, rtol=1e-5, atol=1e-7)
    return results


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Any] = {}

    def get(kind: str, *how: Any) -> tuple[tuple[str, str], dict[str, Any]]:
        key = f"{kind} {how}"
        if key not in known:
            model = model_of(tmp_path_factory.mktemp("model"), kind)
            layout = Layout("one process", model=model)
            known[key] = model, pool.run(1, train, layout, *how)[0]
        return known[key]

    return get


@pytest.mark.parametrize(("kind", "layout"), ROWS, ids=lambda x: getattr(x, "name", x))
def test_equals_one_process(kind: str, layout: Layout, alone: Any, pool: Pool) -> None:
    model, expected = alone(kind, LEARNS)
    check(pool, replace(layout, model=model), expected, LEARNS)


@pytest.mark.parametrize("layout", TIED, ids=lambda layout: layout.name)
@pytest.mark.parametrize("kind", KINDS)
def test_planted_ties(kind: str, layout: Layout, alone: Any, pool: Pool) -> None:
    """The earliest of keys with equal scores are chosen, the same on each layout, and once: not again in a recomputation."""
    model, expected = alone(kind, LEARNS, tied)
    assert expected["ties"] > 0.1
    results = check(pool, replace(layout, model=model), expected, LEARNS, tied)
    for result in results:
        for name, chosen in result["chosen"].items():
            assert torch.equal(chosen, expected["chosen"][name]), name


@pytest.mark.parametrize("layout", DENSE_KEYS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["indexer", "dense"])
def test_over_all_keys_too(
    stage: str, kind: str, layout: Layout, alone: Any, pool: Pool
) -> None:
    """In the stage "dense" indexers have no gradients, and the others are the same on any layout."""
    section = {**LEARNS, "stages": [stage]}
    model, expected = alone(kind, section)
    check(pool, replace(layout, model=model), expected, section)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_the_model_is_not_trained_by_the_loss(kind: str, alone: Any) -> None:
    """Nor is an indexer trained by anything else, and its gradients are zeros then, and not missing."""
    (_, learns), (_, without) = (alone(kind, {"loss_coeff": value}) for value in (1.0, 0.0))
    assert learns["gradients"].keys() == without["gradients"].keys()
    for name, gradient in without["gradients"].items():
        other = learns["gradients"][name]
        if ".indexer." in name:
            assert other.any() and not gradient.any(), name
        else:
            assert torch.equal(gradient, other), name
