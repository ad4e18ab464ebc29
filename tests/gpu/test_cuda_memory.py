"""On an accelerator: what recomputation and offloading save, with the same gradients; and real float8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.steps import build_step
from titan.config.schema import JobConfig
from titan.data.packing import Batch
from titan.parallel import build_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
SIZES = {"dim": 1024, "n_layers": 8, "n_heads": 16, "n_kv_heads": 4, "ffn_dim": 3072}


@pytest.fixture
def group():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(**sections: Any) -> tuple[list[float], list[float], int]:
    """Losses and norms of three steps, and the bytes allocated at the peak of the last."""
    config = JobConfig.model_validate(
        {
            "model": {"flavor": "tiny", "overrides": SIZES},
            "lr_scheduler": {"warmup_steps": 0},
            "training": {"steps": 3, "local_batch_size": 4, "seq_len": 2048},
            "debug": {"deterministic": True},
            **sections,
        }
    )
    torch.manual_seed(0)
    train_step = build_step(config, build_mesh("cuda"), device=torch.device("cuda:0"))
    losses, norms = [], []
    for step in range(1, 4):
        torch.accelerator.reset_peak_memory_stats()
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(2048, (4, 2049), generator=generator)
        batch = Batch(tokens_BS=rows[:, :-1], labels_BS=rows[:, 1:])
        report = train_step.train([batch], step=step)
        losses.append(report.loss.item())
        norms.append(report.grad_norm.item())
    return losses, norms, torch.accelerator.max_memory_allocated()


def test_modes_keep_the_numbers_and_save_memory(group: None) -> None:
    peaks = {}
    plain = run()
    for name, section in {
        "every 2nd": {"mode": "selective", "selective_ac_option": 2},
        "op": {"mode": "selective"},
        "full": {"mode": "full"},
        "offload": {"cpu_offload": True},
        "full, offload": {"mode": "full", "cpu_offload": True},
    }.items():
        losses, norms, peaks[name] = run(activation_checkpoint=section)
        assert losses == pytest.approx(plain[0], rel=1e-4), name
        # Attention's backward adds atomically.
        assert norms == pytest.approx(plain[1], rel=3e-3), name
    # With "full", memory peaks in the first block's backward pass, when no other block's input is left to offload.
    assert plain[2] > peaks["every 2nd"] > peaks["op"] > peaks["full"] >= peaks["full, offload"]
    assert plain[2] > peaks["offload"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_products_equal_emulated_ones(group: None, recipe: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    runs = {}
    for emulate in (False, True):
        runs[emulate] = run(
            model={"overrides": SIZES, "converters": ["quantize.linear.float8"]},
            quantize={"linear": {"float8": {"recipe_name": recipe, "emulate": emulate}}},
            compile={"enable": True, "components": ["model"]},
        )
    assert runs[False][0] == pytest.approx(runs[True][0], rel=1e-3)
    assert runs[False][1] == pytest.approx(runs[True][1], rel=2e-2)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_compile_modes(group: None, mode: str) -> None:
    bf16 = {"dtype": "bfloat16", "steps": 3, "local_batch_size": 4, "seq_len": 2048}
    losses, _, _ = run(training=bf16, compile={"enable": True, "mode": mode})
    eager, _, _ = run(training=bf16)
    assert losses == pytest.approx(eager, rel=1e-2)
