"""The mixture of experts on one process: balance terms, chunks, grouped products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.support.tables import tabled
from titan.config.schema import AdamWSection, MuonSection
from titan.models.common.moe import Experts, MoE, grouped_matmuls, looped_matmuls
from titan.models.common.moe_config import MoEConfig
from titan.optim.expert_bias import ExpertBiasBalancer, move_biases
from titan.optim.optimizers import build_optimizer
from titan.parallel.grouped_float8 import apply_grouped_float8
from titan.parallel.init_weights import initialize

B, S, D, E, K = 3, 16, 32, 8, 2


def config(**changes: Any) -> MoEConfig:
    sizes: Any = {"dim": D, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": D}
    experts = {"num_experts": E, "top_k": K, "expert_dim": 48}
    return MoEConfig(**sizes | experts | changes)


def build(seed: int = 0, **changes: Any) -> MoE:
    moe = MoE(config(**changes))
    moe.reset_buffers()
    initialize(moe, seed=seed, std_of=lambda name: 0.2)
    return moe


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed))


# ---- balance -----------------------------------------------------------------------------------


def sequence_loss(probs_TE: Tensor, ids_TK: Tensor, logits_TE: Tensor, last: Tensor) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, mean over sequences."""
    counts_BE = torch.nn.functional.one_hot(ids_TK, E).sum(1).view(B, S, E).sum(1)
    share_BE = probs_TE.view(B, S, E).mean(1)
    return (E / (K * S) * counts_BE * share_BE).sum(1).mean()


def global_loss(probs_TE: Tensor, ids_TK: Tensor, logits_TE: Tensor, last: Tensor) -> Tensor:
    """With the frequencies of the last step."""
    last = last.to(probs_TE.dtype)
    return E * (last / last.sum() * probs_TE.mean(0)).sum()


def z_loss(probs_TE: Tensor, ids_TK: Tensor, logits_TE: Tensor, last: Tensor) -> Tensor:
    return logits_TE.logsumexp(-1).square().mean()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("sequence_balance_coeff", sequence_loss),
        ("global_balance_coeff", global_loss),
        ("router_z_loss_coeff", z_loss),
    ],
)
def test_a_balance_term_has_the_gradient_of_its_formula(
    name: str, formula: Callable[..., Tensor], score: str
) -> None:
    changes: dict[str, Any] = {name: 0.5}
    moe = build(score=score, **changes).double()
    moe.last_loads.copy_(torch.arange(1, E + 1))
    x = tokens().double().requires_grad_()
    ExpertBiasBalancer({"moe": moe}, group=None).begin(num_sequences=B, num_tokens=B * S)
    seen: list[Tensor] = []
    moe.router.choose = lambda scores_TE, bias_E: (
        seen.append(scores_TE.topk(K).indices) or seen[-1]
    )
    (0 * moe(x).sum()).backward()  # all that is left is the term's
    logits_TE = (x @ moe.router.gate.weight.T).flatten(0, 1)
    scores_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
    probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    loss = 0.5 * formula(probs_TE, seen[0], logits_TE, moe.last_loads)
    inputs = (x, moe.router.gate.weight)
    for tensor, expected in zip(inputs, torch.autograd.grad(loss, inputs), strict=True):
        assert expected.norm() > 1e-4
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-12, atol=1e-15)


def test_the_bias_moves_against_the_loads_by_equal_steps() -> None:
    bias = torch.zeros(4)
    move_biases([bias], torch.tensor([[1, 5, 3, 3]]), step=0.5)
    assert bias.tolist() == [0.5, -0.5, 0.0, 0.0]
    move_biases(
        [bias], torch.tensor([[0, 0, 0, 12]]), step=0.5
    )  # three up, one down, less their mean
    assert bias.tolist() == [0.75, -0.25, 0.25, -0.75]
    before = bias.clone()
    move_biases([bias], torch.tensor([[0, 0, 0, 12]]), step=0.0)
    assert torch.equal(bias, before)


def test_a_refused_update_leaves_bias_and_loads() -> None:
    moe = build(load_balance_coeff=0.1, global_balance_coeff=0.1)
    balance = ExpertBiasBalancer({"moe": moe}, group=None)
    for accepted in (True, False):
        before = moe.bias.clone(), moe.last_loads.clone()
        balance.begin(num_sequences=B, num_tokens=B * S)
        moe(tokens()).sum().backward()
        assert moe.loads.sum() == B * S * K
        balance.sum_loads(lambda _: None)
        balance.finish(accepted=accepted)
        assert moe.loads.sum() == 0
        assert torch.equal(moe.bias, before[0]) == (not accepted)
        assert torch.equal(moe.last_loads, before[1]) == (not accepted)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    moe = build(normalize_weights=True)
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0]])
    bias = torch.tensor([0, 0, 0, 0.5, 0, 0, 0, 0])
    ids = moe.router.choose(scores, bias)
    assert sorted(ids[0].tolist()) == [0, 3]
    assert sorted(moe.router.weigh(scores, ids)[0].tolist()) == pytest.approx([0.2, 0.8])


def test_groups_limit_where_a_token_goes() -> None:
    moe = build(num_groups=4, top_groups=1)
    # By their two best the second group wins, though the best expert is in the first.
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.1, 0.1, 0.0, 0.2]])
    assert sorted(moe.router.choose(scores, torch.zeros(E))[0].tolist()) == [2, 3]


# ---- experts -----------------------------------------------------------------------------------


GPT_OSS: dict[str, Any] = {"moe_biases": True, "swiglu_limit": 0.5}
PUBLISHED = {**GPT_OSS, "swiglu_limit": 7.0}


def products(
    function: Callable[..., Tensor], counts: list[int], dtype: torch.dtype, **changes: Any
) -> list[Tensor]:
    experts = Experts(config(**changes))
    initialize(experts, seed=1, std_of=lambda name: 0.2)
    experts.to(dtype)
    rows = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows.requires_grad_()
    weights = (getattr(experts, name) for name in experts.names)
    out = function(rows, torch.tensor(counts), *weights, limit=experts.limit)
    (out * torch.linspace(-1, 1, D, dtype=dtype)).sum().backward()
    gradients: Any = [parameter.grad for parameter in (rows, *experts.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [out, *gradients]


@tabled("counts", ids=["uneven", "one expert"])
def test_grouped_products_are_those_of_the_loop(counts: list[int]) -> None:
    grouped = products(grouped_matmuls, counts, torch.bfloat16)
    looped = products(looped_matmuls, counts, torch.bfloat16)
    for a, b in zip(grouped, looped, strict=True):
        assert torch.equal(a, b)


@tabled("counts")
def test_biases_and_limit_are_those_of_the_formula(counts: list[int]) -> None:
    """gpt-oss's experts, one row at a time, in fp64. Both the loop and the grouped kernel's function."""

    def looped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return torch.cat([x @ w for x, w in zip(rows.split(sizes), weights, strict=True)])

    def formula(rows: Tensor, counts: Tensor, *weights: Tensor, limit: float) -> Tensor:
        owners, outs = torch.arange(E).repeat_interleave(counts).tolist(), []
        for x, e in zip(rows, owners, strict=True):
            w1, w2, w3, b1, b2, b3 = (weight[e] for weight in weights)
            gate, up = torch.minimum(w1 @ x + b1, torch.tensor(limit)), w3 @ x + b3
            hidden = gate / (1 + (-1.702 * gate).exp()) * (1 + up.clip(-limit, limit))
            outs.append(w2 @ hidden + b2)
        return torch.stack(outs)

    expected = products(formula, counts, torch.float64, **GPT_OSS)
    for function in (looped_matmuls, partial(grouped_matmuls, product=looped_mm)):
        for a, b in zip(
            products(function, counts, torch.float64, **GPT_OSS), expected, strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # In bf16, at the published limit: rounding takes no number to its other side.
    expected = products(formula, counts, torch.float64, **PUBLISHED)
    grouped = products(grouped_matmuls, counts, torch.bfloat16, **PUBLISHED)
    for a, b in zip(grouped, expected, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 0.02


def test_biases_of_experts_are_vectors_to_an_optimizer() -> None:
    """Neither decayed, nor orthogonalized by Muon as a matrix with a row for each expert."""
    named = {f"layers.0.{name}": p for name, p in build(**GPT_OSS).named_parameters()}
    vectors = {name for name in named if name.endswith("bias")}
    assert len(vectors) == 4 and {named[name].ndim for name in vectors} == {1, 2}
    for section in (AdamWSection(weight_decay=0.5), MuonSection(weight_decay=0.5)):
        optimizer = build_optimizer(section, named.items())
        ids = {id(p): name for name, p in named.items()}
        decayed = {
            ids[id(p)]: group["weight_decay"] > 0
            for group in optimizer.param_groups
            for p in group["params"]
        }
        assert {name for name in decayed if not decayed[name]} == vectors
    assert {ids[id(p)] for p in optimizer.param_groups[0]["params"]} == {*named} - vectors


@pytest.mark.parametrize("changes", [{}, PUBLISHED], ids=["SwiGLU", "gpt-oss"])
@pytest.mark.parametrize("recipe", ["float8", "mxfp8"])
def test_products_in_eight_bits_are_near(recipe: str, changes: dict[str, Any]) -> None:
    results = []
    for convert in (False, True):
        moe, x = build(expert_dim=64, **changes), tokens().requires_grad_()
        if convert:
            model = torch.nn.ModuleDict({"moe": moe})
            names = apply_grouped_float8(model, recipe=recipe, fqns=["experts"], emulate=True)
            assert names == ["moe.experts"]
        out = moe(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(parameter.grad for parameter in moe.parameters())])
    for exact, near in zip(*results, strict=True):
        assert 0.01 < ((near - exact).norm() / exact.norm()).item() < 0.15


def test_experts_without_rows_have_gradients_of_zeros() -> None:
    _, _, *weights = products(looped_matmuls, [0] * E, torch.float32)
    assert all(gradient.count_nonzero() == 0 for gradient in weights)


def kept_bytes(run: Callable[[], Any]) -> int:
    """Bytes of distinct memory that a function keeps for its backward pass, parameters aside."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def test_chunks_bound_what_a_collapsed_router_keeps() -> None:
    experts = Experts(config())
    initialize(experts, seed=1, std_of=lambda name: 0.2)
    results, kept = [], []
    for experts.chunk_tokens in (0, 64):
        experts.zero_grad()
        leaf = torch.randn(512, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
        rows = leaf * 1  # as they arrive from other ranks
        counts = torch.tensor([0, 512, 0, 0, 0, 0, 0, 0])
        outputs = []
        kept.append(kept_bytes(lambda: outputs.append(experts(rows, counts))))  # noqa: B023
        (outputs[0] * torch.linspace(-1, 1, D)).sum().backward()
        results.append((outputs[0], leaf.grad, *(p.grad for p in experts.parameters())))
    whole, chunked = results
    assert torch.equal(whole[0], chunked[0]) and torch.equal(whole[1], chunked[1])
    for a, b in zip(whole[2:], chunked[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # The rows alone, and not three or more hidden layers of them.
    assert kept[0] >= 512 * (D + 3 * 48) * 4
    assert kept[1] <= 512 * D * 4 + 8 * 8 * E
