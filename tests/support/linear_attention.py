"""Linear attention one position after the other, as its papers write it, inputs for it, and faults of titan's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan.contrib.transformers import linear_attention as module
from titan.contrib.transformers.linear_attention_borders import SequenceBorders


class Kind(NamedTuple):
    """A sibling of the recurrence: whose gates it has ("head", "channel" or ""), and whether it has the delta rule."""

    gates: str
    delta: bool


KINDS = {
    "gated delta": Kind("head", True),
    "delta": Kind("", True),
    "kda": Kind("channel", True),
    "ssd": Kind("head", False),
    "gated linear": Kind("channel", False),
}


def inputs(
    kind: Kind,
    length: int,
    *,
    batch: int = 1,
    heads: int = 4,
    groups: int = 2,
    gate: float = 1.0,
) -> list[Any]:
    """q, k, v, gates and betas in fp64: keys of length 1, gates of -0.7 x `gate` on average, strengths from 0 to 1."""
    generator = torch.Generator().manual_seed(length + heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (
        draw(batch, groups, length, 16),
        draw(batch, groups, length, 16),
        draw(batch, heads, length, 12),
    )
    gates, betas = draw(batch, heads, length, 16), draw(batch, heads, length)
    gates = -F.softplus(gates) * gate
    gates = {"head": gates[..., 0], "channel": gates, "": None}[kind.gates]
    return [q, F.normalize(k, dim=-1), v, gates, betas.sigmoid() if kind.delta else None]


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    betas: Tensor | None,
    *,
    ids: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the last state."""
    copies = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(copies, dim=1) for x in (q, k))
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outs = []
    for t in range(v.shape[2]):
        if ids is not None and t:
            state = state * (ids[:, t] == ids[:, t - 1])[:, None, None, None]
        if gates is not None:
            gate = gates[:, :, t].exp()
            state = state * (gate[..., None] if gate.ndim == 3 else gate[..., None, None])
        new = v[:, :, t]
        if betas is not None:
            new = betas[:, :, t, None] * (
                new - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
            )
        state = state + k[:, :, t, :, None] * new[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]) * factor)
    return torch.stack(outs, dim=2), state


def with_gradients(call: Any, given: list[Tensor | None], **options: Any) -> list[Tensor]:
    """Output, last state and the gradients of all inputs, for fixed gradients of the two."""
    leaves = [x if x is None else x.clone().requires_grad_() for x in given]
    state = options.get("state")
    if isinstance(state, Tensor):
        state = options["state"] = state.clone().requires_grad_()
    out, last = call(*leaves, **options)
    for number, x in enumerate((out, last)):
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        (x * weights.to(x.dtype)).sum().backward(retain_graph=not number)
    wanted = [x for x in (*leaves, state) if isinstance(x, Tensor)]
    grads = [x.grad for x in wanted if x.grad is not None]
    return [out.detach(), last.detach(), *grads]


def largest_error(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference over the largest value of the same tensor."""
    assert [x.shape for x in mine] == [x.shape for x in theirs]
    # In fp32, a gradient below 1e-30 is zero.
    errors = [
        (a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1e-30)
        for a, b in zip(mine, theirs, strict=True)
    ]
    assert all(torch.isfinite(x).all() for x in mine)
    return max(errors).item()


def plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    """Plant a fault of linear attention in this process."""
    starts_of, compute = SequenceBorders.starts, module.linear_attention

    def leaking(borders: SequenceBorders, ids: Any) -> Tensor | None:
        """Forget that a document may begin where a piece begins."""
        starts = starts_of(borders, ids)
        if starts is None:
            return None
        starts = borders.split(starts, dim=1).clone()
        starts[:, 0] = False
        return borders.join(starts, dim=1)

    if fault == "a state that is not passed":
        patch.setattr(SequenceBorders, "states_before", lambda _, added, linear: added * 0)
    elif fault == "tokens that are not passed":
        patch.setattr(SequenceBorders, "before", lambda _, last: last * 0)
    elif fault == "a state that leaks over a document":
        patch.setattr(SequenceBorders, "starts", leaking)
    elif fault == "a gate applied twice":
        twice = lambda q, k, v, g, *rest, **options: compute(q, k, v, g * 2, *rest, **options)  # noqa: E731
        patch.setattr(module, "linear_attention", twice)
