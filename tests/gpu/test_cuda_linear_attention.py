"""Linear attention by the kernels of flash-linear-attention against plain torch in fp32, on the same 16-bit inputs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.linear_attention import KINDS, inputs
from titan.contrib.transformers.linear_attention import LinearAttention, linear_attention
from titan.contrib.transformers.linear_attention_kernels import has_kernel

NAMES = [name for name in KINDS if name != "gated linear"]  # which has no kernel
# Products are in bf16, which has 8 bits: 2 ** -8 is 0.004. A position that a fault reads, or does not, costs 0.1 and more.
TOLERANCE = 0.02
MOST_SETTINGS = 2


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few block sizes of each kernel: all of them take minutes to compile, and the numbers are the same."""
    if not torch.cuda.is_available():  # tests/test_gpu_on_a_cpu.py
        return
    autotuner = import_module("triton.runtime.autotuner").Autotuner
    those_of_shape = autotuner.prune_configs

    def some(self: Any, kwargs: Any) -> list[Any]:
        return those_of_shape(self, kwargs)[:: max(1, len(self.configs) // MOST_SETTINGS)]

    monkeypatch.setattr(autotuner, "prune_configs", some)


def of_16_bits(name: str, length: int, **sizes: Any) -> list[Tensor | None]:
    given = inputs(KINDS[name], length, **sizes)
    gates, betas = given[3:]
    wide = [x.to("cuda", torch.bfloat16) for x in given[:3] if x is not None]
    return [*wide, *(x if x is None else x.to("cuda", torch.float32) for x in (gates, betas))]


def with_gradients(call: Any, given: list[Tensor | None], **options: Any) -> dict[str, Tensor]:
    leaves = [x if x is None else x.clone().requires_grad_() for x in given]
    out, last = call(*leaves, **options)
    generator = torch.Generator("cuda").manual_seed(0)
    outs = [x for x in (out, last) if x.requires_grad]
    grads = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in outs]
    torch.autograd.backward(outs, grads)
    names = ("q", "k", "v", "gates", "betas")
    of_inputs = {
        f"gradient of {name}": x.grad
        for name, x in zip(names, leaves, strict=True)
        if x is not None and x.grad is not None
    }
    return {"output": out.detach(), "last state": last.detach(), **of_inputs}


def check(given: list[Tensor | None], **options: Any) -> None:
    q, _, v, gates, betas = given
    assert q is not None and v is not None
    assert has_kernel(q, v, gates, betas)
    in_fp32 = [x if x is None else x.float() for x in given]
    mine, plain = (with_gradients(linear_attention, x, **options) for x in (given, in_fp32))
    errors = {
        name: ((mine[name].float() - x).norm() / x.norm()).item() for name, x in plain.items()
    }
    print({name: round(error, 5) for name, error in errors.items()})
    assert mine.keys() == plain.keys()
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_plain_torch_computes(name: str) -> None:
    check(of_16_bits(name, 300, batch=2))


@pytest.mark.parametrize("name", NAMES)
def test_documents_and_a_state_before(name: str) -> None:
    starts = torch.zeros(2, 300, dtype=torch.bool, device="cuda")
    starts[0, [0, 40, 41, 200]] = starts[1, 130] = True
    state = torch.linspace(-1, 1, 2 * 4 * 16 * 12, device="cuda").view(2, 4, 16, 12)
    check(of_16_bits(name, 300, batch=2), starts_BS=starts, state=state, scale=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_the_map_of_a_part_of_the_sequence(name: str) -> None:
    """Context parallelism asks for the state after the part and for the linear map, and finds the state before it."""
    first = torch.linspace(-1, 1, 2 * 4 * 16 * 12, device="cuda").view(2, 4, 16, 12)

    def state(added: Tensor, linear: Tensor) -> Tensor:
        return first + added / 2 + (linear * first if linear.shape[-1] == 1 else linear @ first)

    check(of_16_bits(name, 20, batch=2, gate=0.1), state=state)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_block_has_the_kernel_in_it(name: str) -> None:
    """Without a break of the graph, and with the numbers of the kernel."""
    module, given = LinearAttention(), of_16_bits(name, 256)
    compiled = torch.compile(module, fullgraph=True)

    def call(module: Any) -> dict[str, Tensor]:
        return with_gradients(lambda *x: (module(*x), torch.zeros(1, device="cuda")), given)

    eager, mine = call(module), call(compiled)
    for name, x in eager.items():
        assert torch.allclose(mine[name].float(), x.float(), rtol=0.01, atol=0.01), name
