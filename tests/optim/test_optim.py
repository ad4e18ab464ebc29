"""Schedules, parameter groups and clipping, against values worked out by hand or by torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan.config.sections import AdamWSection, LRSchedulerSection
from titan.optim.clipping import clip_gradients
from titan.optim.optimizers import build_optimizer, parameter_groups
from titan.optim.schedule import learning_rate_factor, phases


def _factors(total: int, **section: object) -> list[float]:
    scheduler = LRSchedulerSection.model_validate(section)
    return [
        round(learning_rate_factor(step, section=scheduler, total_steps=total), 6)
        for step in range(1, total + 1)
    ]


def test_warmup_stable_decay() -> None:
    assert _factors(10, warmup_steps=2, decay_ratio=0.4) == [
        0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0,
    ]  # fmt: skip


def test_decay_right_after_warmup_to_a_floor() -> None:
    assert _factors(6, warmup_steps=2, min_lr_factor=0.2) == [0.5, 1, 0.8, 0.6, 0.4, 0.2]


def test_a_run_too_short_for_its_schedule_cuts_warmup_then_decay() -> None:
    assert _factors(4, warmup_steps=10, decay_ratio=0.5) == [0.25, 0.5, 0.75, 1]
    assert _factors(5, warmup_steps=3, decay_ratio=0.8)[:3] == [0.333333, 0.666667, 1]
    section = LRSchedulerSection(warmup_steps=3, decay_ratio=0.8)
    assert phases(section, total_steps=5) == (3, 2)


def test_cosine_and_sqrt() -> None:
    assert _factors(4, warmup_steps=0, decay_type="cosine")[1] == pytest.approx(0.5)
    assert _factors(4, warmup_steps=0, decay_type="sqrt")[0] == pytest.approx(0.5)


def test_total_steps_of_its_own_keeps_the_floor_afterwards() -> None:
    assert _factors(6, warmup_steps=0, total_steps=4, min_lr_factor=0.1)[3:] == [0.1, 0.1, 0.1]


def test_vectors_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    matrices, vectors = parameter_groups(model.parameters(), weight_decay=0.1)
    assert [tuple(p.shape) for p in matrices["params"]] == [(3, 4)]
    assert matrices["weight_decay"] == 0.1 and vectors["weight_decay"] == 0.0
    assert len(vectors["params"]) == 3


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_implementations_agree(implementation: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    ours = build_optimizer(
        AdamWSection.model_validate({"implementation": implementation, "lr": 0.01}),
        model.named_parameters(),
    )
    reference = torch.optim.AdamW(
        parameter_groups(twin.parameters(), weight_decay=0.1),
        lr=0.01,
        betas=(0.9, 0.95),
        foreach=False,
    )
    for _ in range(3):
        x = torch.randn(4, 8)
        for net, optimizer in ((model, ours), (twin, reference)):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight)
    torch.testing.assert_close(model.bias, twin.bias)


def test_a_section_that_builds_its_own_is_let_even_if_it_is_an_adam() -> None:
    class Lookalike(AdamWSection):
        def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=self.lr)

    weight = nn.Parameter(torch.zeros(2, 2))
    assert type(build_optimizer(Lookalike(), [("w", weight)])) is torch.optim.SGD


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torch(max_norm: float) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(7))]
    for p in ours:
        p.grad = torch.randn_like(p)
    theirs = copy.deepcopy(ours)
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone() if p.grad is not None else None
    norm = clip_gradients(ours, max_norm=max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_norm_is_accurate_for_large_gradients() -> None:
    """torch's CPU norm kernel is off by 1e-5 here; ours must not be."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(1 << 20))
    p.grad = torch.randn(1 << 20) * 1e-3
    exact = p.grad.double().norm().item()
    assert clip_gradients([p], max_norm=1e9).item() == pytest.approx(exact, rel=3e-7)


def test_non_finite_norm_shows() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, float("nan"), 2.0])
    assert not torch.isfinite(clip_gradients([p], max_norm=1.0))
    assert p.grad.isnan().all()
    p.grad = torch.tensor([1.0, float("inf"), 2.0])
    assert clip_gradients([p], max_norm=1.0).isinf()
    assert p.grad[1].isnan() and (p.grad[::2] == 0).all()


def test_a_negative_norm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm is -1\.0: must be positive, or 0"):
        clip_gradients([nn.Parameter(torch.ones(1))], max_norm=-1.0)


def _clip_a_stage() -> tuple[float, list[float]]:
    """Of two stages, the first of which is frozen."""
    p = nn.Parameter(torch.zeros(2), requires_grad=dist.get_rank() == 1)
    if p.requires_grad:
        p.grad = torch.tensor([3.0, 4.0])
    norm = clip_gradients([p], max_norm=1.0, stages=dist.group.WORLD)
    return norm.item(), [] if p.grad is None else p.grad.tolist()


def test_a_frozen_stage_adds_nothing_to_the_norm(pool) -> None:
    frozen, trained = pool.run(2, _clip_a_stage)
    assert frozen == (5.0, [])
    assert trained == (5.0, pytest.approx([0.6, 0.8], rel=1e-6))
