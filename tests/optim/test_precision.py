"""What is computed in fp32 although weights and activations are bf16, and a run in nothing but bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.runs import logged_rows
from tests.support.trainers import Trainer
from titan.config.schema import JobConfig
from titan.models import llama3, qwen3
from titan.models.common.attention import InnerAttention

ULP = 2.0**-8  # half the relative distance between bf16 numbers, at most


@pytest.mark.parametrize("family", [llama3, qwen3], ids=["llama3", "qwen3"])
def test_norms_are_computed_in_fp32(family) -> None:
    """To the last bit of bf16. Squares added up in bf16 would stop at 256: the norm would be off by a factor of four."""
    with torch.device("meta"):
        model = family.build_model(family.FLAVORS["tiny"])
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert norms and all(type(m) is nn.RMSNorm for m in norms)
    norm = nn.RMSNorm(4096, eps=1e-5).bfloat16()
    torch.manual_seed(0)
    x = torch.randn(8, 4096).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(4096) + 0.5)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact * norm.weight.double()
    error = ((norm(x).double() - exact) / exact).abs()
    assert error.max() < 2 * ULP  # before and after the weight, at most


def test_softmax_is_computed_in_fp32() -> None:
    """Of 2,048 equal scores. A sum in bf16 would stop at 256, and the outputs would be eight times too large."""
    shape = (1, 2, 2048, 16)
    v = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 1).bfloat16()
    out = InnerAttention()(
        torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16(), v, None
    )
    count = torch.arange(1, 2049).view(-1, 1)
    exact = v.double().cumsum(2) / count
    assert ((out.double() - exact) / exact).abs().max() < 2 * ULP


def test_a_run_in_bf16_alone(tmp_path: Path) -> None:
    """Weights, gradients and moments; stopped in between, it goes on as if it had not."""

    def rows(folder: Path, *stops: int) -> list[tuple[float, float]]:
        for steps in stops:
            config = JobConfig.model_validate(
                {
                    "job": {"dump_folder": str(folder)},
                    "training": {
                        "dataset": "synthetic",
                        "seq_len": 32,
                        "local_batch_size": 4,
                        "steps": steps,
                        "dtype": "bfloat16",
                        "mixed_precision_param": "bfloat16",
                    },
                    "optimizer": {
                        "stochastic_rounding": True,
                        "implementation": "for-loop",
                        "lr": 3e-3,
                    },
                    "lr_scheduler": {"warmup_steps": 2, "total_steps": 8},
                    "metrics": {"log_freq": 1},
                }
            )
            trainer = Trainer(config)
            try:
                trainer.run()
                (part,) = trainer.train_step.model_parts
                state = trainer.train_step.optimizer.state
                assert {p.dtype for p in part.parameters()} == {torch.bfloat16}
                assert {s["exp_avg"].dtype for s in state.values()} == {torch.bfloat16}
            finally:
                trainer.close()
        return [(row["loss"], row["grad_norm"]) for row in logged_rows(folder)]

    whole = rows(tmp_path / "whole", 8)
    assert whole[-1][0] < whole[0][0]
    assert rows(tmp_path / "parts", 5, 8) == whole
