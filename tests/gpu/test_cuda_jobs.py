"""On one GPU: experts, the ring's blocks, whole jobs beside the CPU, and preflight."""

from __future__ import annotations

import json
import sys
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.commands import finished
from tests.support.jobs import ROOT, job
from tests.support.metrics import read_json_lines
from tests.support.steps import build_step
from tests.support.tables import table, tabled
from tests.support.trainers import Trainer
from titan.data.packing import Batch
from titan.models.common.moe import grouped_matmuls, looped_matmuls
from titan.parallel import block_attention, build_mesh, ring
from titan.parallel.block_attention import AttentionSpec

DEVICE = torch.device("cuda:0")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# ---- experts -----------------------------------------------------------------------------------


@tabled("counts")
def test_grouped_products_equal_a_loop(counts: list[int]) -> None:
    """Output and gradients in bf16; experts without rows get zeros."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 64), (4, 96, 64), (4, 64, 96), (4, 96, 64))
    values = [torch.randn(s, generator=generator).mul(0.2) for s in (*shapes, (128, 64))]
    *inputs, weight = (x.to(DEVICE, torch.bfloat16) for x in values)
    results = []
    for products in (grouped_matmuls, looped_matmuls):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = products(leaves[0], torch.tensor(counts, device=DEVICE), *leaves[1:])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, weight)])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-2
    for gradient in results[0][2:]:
        for expert, count in enumerate(counts):
            assert gradient[expert].any().item() == (count > 0)


def expert_losses(**sections: Any) -> list[float]:
    config = job(
        model={"name": "qwen3", "flavor": "tiny_moe"},
        training={"mixed_precision_param": "bfloat16", "steps": 3},
        **sections,
    )
    step = build_step(config, build_mesh(DEVICE.type), device=DEVICE)
    losses = []
    for number in range(1, 4):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randint(2048, (4, 129), generator=generator)
        batch = Batch(tokens_BS=rows[:, :-1], labels_BS=rows[:, 1:])
        losses.append(step.train([batch], step=number).loss.item())
    return losses


def test_experts_compile_with_each_recomputation(group: None) -> None:
    eager = expert_losses()
    for mode in ("none", "selective", "full"):
        found = expert_losses(compile={"enable": True}, activation_checkpoint={"mode": mode})
        assert found == pytest.approx(eager, rel=1e-2), mode


# ---- the ring's blocks -------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("groups", [4, 2])
def test_merged_blocks_equal_the_whole(
    kernel: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of a sequence, as two ranks see them, against plain attention in fp32."""
    if kernel == "cudnn" and not block_attention.cudnn_is_faster():
        pytest.skip("titan takes cuDNN on Hopper and Blackwell only, from 9.15.1 on")
    if DEVICE.type == "cuda":  # it has one kernel on a CPU
        chosen = create_autospec(block_attention.choose_kernel, return_value=kernel)
        monkeypatch.setattr(block_attention, "choose_kernel", chosen)
    dtype = torch.float32 if kernel == "efficient" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    heads, n = (4, groups, groups, 4), 256
    values = [torch.randn(2, h, n, 64, generator=generator).to(DEVICE, dtype) for h in heads]
    q, k, v, grad = values
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    copies = [x.repeat_interleave(4 // groups, 1) for x in leaves[1:]]
    expected = F.scaled_dot_product_attention(leaves[0], copies[0], copies[1], is_causal=True)
    expected_gradients = torch.autograd.grad(expected, leaves, grad.float())

    halves = slice(0, n // 2), slice(n // 2, n)
    blocks = [
        (halves[0], halves[0], True),
        (halves[1], halves[1], True),
        (*halves[::-1], False),
    ]
    out, lse = torch.zeros_like(q, dtype=torch.float32), torch.full((2, 4, n), -torch.inf, device=DEVICE)  # fmt: skip
    for rows, keys, causal in blocks:
        part = block_attention.attend(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], spec=AttentionSpec(causal), scale=None
        )
        ring.merge_softmax(out[:, :, rows], lse[:, :, rows], *part)
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rows, keys, causal in blocks:
        of_rows = (grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys])
        whole = (out.to(dtype)[:, :, rows], lse[:, :, rows])
        parts = block_attention.attend_backward(
            *of_rows, *whole, spec=AttentionSpec(causal), scale=None
        )
        for total, where, part in zip(found, (rows, keys, keys), parts, strict=True):
            total[:, :, where] += part
    bound = 1e-5 if dtype == torch.float32 else 1e-2  # bf16 has 8 bits
    for ours, theirs in zip((out, *found), (expected, *expected_gradients), strict=True):
        assert relative_error(ours, theirs) < bound


# ---- jobs --------------------------------------------------------------------------------------


class CpuTrainer(Trainer):
    def _init_distributed(self) -> torch.device:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return torch.device("cpu")


JOBS: dict[str, dict[str, Any]] = table(__file__, "jobs")


def run(
    trainer_type: type[Trainer],
    folder: Path,
    name: str,
    precision: str,
    weights: dict[str, Tensor],
) -> list[dict[str, Any]]:
    """Return the rows of metrics. weights: copied into the model; filled with its own if empty."""
    sections = dict(JOBS[name])
    training = {"steps": 3, "seq_len": 128, "mixed_precision_param": precision}
    training |= sections.pop("training", {})
    trainer = trainer_type(
        job(folder, training=training, checkpoint={"enable": False}, **sections)
    )
    try:
        for key, parameter in trainer.train_step.model_parts[0].named_parameters():
            value = parameter.detach()
            value = value.to_local() if isinstance(value, DTensor) else value
            if key in weights:  # the devices' generators differ
                value.copy_(weights[key])
            else:
                weights[key] = value.cpu().clone()
        assert trainer.run() == 0
    finally:
        trainer.close()
    return read_json_lines(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "precision", "rtol"),
    [("masks", "bfloat16", 1e-2), ("validation", "bfloat16", 1e-2), ("Muon", "float32", 1e-4)],
)
def test_jobs_equal_the_cpu(tmp_path: Path, name: str, precision: str, rtol: float) -> None:
    """Against fp32 on the CPU. Muon: beside FSDP on one rank."""
    weights: dict[str, Tensor] = {}
    expected = run(CpuTrainer, tmp_path / "cpu", name, "float32", weights)
    found = run(Trainer, tmp_path / "gpu", name, precision, weights)
    keys = ["loss", "validation_loss"] if name == "validation" else ["loss"]
    for key in keys:
        values = [[row[key] for row in rows if key in row] for rows in (found, expected)]
        assert len(values[1]) == 3
        assert values[0] == pytest.approx(values[1], rel=rtol), key


# ---- the machine -------------------------------------------------------------------------------


def test_preflight(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "titan.cli", "preflight", "train_configs/debug_model.toml"]
    command += ["--nproc=1", f"--json={report}", f"--job.dump_folder={tmp_path / 'run'}"]
    command += ["--training.dataset=synthetic", "--model.overrides.n_layers=2"]
    result = finished(command, cwd=ROOT, code=None)
    # 1: the card, or its disk, is slower than its profile says.
    assert result.returncode in (0, 1), result.stderr
    found = json.loads(report.read_text())
    [facts] = found["ranks"]
    assert found["dry_run"] is not None and all(map(isfinite, found["dry_run"]["losses"]))
    assert not any("loss" in problem for problem in found["problems"])
    assert facts["rates"] and all(rate > 0 for rate in facts["rates"].values())
    if DEVICE.type == "cuda":
        assert facts["device"] == torch.cuda.get_device_name()
