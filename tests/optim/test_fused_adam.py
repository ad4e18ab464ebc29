"""The update that clips, against torch's clipping and its Adam and AdamW in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from titan.config.schema import AdamSection, AdamWSection
from titan.optim.clipping import clip_gradients
from titan.optim.fused_adam import FusedAdam
from titan.optim.optimizers import build_optimizer, parameter_groups

SECTIONS = {"AdamW": AdamWSection, "Adam": AdamSection}


class Sizes(nn.Module):
    """Matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"one": (4, 1024), "more": (7, 1024), "odd": (3, 100), "norm": (1024,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def largest_error(ours: nn.Module, exact: nn.Module) -> float:
    """Return the largest difference of a weight, relative to how far weights have moved: about 1."""
    pairs = zip(ours.parameters(), exact.parameters(), strict=True)
    return max((mine.double() - other).abs().max().item() for mine, other in pairs)


@pytest.mark.parametrize("name", SECTIONS)
def test_200_steps_equal_torchs_in_fp64(name: str) -> None:
    """No further from exact than torch's own fused kernel after a multiplication, or the last bits of fp32."""
    torch.manual_seed(0)
    model = Sizes()
    torchs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    section = SECTIONS[name](lr=0.01, weight_decay=0.1, beta2=0.99)
    ours = build_optimizer(section, model.named_parameters())
    assert isinstance(ours, FusedAdam)
    kind = getattr(torch.optim, name)
    others = [
        kind(
            parameter_groups(of.parameters(), weight_decay=0.1),
            lr=0.01,
            betas=(0.9, 0.99),
            fused=fused,
        )
        for of, fused in ((torchs, True), (exact, False))
    ]
    for step in range(200):
        # Large and small gradients: some steps are clipped and some are not.
        scale = 10.0 ** (step % 5 - 4)
        for of in (model, torchs, exact):
            generator = torch.Generator().manual_seed(step)
            for p in of.parameters():
                p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
        norm = clip_gradients(model.parameters(), max_norm=1.0, optimizer=ours)
        for of in (torchs, exact):
            expected = torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
        torch.testing.assert_close(norm.double(), expected)
        for optimizer in (ours, *others):
            optimizer.step()
    assert largest_error(model, exact) < max(2 * largest_error(torchs, exact), 2e-6)
    # The same state, under the same names: checkpoints are exchangeable.
    mine, theirs = ours.state_dict(), others[0].state_dict()
    for number, state in theirs["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for key, value in state.items():
            found = mine["state"][number][key]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7)
    assert {*mine["param_groups"][0]} - {"initial_lr"} == {*theirs["param_groups"][0]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_spoils_all_weights(bad: float) -> None:
    """As a multiplication of gradients by the factor would: nothing finite hides it."""
    model = Sizes()
    optimizer: Any = build_optimizer(AdamWSection(), model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    one, odd = (model.get_parameter(name) for name in ("one", "odd"))
    odd.grad = torch.full_like(odd, bad)
    norm = clip_gradients(model.parameters(), max_norm=1.0, optimizer=optimizer)
    assert not torch.isfinite(norm)
    optimizer.step()
    assert odd.isnan().all()
    assert one.isnan().all() == (bad != bad)


def test_without_a_largest_norm_nothing_is_divided() -> None:
    model = Sizes()
    optimizer = build_optimizer(AdamWSection(), model.named_parameters())
    assert isinstance(optimizer, FusedAdam)
    for max_norm, divides in ((1.0, True), (0.0, False)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        clip_gradients(model.parameters(), max_norm=max_norm, optimizer=optimizer)
        assert (optimizer.divisor is not None) == divides


def test_gradients_of_another_layout_or_dtype() -> None:
    """Transposed, expanded and strided gradients, channels last, and parameters of two dtypes: as torch's loop over parameters."""
    torch.manual_seed(0)
    last = torch.randn(8, 64, 4, 4).to(memory_format=torch.channels_last)
    weights = [torch.randn(64, 1024), torch.randn(4, 1024), torch.randn(4, 1024), last]
    grads = [
        torch.randn(1024, 64).T,
        torch.randn(1, 1024).expand(4, 1024),
        torch.randn(4, 2048)[:, ::2],
        torch.randn(8, 64, 4, 4),
    ]
    weights.append(torch.randn(3, 1024).bfloat16())
    grads.append(torch.randn(3, 1024).bfloat16())
    ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.0}
    cases = (
        (ours, FusedAdam(ours, decoupled=True, lr=0.01)),
        (theirs[:-1], torch.optim.AdamW(theirs[:-1], foreach=False, **options)),
        (theirs[-1:], torch.optim.AdamW(theirs[-1:], fused=True, **options)),  # in fp32
    )
    for parameters, optimizer in cases:
        for _ in range(3):
            for parameter, grad in zip(
                parameters,
                grads[-1:] if len(parameters) == 1 else grads,
                strict=False,
            ):
                parameter.grad = grad
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        exact = mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=1e-5 if exact else 2**-7, atol=1e-6)


def test_a_state_of_another_implementation_or_of_an_older_torch_loads() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    finals = []
    for old in (False, True):
        first = nn.Parameter(weight.clone())
        source = torch.optim.AdamW([first], lr=0.1, weight_decay=0.5, foreach=True)
        first.grad = torch.ones_like(first)
        source.step()
        state = copy.deepcopy(source.state_dict())
        if old:
            del state["param_groups"][0]["decoupled_weight_decay"]
        second = nn.Parameter(first.detach().clone())
        optimizer = FusedAdam([second], decoupled=True, lr=0.1)
        optimizer.load_state_dict(state)
        for parameter, updated in ((second, optimizer), (first, source)):
            parameter.grad = torch.full_like(parameter, -1.0)
            updated.step()
        torch.testing.assert_close(second, first)
        finals.append(second)
    assert torch.equal(*finals)
