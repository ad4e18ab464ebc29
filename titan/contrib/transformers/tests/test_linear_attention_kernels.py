"""The way to flash-linear-attention's kernels and back, with functions of the same arguments in their place, one position after the other.

tests/gpu compares the kernels themselves.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.linear_attention import (
    KINDS,
    inputs,
    largest_error,
    step_by_step,
    with_gradients,
)
from titan.contrib.transformers import linear_attention as module
from titan.contrib.transformers import linear_attention_kernels as kernels
from titan.contrib.transformers.linear_attention import linear_attention

NAMES = [name for name in KINDS if name != "gated linear"]  # which has no kernel
FIRST = torch.linspace(-1, 1, 2 * 4 * 16 * 12).view(2, 4, 16, 12)
STARTS = torch.zeros(2, 100, dtype=torch.bool)
STARTS[0, [0, 40, 41]] = STARTS[1, 70] = True


def by_documents(
    q: Any, k: Any, v: Any, g: Any, beta: Any, first: Any, cu_seqlens: Any, scale: float
) -> tuple[Tensor, Tensor]:
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, lasts = [], []
    for number, (a, b) in enumerate(pairwise(ends)):
        part: Any = [
            None if x is None else x[:, a:b].transpose(1, 2) for x in (q, k, v, g, beta)
        ]
        before = first if cu_seqlens is None else first[number : number + 1]
        out, last = step_by_step(*part, state=before, scale=scale)
        outs.append(out.transpose(1, 2))
        lasts.append(last)
    return torch.cat(outs, dim=1), torch.cat(lasts)


class StandIn(torch.autograd.Function):
    """Like the package's functions, one function for autograd."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *tensors, ctx.cu_seqlens, ctx.scale = args
        ctx.save_for_backward(*tensors)
        return by_documents(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def differentiate() -> list[Any]:
            leaves: Any = [
                x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors
            ]
            # pyrefly: ignore[bad-argument-count]
            outs = by_documents(*leaves, ctx.cu_seqlens, ctx.scale)
            given = [x for x in leaves if x is not None]
            found = iter(torch.autograd.grad(outs, given, grads))
            return [None if x is None else next(found) for x in leaves]

        # Within an operator nothing is recorded, so the steps run in another thread.
        with ThreadPoolExecutor(1) as thread:
            return *thread.submit(differentiate).result(), None, None


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(*, takes_beta: bool) -> Any:
        def call(
            q: Tensor, k: Tensor, v: Tensor, *, g: Any, scale: float, initial_state: Any,
            output_final_state: bool, cu_seqlens: Any, **beta: Any,
        ) -> Any:  # fmt: skip
            assert output_final_state and {*beta} == ({"beta"} if takes_beta else set())
            return StandIn.apply(q, k, v, g, beta.get("beta"), initial_state, cu_seqlens, scale)

        return call

    for folder, name in (
        ("gated_delta_rule", "chunk_gated_delta_rule"),
        ("kda", "chunk_kda"),
        ("simple_gla", "chunk_simple_gla"),
    ):
        module = SimpleNamespace(**{name: function(takes_beta=folder != "simple_gla")})
        monkeypatch.setitem(sys.modules, f"fla.ops.{folder}", module)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [{}, {"starts_BS": STARTS, "state": FIRST, "scale": 0.3}],
    ids=["plain", "documents"],
)
def test_outputs_states_and_gradients(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [x if x is None else x.float() for x in inputs(KINDS[name], 100, batch=2)]
    plain = with_gradients(linear_attention, given, **options)
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    mine = with_gradients(linear_attention, given, **options)
    assert largest_error(mine, plain) < 2e-6


def test_the_operator_has_shapes_without_data_and_compiles_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    given = [x if x is None else x.float() for x in inputs(KINDS["kda"], 32, batch=2)]
    eager = with_gradients(linear_attention, given)
    compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    assert largest_error(with_gradients(compiled, given), eager) < 1e-6


@pytest.mark.parametrize(
    ("capability", "triton", "others", "expected"),
    [
        ((9, 0), "3.6.0", (), False),  # torch 2.11 on H100
        ((9, 0), "3.7.0", (), False),
        ((9, 0), "3.7.1", (), True),
        ((9, 0), "3.6.0", ("tilelang",), True),
        ((10, 0), "3.6.0", (), True),
        ((8, 0), "3.3.1", (), True),
    ],
)
def test_kernels_that_are_wrong_on_a_gpu_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    capability: tuple[int, int],
    triton: str,
    others: tuple[str, ...],
    expected: bool,
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: name in ("fla", *others) or None)
    monkeypatch.setattr(kernels, "compute_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "version", lambda _: triton)
    kernels.is_installed.cache_clear()
    assert kernels.is_installed() is expected
    kernels.is_installed.cache_clear()
    said = " ".join(str(warning.message) for warning in recwarn)
    assert ("plain torch" in said and triton in said) is not expected
