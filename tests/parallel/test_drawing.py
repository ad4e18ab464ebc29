"""Recomputation of blocks that draw random numbers: derivatives by the backward pass against differences of the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.parallel import apply_ac, apply_compile

WIDTH = 16
AOT: dict[str, Any] = {"backend": "aot_eager"}


class Block(nn.Module):
    """Block that drops activations twice, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab")
        self.way, self.dropout = way, nn.Dropout(0.5) if way == "module" else nn.Identity()

    def drop(self, x: Tensor) -> Tensor:
        if self.way == "F.dropout":
            return F.dropout(x, 0.5, self.training)
        if self.way == "attention":
            one = x.view(1, 1, -1, WIDTH)
            return F.scaled_dot_product_attention(one, one, one, dropout_p=0.5).view(x.shape)
        return x * torch.rand_like(x) if self.way == "rand" else self.dropout(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.sigmoid(self.b(self.drop(F.gelu(self.a(x))))))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(way) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def lay_out(model: nn.Module, how: str) -> None:
    if how.startswith("budget"):
        apply_compile(model, memory_budget=float(how.removeprefix("budget ")), **AOT)
    elif how.startswith("every second"):
        apply_ac(model, keep=[f"aten.{how.removeprefix('every second ')}/2"])
    elif how.startswith("not restored"):
        apply_ac(model, preserve_rng_state=False)
        if how.endswith("compiled"):
            apply_compile(model, preserve_rng_state=False, **AOT)
    else:
        apply_ac(model, keep=["matmul/2"] if how.startswith("selective") else [])
        if how.endswith("compiled"):
            apply_compile(model, **AOT)


def derivatives(way: str, how: str) -> tuple[float, float]:
    """Return the derivative in one direction by differences of the forward pass, and by the backward pass."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net(way).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    lay_out(model, how)
    direction = torch.randn(x.shape, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return model(x).sum()

    leaf = x.clone().requires_grad_()
    run(leaf).backward()
    assert leaf.grad is not None
    high, low = (run(x + sign * 1e-3 * direction).item() for sign in (1, -1))
    return (high - low) / 2e-3, (leaf.grad * direction).sum().item()


RESTORED = ["full", "selective", "full, compiled", "selective, compiled"]


@pytest.mark.parametrize("how", [*RESTORED, "budget 0.0", "budget 0.5"])
@pytest.mark.parametrize("way", ["module", "F.dropout", "rand", "attention"])
def test_the_backward_pass_has_the_random_numbers_of_the_forward_pass(
    way: str, how: str
) -> None:
    by_differences, by_backward = derivatives(way, how)
    assert by_backward == pytest.approx(by_differences, rel=1e-5, abs=1e-5)


def test_a_kept_draw_gives_its_numbers_to_no_other() -> None:
    by_differences, by_backward = derivatives("rand", "every second rand_like")
    assert by_backward == pytest.approx(by_differences, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("way", ["F.dropout", "rand", "attention"])
def test_draws_outside_of_modules_that_are_not_restored(way: str) -> None:
    with pytest.raises(
        ValueError, match=r"'layers\.\d' draws random numbers.*preserve_rng_state"
    ):
        derivatives(way, "not restored")
    by_differences, by_backward = derivatives(way, "not restored, compiled")
    assert by_backward == pytest.approx(by_differences, rel=1e-5, abs=1e-5)
