"""Optimizers, and 8-bit products on a GPU: the numbers of the CPU, and as few launches as promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.steps import build_step
from titan.config.schema import AdamW8bitSection, AdamWSection, JobConfig, MuonSection
from titan.data.packing import Batch
from titan.optim.optimizers import build_optimizer
from titan.parallel import build_mesh

KINDS: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "eight": (AdamW8bitSection, {}, torch.float32),
    "bf16": (AdamWSection, {"state_dtype": "bfloat16"}, torch.float32),
    "rounded": (AdamWSection, {"stochastic_rounding": True}, torch.bfloat16),
    "muon": (MuonSection, {"ns_dtype": "float32"}, torch.float32),
}


def parameters(dtype: torch.dtype, *, copies: int, device: str) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (6, 2048), "narrow": (10, 64), "vector": (64,)}
    return {
        f"layers.{i}.{name}": nn.Parameter(
            torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        )
        for i in range(copies)
        for name, shape in shapes.items()
    }


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in named.values():
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad.to(device=parameter.device, dtype=parameter.dtype)


def update(kind: str, device: str, implementation: str) -> list[Tensor]:
    section, settings, dtype = KINDS[kind]
    named = parameters(dtype, copies=3, device=device)
    options = {"lr": 0.01, "implementation": implementation, **settings}
    optimizer = build_optimizer(section.model_validate(options), named.items())
    for step in range(5):
        set_gradients(named, step)
        optimizer.step()
    return [p.detach().float().cpu() for p in named.values()]


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_equal_the_cpu(kind: str, implementation: str) -> None:
    """Rounded states equal those of a CPU, except a few elements next to a boundary. Stochastic rounding draws other numbers on a GPU."""
    expected = torch.cat([x.flatten() for x in update(kind, "cpu", "for-loop")])
    found = torch.cat([x.flatten() for x in update(kind, "cuda", implementation)])
    apart = (found - expected).abs()
    if kind == "rounded":  # five gaps of bf16 at 4, and nothing on average
        assert apart.max() < 5 * 2**-5 and (found - expected).mean().abs() < 1e-4
        return
    assert (apart > 1e-5).float().mean() < (1e-4 if kind == "muon" else 1e-3)
    # A level of a moment: a hundredth of the five updates of 0.01.
    assert apart.max() < 1e-3


def test_more_parameters_launch_hardly_more() -> None:
    section, settings, dtype = KINDS["muon"]
    counts = []
    for copies in (2, 12):
        named = parameters(dtype, copies=copies, device="cuda")
        options = section.model_validate({"implementation": "foreach", **settings})
        optimizer = build_optimizer(options, named.items())
        for step in range(2):
            set_gradients(named, step)
            with torch.profiler.profile() as profile:
                optimizer.step()
        events = profile.events()
        counts.append(
            sum(e.name in ("cudaLaunchKernel", "cuLaunchKernel") for e in events or ())
        )
    # Multi-tensor kernels take a limited number of tensors each.
    assert 0 < counts[1] <= counts[0] + 6


# ---- 8 bits ------------------------------------------------------------------------------------


def needs(capability: tuple[int, int]) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability}")


def losses(**sections: Any) -> list[float]:
    config = JobConfig.model_validate(
        {
            "model": {"flavor": "tiny", **sections.pop("model", {})},
            "training": {"steps": 5, **sections.pop("training", {})},
            "lr_scheduler": {"warmup_steps": 1},
            **sections,
        }
    )
    step = build_step(config, build_mesh("cuda"), device=torch.device("cuda:0"))
    results = []
    for number in range(1, 6):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randint(2048, (4, 129), generator=generator)
        batch = Batch(tokens_BS=rows[:, :-1], labels_BS=rows[:, 1:])
        results.append(step.train([batch], step=number).loss.item())
    return results


def test_the_output_layer_in_float8_equals_its_emulation(group: None) -> None:
    needs((8, 9))

    def run(*, emulate: bool) -> list[float]:
        return losses(
            model={"converters": ["quantize.linear.float8"]},
            quantize={"linear": {"float8": {"filter_fqns": [], "emulate": emulate}}},
            loss={"chunk_tokens": 256},
        )

    assert run(emulate=False) == pytest.approx(run(emulate=True), rel=2e-3)
