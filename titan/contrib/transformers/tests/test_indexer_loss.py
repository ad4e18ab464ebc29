"""The choice of keys, and the indexer's loss, against plain references written from the papers' formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.hf_families import std_of, twin_with
from tests.support.hf_sizes import families, overrides_of
from titan.config.schema import ModelSection
from titan.contrib.transformers import build_model
from titan.contrib.transformers import sparse_attention as module
from titan.contrib.transformers.sparse_attention import SparseAttention
from titan.models.common.attention import InnerAttention
from titan.parallel import initialize, materialize
from titan.parallel.module_kinds import modules_of

B, S, H, K, V = 2, 23, 4, 6, 5
IDS = torch.tensor([[0] * 9 + [1] + [2] * 13, [0] * 23])
TOKENS: dict[str, Any] = {"keys": 5, "scale": 8**-0.5}
BLOCKS: dict[str, Any] = {"keys": 2, "block": 3, "local": 1, "scale": 8**-0.5}


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


def inputs(kind: dict[str, Any], *, ties: bool = False) -> list[Tensor | None]:
    """Queries, keys and values of attention, then those of the indexer, and its weights."""
    is_blocks = "block" in kind
    groups = 2 if is_blocks else H
    heads = 2 if is_blocks else 3
    qkv = [
        drawn(B, H, S, K, seed=1),
        drawn(B, groups, S, K, seed=2),
        drawn(B, groups, S, V, seed=3),
    ]
    index = [drawn(B, S, heads, 8, seed=4), drawn(B, S, 8, seed=5)]
    if (
        ties
    ):  # small whole numbers: many sums are equal, many are 0, and some of these have a sign
        index = [x.sign() * (x.abs() > 1) for x in index]
    weights = None if is_blocks else drawn(B, S, heads, seed=6)
    if ties and weights is not None:
        weights = weights.sign()
    return [*qkv, *index, weights]


def plain_scores(kind: dict[str, Any], q: Tensor, k: Tensor, w: Tensor | None) -> Tensor:
    """I[b, g, t, s], one by one."""
    if w is None:
        return torch.einsum("btgd,bsd->bgts", q, k)
    dots = torch.relu(torch.einsum("bthd,bsd->bhts", q, k) * kind["scale"])
    return torch.einsum("bth,bhts->bts", w, dots)[:, None]


def seen(ids: Tensor | None) -> Tensor:
    """(B, 1, S, S)"""
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S)
    return causal if ids is None else causal & (ids[:, None, :, None] == ids[:, None, None])


def plain_choice(kind: dict[str, Any], scores: Tensor, ids: Tensor | None) -> Tensor:
    """Loop over the queries of each document alone: (B, G, S, S) booleans."""
    chosen, scores = torch.zeros(scores.shape, dtype=torch.bool), scores.detach()
    size = kind.get("block", 1)
    for b in range(B):
        for g in range(scores.shape[1]):
            for t in range(S):
                first = 0 if ids is None else int((ids[b] == ids[b, t]).nonzero()[0])
                keys = range(first, t + 1)
                blocks: dict[int, float] = {}
                for s in keys:
                    block = (s - first) // size
                    blocks[block] = max(
                        blocks.get(block, -torch.inf), float(scores[b, g, t, s])
                    )
                for block in range(
                    max(blocks), max(-1, max(blocks) - kind.get("local", 0)), -1
                ):
                    blocks[block] = torch.inf
                # sorted() keeps the order of equal ones.
                best = sorted(blocks, key=lambda block: -blocks[block])[: kind["keys"]]
                for s in keys:
                    chosen[b, g, t, s] = (s - first) // size in best
    return chosen


def titan(
    kind: dict[str, Any],
    tensors: list[Any],
    ids: Tensor | None,
    *,
    rows: int = 7,
    **settings: Any,
) -> tuple[Tensor, SparseAttention]:
    sparse = SparseAttention(**kind)
    sparse.heads, sparse.documents = H, ids
    for name, value in settings.items():
        setattr(sparse, name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS", rows)
        q, k, v, *index = tensors
        of_index: Any = *index, index[0]
        chosen = sparse.index(*of_index)
        out = sparse.attend(InnerAttention(), q, k, v, chosen)
        if out.requires_grad:
            out.backward(drawn(B, H, S, V, seed=9))
    return out, sparse


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "documents"])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("kind", [TOKENS, BLOCKS], ids=["tokens", "blocks"])
def test_attention_over_the_choice(
    kind: dict[str, Any], ties: bool, ids: Tensor | None
) -> None:
    """Equal to a dense mask, forward and backward, and the earliest of equal keys is chosen."""
    tensors = inputs(kind, ties=ties)
    scores = plain_scores(kind, *tensors[3:])  # pyrefly: ignore[bad-argument-type]
    chosen = plain_choice(kind, scores, ids)
    if ties:
        is_equal = (scores[..., None] == scores[..., None, :]).sum()
        assert is_equal > 3 * scores.numel()
    ours = [x.clone().requires_grad_() for x in tensors[:3] if x is not None]
    theirs = [x.clone().requires_grad_() for x in tensors[:3] if x is not None]
    out, _ = titan(kind, [*ours, *tensors[3:]], ids)
    q, k, v = theirs
    groups = k.shape[1]
    k, v = (x.repeat_interleave(H // groups, 1) for x in (k, v))
    mask = chosen.repeat_interleave(H // chosen.shape[1], 1)
    weights = (q @ k.mT * K**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    expected = weights @ v
    expected.backward(drawn(B, H, S, V, seed=9))
    torch.testing.assert_close(out, expected)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("stage", ["joint", "indexer"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", [TOKENS, BLOCKS], ids=["tokens", "blocks"])
def test_loss_of_the_indexer(kind: dict[str, Any], ids: Tensor | None, stage: str) -> None:
    """Value and gradients of KL(p || q) by autograd, divided by the tokens of the global batch, and the mass of the choice."""
    tensors = inputs(kind)
    index = [None if x is None else x.clone().requires_grad_() for x in tensors[3:]]
    settings = {"stage": stage, "loss_coeff": 0.25, "num_tokens": 1000}
    qkv = [x.clone().requires_grad_() for x in tensors[:3] if x is not None]
    _, sparse = titan(kind, [*qkv, *index], ids, **settings)
    plain = [None if x is None else x.clone().requires_grad_() for x in tensors[3:]]
    scores = plain_scores(kind, *plain)  # pyrefly: ignore[bad-argument-type]
    chosen = plain_choice(kind, scores, ids)
    over = chosen if stage == "joint" else seen(ids).expand_as(chosen)
    q, k = (x for x in tensors[:2] if x is not None)
    number = scores.shape[1]
    dots = q @ k.repeat_interleave(H // k.shape[1], 1).mT * K**-0.5
    of_heads = over.repeat_interleave(H // number, 1)
    probs = dots.masked_fill(~of_heads, -torch.inf).softmax(-1)
    summed = probs.unflatten(1, (number, -1)).sum(2)
    p = summed / summed.sum(-1, keepdim=True)
    # The softmax of scores has the scale of the indexer's head dim, and not of attention's.
    logits = scores * (kind["scale"] if "block" in kind else 1.0)
    log_q = logits.masked_fill(~over, -torch.inf).log_softmax(-1)
    kl = torch.where(p > 0, p * (p.log() - log_q), 0.0).sum() / number
    (0.25 / 1000 * kl).backward()
    for ours, theirs in zip(index, plain, strict=True):
        if ours is not None and theirs is not None:
            assert theirs.grad is not None and theirs.grad.norm() > 0
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-9)
    dense = dots.masked_fill(~seen(ids), -torch.inf).softmax(-1)
    mass = (dense * chosen.repeat_interleave(H // number, 1)).sum() / H
    expected = torch.stack([kl.detach(), mass, torch.tensor(float(B * S))])
    torch.testing.assert_close(sparse.sums, expected)


def test_attention_is_not_trained_by_the_loss() -> None:
    found = []
    for coeff in (0.0, 10.0):
        tensors = [None if x is None else x.requires_grad_() for x in inputs(TOKENS)]
        titan(TOKENS, tensors, IDS, loss_coeff=coeff)
        found.append([x.grad for x in tensors if x is not None])
    assert all(
        grad is not None for grad in found[0]
    )  # also of the indexer: zeros, and not missing
    assert all(torch.equal(*pair) for pair in zip(found[0][:3], found[1][:3], strict=True))
    assert not any(grad.any() for grad in found[0][3:])
    assert all(grad.any() for grad in found[1][3:])


def test_a_kept_choice_is_not_made_again() -> None:
    """A recomputation takes the choice of the forward pass."""
    sparse = SparseAttention(**TOKENS)
    sparse.heads = H
    index: Any = inputs(TOKENS)[3:]
    index = *index, index[0]
    kept = torch.zeros(B, 1, S, 1, dtype=torch.int32)
    put: list[Tensor] = []
    source: Any = SimpleNamespace(get=lambda *_: kept, put=lambda _, ids: put.append(ids))
    sparse.route_sources = [source]
    sparse.choose = None  # pyrefly: ignore
    assert sparse.index(*index) is kept and put[0] is kept


def sizes_of(kind: str = "deepseek_v32", **fields: Any) -> Any:
    overrides = overrides_of(families()[kind]) | fields
    model = {"architecture": families()[kind], "overrides": overrides}
    return ModelSection(name="transformers", **model).sizes


def model_of(sizes: Any) -> Any:
    model = build_model(sizes)
    materialize(model, device="cpu")
    initialize(model, seed=0, std_of=std_of)
    return model


def test_flops_count_scores_once_and_chosen_keys() -> None:
    few, all_keys = sizes_of(index_topk=6), sizes_of(index_topk=64)
    # 4 layers, 4 heads of 24 channels; two products of a key, forward and twice backward.
    per_key = 12 * 4 * 4 * 24
    assert all_keys.flops_per_token(64) - few.flops_per_token(64) == per_key * (64 - 6)


def test_flops_of_an_indexer_are_those_that_torch_counts() -> None:
    """Inputs have no gradient, so that a projection has one product backward, and not two."""
    counted, formula, length = [], [], 64
    for heads in (2, 4):
        sizes = sizes_of(index_n_heads=heads)
        model = model_of(sizes)
        for sparse in modules_of(model, SparseAttention).values():
            sparse.loss_coeff = 1.0
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(3, 3 + length)[None]).sum().backward()
        counted.append(counter.get_total_flops() // length)
        formula.append(sizes.flops_per_token(length))
    # 4 layers, 2 heads more. A score of 16 channels is computed a second time for its gradient, and heads are added up four times.
    again = 4 * 2 * length * (2 * 16 + 4 * 2)
    assert counted[1] - counted[0] == formula[1] - formula[0] + again


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_scores_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scale of the indexer's head dim, which is not that of attention: a choice does not show it, and the loss does."""
    twin = twin_with(model_of(sizes_of(kind)))
    indexer = twin.model.layers[0].self_attn.indexer
    hidden, q = drawn(1, S, 64, seed=1), drawn(1, S, 24, seed=2)
    places = torch.arange(S)[None]
    inputs = hidden, q, twin.model.rotary_emb(hidden, places)
    theirs: list[Tensor] = []
    topk = Tensor.topk
    monkeypatch.setattr(Tensor, "topk", lambda x, *a, **k: theirs.append(x) or topk(x, *a, **k))
    indexer(*inputs, torch.ones(S, S, dtype=torch.bool), places)
    forward, of = module._INDEXERS[type(indexer).__name__]
    sparse = indexer.sparse = of(indexer)
    forward(indexer, *inputs)
    torch.testing.assert_close(sparse.score(*sparse.scored)[:, 0], theirs[0])
