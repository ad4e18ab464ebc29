"""The same train_step on an accelerator: numbers as on the CPU, and a run that resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.runs import logged_rows
from tests.support.steps import build_step
from tests.support.trainers import Trainer, run_to_end
from titan.config.schema import JobConfig
from titan.data.packing import Batch
from titan.parallel import build_mesh


def _train(
    device: str, precision: str, weights: dict[str, torch.Tensor] | None
) -> dict[str, Any]:
    config = JobConfig.model_validate(
        {
            "model": {"flavor": "tiny"},
            "training": {"mixed_precision_param": precision, "steps": 5},
            "lr_scheduler": {"warmup_steps": 1},
        }
    )
    mesh = build_mesh(device)
    train_step = build_step(
        config, mesh, device=torch.device(device if device == "cpu" else f"{device}:0")
    )
    parameters = dict(train_step.model_parts[0].named_parameters())
    local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    if weights is not None:  # the devices' generators differ
        with torch.no_grad():
            for name, value in weights.items():
                local[name].copy_(value)
    initial = {n: p.detach().cpu().clone() for n, p in local.items()}
    losses, norms = [], []
    for step in range(1, 6):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(2048, (4, 129), generator=generator)
        batch = Batch(tokens_BS=rows[:, :-1], labels_BS=rows[:, 1:])
        report = train_step.train([batch], step=step)
        losses.append(report.loss.item())
        norms.append(report.grad_norm.item())
    return {"initial": initial, "losses": losses, "norms": norms}


@pytest.mark.parametrize(("precision", "rtol"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_losses_and_norms_equal_the_cpu(group: None, precision: str, rtol: float) -> None:
    """fp32 to rounding; bf16 to its 8 bits, against fp32 on the CPU."""
    cpu = _train("cpu", "float32", None)
    gpu = _train("cuda", precision, cpu["initial"])
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=rtol)
    assert gpu["norms"] == pytest.approx(
        cpu["norms"], rel=rtol * (10 if precision == "float32" else 3)
    )


def test_parameters_on_the_host(tmp_path: Path) -> None:
    config = JobConfig.model_validate(
        {
            "job": {"dump_folder": str(tmp_path)},
            "model": {"flavor": "tiny"},
            "training": {
                "seq_len": 128,
                "steps": 4,
                "dataset": "synthetic",
                "enable_cpu_offload": True,
            },
            "lr_scheduler": {"warmup_steps": 2},
        }
    )
    trainer = Trainer(config)
    try:
        assert {p.device.type for p in trainer.train_step.model_parts[0].parameters()} == {
            "cpu"
        }
        assert trainer.run() == 0
    finally:
        trainer.close()


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    def run(folder: Path, steps: int) -> list[dict[str, Any]]:
        config = JobConfig.model_validate(
            {
                "job": {"dump_folder": str(folder)},
                "model": {"flavor": "tiny"},
                "training": {"seq_len": 128, "steps": steps, "dataset": "synthetic"},
                "lr_scheduler": {"warmup_steps": 2, "total_steps": 8},
                "metrics": {"log_freq": 1},
            }
        )
        trainer = Trainer(config)
        run_to_end(trainer)
        return logged_rows(folder)

    whole = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 4)
    parts = run(tmp_path / "parts", 8)
    assert [r["step"] for r in parts] == list(range(1, 9))
    assert [(r["loss"], r["grad_norm"]) for r in parts] == [
        (r["loss"], r["grad_norm"]) for r in whole
    ]
    assert whole[-1]["memory_kind"] == "device" and whole[-1]["memory_gib"] > 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_step_waits_for_the_device(tmp_path: Path, accumulation: int) -> None:
    """From the second step on, until a step logs, nothing synchronises the host with the device."""
    config = JobConfig.model_validate(
        {
            "job": {"dump_folder": str(tmp_path)},
            "model": {"flavor": "tiny"},
            "training": {
                "seq_len": 128,
                "local_batch_size": 2,
                "global_batch_size": 2 * accumulation,
                "steps": 20,
                "dataset": "synthetic",
            },
            "metrics": {"log_freq": 20},
            "checkpoint": {"enable": False},
        }
    )
    trainer = Trainer(config)
    try:
        for _ in range(4):
            trainer.train_one_step()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            trainer.train_one_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
    assert trainer.step == 8
