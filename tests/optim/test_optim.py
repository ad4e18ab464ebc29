"""Schedules, parameter groups and clipping, against values worked out by hand or by torch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan.config.schema import AdamSection, AdamWSection, LRSchedulerSection
from titan.optim.clipping import clip_gradients
from titan.optim.optimizers import build_optimizer, parameter_groups
from titan.optim.schedule import learning_rate_factor, phases


def _factors(total: int, last: int = 0, **section: object) -> list[float]:
    scheduler = LRSchedulerSection.model_validate(section)
    return [
        learning_rate_factor(step, section=scheduler, total_steps=total)
        for step in range(1, (last or total) + 1)
    ]


def _torchtitans(
    total: int, *, warmup: int, ratio: float | None, kind: str, floor: float
) -> list[float]:
    """Return the factors of TorchTitan v0.2.2's components/lr_scheduler.py, whose steps count from 0."""
    warmup = min(warmup, total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    stable = total + 1 - warmup - decay  # the 1 is its virtual last step
    shapes = {
        "linear": lambda p: 1 - p,
        "sqrt": lambda p: 1 - math.sqrt(p),
        "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
    }
    factors = []
    for step in range(total):
        if step < warmup:
            factors.append((step + 1) / warmup)
        elif step < warmup + stable:
            factors.append(1.0)
        else:
            shape = shapes[kind]((step + 1 - warmup - stable) / decay)
            factors.append(floor + (1 - floor) * shape)
    return factors


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.25, 0.8, 1.0])
@pytest.mark.parametrize("kind", ["linear", "sqrt", "cosine"])
def test_every_step_is_torchtitans(kind: str, ratio: float | None, floor: float) -> None:
    for total in (1, 2, 10, 37):
        for warmup in (0, 1, 2, 9, 100):
            ours = _factors(
                total,
                warmup_steps=warmup,
                decay_ratio=ratio,
                decay_type=kind,
                min_lr_factor=floor,
            )
            theirs = _torchtitans(total, warmup=warmup, ratio=ratio, kind=kind, floor=floor)
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12), (total, warmup)
            assert min(ours) > 0


def test_no_step_is_lost_to_a_rate_of_0() -> None:
    assert _factors(10, warmup_steps=2, decay_ratio=0.8) == [
        0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125,
    ]  # fmt: skip


def test_a_run_too_short_for_its_schedule_cuts_warmup_then_decay() -> None:
    assert _factors(4, warmup_steps=10, decay_ratio=0.5) == [0.25, 0.5, 0.75, 1]
    assert _factors(5, warmup_steps=3, decay_ratio=0.8) == [1 / 3, 2 / 3, 1, 1, 0.5]
    section = LRSchedulerSection(warmup_steps=3, decay_ratio=0.8)
    assert phases(section, total_steps=5) == (3, 2)


def test_after_its_end_a_schedule_keeps_its_floor() -> None:
    assert _factors(9, warmup_steps=0, total_steps=4, min_lr_factor=0.1)[4:] == [0.1] * 5
    assert _factors(4, 9, warmup_steps=0, decay_ratio=0.0) == [1.0] * 9


def test_vectors_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    matrices, vectors = parameter_groups(model.parameters(), weight_decay=0.1)
    assert [tuple(p.shape) for p in matrices["params"]] == [(3, 4)]
    assert matrices["weight_decay"] == 0.1 and vectors["weight_decay"] == 0.0
    assert len(vectors["params"]) == 3


@pytest.mark.parametrize("section", [AdamWSection, AdamSection])
def test_all_are_decayed_as_in_torchtitan(section: type[AdamWSection]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    twin = copy.deepcopy(model)
    kind = torch.optim.AdamW if section is AdamWSection else torch.optim.Adam
    theirs = kind(twin.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5, fused=True)
    options = section.model_validate({"lr": 0.1, "weight_decay": 0.5, "decay_norms": True})
    ours = build_optimizer(options, model.named_parameters())
    for _ in range(3):
        for optimizer, module in ((ours, model), (theirs, twin)):
            optimizer.zero_grad()
            module(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


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
