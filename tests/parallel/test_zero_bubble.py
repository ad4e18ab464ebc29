"""Schedules that split the backward pass, with compiled and recomputed blocks, against one process: loss, norm, each gradient and weight."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.layouts import BOUND, Layout, fsdp, largest, pp, schedule, tp, train
from tests.support.operations import Watch
from tests.support.ranks import Pool
from titan.models.llama3.config import LlamaConfig
from titan.models.llama3.model import Block
from titan.numerics.certify.steps import WHAT
from titan.parallel import apply_ac, apply_compile
from titan.parallel.sac_save_list import DEFAULT_KEEP
from titan.parallel.split_backward import (
    backward_input,
    backward_weight,
    saving_for_two_passes,
    splitting_backend,
)

STEPS = 3
# Gradients of weights wait for one microbatch and more.
CSV = """0F0,0F1,0I0,0F2,0I1,0F3,0W0,0I2,0I3,0W1,0W2,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
"""
SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "csv")
COMPILERS = ("eager", "aot_eager", "inductor")
RECOMPUTED = ("none", "selective", "full", "memory_budget")
AXES = {"FSDP2": fsdp(2), "TP": tp(2), "EP": fsdp(2)}
# The others are slow.
CHOSEN = {
    ("InterleavedZeroBubble", "aot_eager", "selective", "FSDP2"),
    ("ZBVZeroBubble", "eager", "full", "TP"),
    ("DualPipeV", "aot_eager", "memory_budget", "EP"),
}
ROWS = [
    pytest.param(*row, marks=[] if row in CHOSEN else pytest.mark.slow)
    for row in itertools.product(SCHEDULES, COMPILERS, RECOMPUTED, AXES)
    if row[1:3] != ("eager", "memory_budget")
]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[Layout], dict[str, Any]]:
    known: dict[Any, dict[str, Any]] = {}

    def get(layout: Layout) -> dict[str, Any]:
        if layout.model not in known:
            one = Layout("one process", model=layout.model)
            known[layout.model] = pool.run(1, train, one, "float32", STEPS)[0]
        return known[layout.model]

    return get


@pytest.mark.parametrize(("name", "compiled", "recompute", "axis"), ROWS)
def test_equals_one_process(
    name: str, compiled: str, recompute: str, axis: str, pool: Pool, alone: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = dict(schedule(name))
    if name == "csv":
        file = tmp_path / "mine.csv"
        file.write_text(CSV)
        settings = {"pipeline_parallel_schedule_csv": str(file)}
        settings["pipeline_parallel_microbatch_size"] = 2 if axis == "TP" else 1
    layout = Layout(
        name,
        (*pp(2), *AXES[axis]),
        settings=tuple(settings.items()),
        compiled="" if compiled == "eager" else compiled,
        recompute=recompute,
    )
    if axis == "EP":
        experts = (*layout.settings, ("expert_parallel_degree", 2))
        layout = replace(layout, settings=experts, model=("qwen3", "tiny_moe"))
    results = pool.run(layout.ranks, train, layout, "float32", STEPS)
    found = {what: largest(results, alone(layout), what) for what in WHAT}
    assert all(value < BOUND for value in found.values()), found


def computes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    is_view = schema is None or any(r.alias_info for r in schema.returns)
    return not is_view and "empty" not in str(func)


def alive() -> dict[int, int]:
    """Bytes of the memory of each tensor. What autograd saved is in Python's hands here."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter))
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


# Tokens, and channels of the residual stream, of feed-forward, and of all queries, keys and values
N, D, F, A = 64, 32, 96, 32 + 2 * 16
CONFIG = LlamaConfig(
    dim=D, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=F, vocab_size=8
)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Block(CONFIG, n) for n in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(N).float()[:, None, None] / torch.arange(1.0, 5.0)
        cos_sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
        for block in self.layers.values():
            x = block(x, cos_sin, None)
        return x


def measured(
    compiled: str, recompute: str, *, split: bool
) -> tuple[Counter[str], int, list[Tensor]]:
    """Operations of a backward pass, bytes between its two parts, and gradients: of the input and of weights."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Blocks()
    weights = list(model.parameters())
    if recompute in ("full", "selective"):
        apply_ac(model, keep=DEFAULT_KEEP if recompute == "selective" else ())
    if compiled != "eager":
        budget = 0.3 if recompute == "memory_budget" else 1.0
        apply_compile(model, backend=compiled, memory_budget=budget, splits_backward=split)
    x, gradient = torch.randn(2, 1, N, D).unbind()
    x.requires_grad_()
    model(x).backward(gradient)  # compiles
    for leaf in (x, *weights):
        leaf.grad = None
    ran: list[Any] = []
    before, between, counted = alive().keys(), 0, Watch(lambda func, *_: ran.append(func))
    if not split:
        y = model(x)
        with counted:
            y.backward(gradient)
        found = x.grad
    else:
        with saving_for_two_passes():
            y = model(x)
        with counted:
            (found,), work = backward_input([y], [gradient], [x])
        assert all(w.grad is None for w in weights)
        del y
        now = alive()
        between = sum(now[n] for n in now.keys() - before)
        with counted:
            backward_weight(work)
    assert found is not None
    return (
        Counter(map(str, filter(computes, ran))),
        between,
        [found, *(w.grad for w in weights if w.grad is not None)],
    )


CASES = [
    (compiled, recompute)
    for compiled in ("eager", "aot_eager_decomp_partition")
    for recompute in RECOMPUTED
    if (compiled, recompute) != ("eager", "memory_budget")
]


@pytest.mark.parametrize(("compiled", "recompute"), CASES)
def test_each_operation_runs_once_and_what_w_reads_is_kept(
    compiled: str, recompute: str
) -> None:
    whole, _, expected = measured(compiled, recompute, split=False)
    split, between, found = measured(compiled, recompute, split=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert split == whole
    # Of each product its operand and its gradient, of three that read one tensor this one. torch's norms keep both, compiled ones nothing.
    products = 2 * (5 * D + 3 * F + A)
    norms = 2 * 2 * 2 * D if compiled == "eager" else 0
    assert between - 4 * N * (products + norms) in range(
        1024
    )  # gradients of the norms' weights
    assert len(found) == 1 + 2 * 9


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_in_several_places(compiled: bool) -> None:
    """Two blocks share their linear layer, and each uses it twice; a scale is used by both themselves."""
    torch.manual_seed(0)
    shared, scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def block(x: Tensor) -> Tensor:
        return x + scale * shared(torch.tanh(shared(x)))

    run: Any = block
    if compiled:
        torch.compiler.reset()
        run = torch.compile(block, backend=splitting_backend("aot_eager"))
    x, gradient = torch.randn(2, 4, 8).unbind()
    x.requires_grad_()
    leaves = x, scale, *shared.parameters()
    expected = torch.autograd.grad(block(block(x)), leaves, gradient)
    with saving_for_two_passes():
        y = run(run(x))
    (found,), work = backward_input([y], [gradient], [x])
    backward_weight(work)
    torch.testing.assert_close([found, *(w.grad for w in leaves[1:])], [*expected])


CASES_OF_GRAPHS: dict[str, Callable[..., Any]] = {
    "once directly and once through an operation": lambda x, w, v: (x @ w).tanh() @ (w @ v),
    "product with itself": lambda x, w, v: x * w[0] * (w[0] + 1) @ v,
    "an output that is a view": lambda x, w, v: (x @ w @ v).view(2, 2, 8).transpose(0, 1),
    "an output without the input": lambda x, w, v: (x @ w, v * 2),
    "a function, of a weight and what is computed from it": lambda x, w, v: _Product.apply(
        _Product.apply(x, w * 2).tanh(), w
    ),
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():  # a backward pass within
            y = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.grad((y * y).sum(), y)
        return grads[0] @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grads[0]


@pytest.mark.parametrize("name", CASES_OF_GRAPHS)
def test_graphs_of_every_kind(name: str) -> None:
    torch.manual_seed(0)
    x, w, v = (torch.randn(n, 8, requires_grad=True) for n in (4, 8, 8))
    w.register_hook(lambda gradient: 2 * gradient)
    compute = CASES_OF_GRAPHS[name]

    def outputs() -> list[Tensor]:
        found = compute(x, w, v)
        return [*found] if isinstance(found, tuple) else [found]

    gradients = [torch.randn_like(y) for y in outputs()]
    torch.autograd.backward(outputs(), gradients)
    expected = [leaf.grad for leaf in (x, w, v)]
    w.grad = v.grad = None
    with saving_for_two_passes():
        found = outputs()
    (of_x,), work = backward_input(found, gradients, [x])
    assert w.grad is None and v.grad is None
    backward_weight(work)
    torch.testing.assert_close([of_x, w.grad, v.grad], expected)


def test_compiled_programs_of_weights_computed_outside_and_of_any_length() -> None:
    w, t = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
    torch.compiler.reset()
    block = torch.compile(lambda x, t: (x @ w) * t, backend=splitting_backend("aot_eager"))
    for length in (4, 6, 9):  # from the second on, for any length
        x, gradient = torch.randn(2, length, 8).unbind()
        x.requires_grad_()
        expected = torch.autograd.grad((x @ w) * t.tanh(), (x, w, t), gradient)
        w.grad = t.grad = None
        with saving_for_two_passes():
            y = block(x, t.tanh())
        (found,), work = backward_input([y], [gradient], [x])
        backward_weight(work)
        torch.testing.assert_close([found, w.grad, t.grad], [*expected])
