"""Two GPUs: layouts beside one GPU, saves and resumes, groups and their time limits, and a rank that fails."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.support.jobs import ROOT
from tests.support.runs import Run, logged_rows, logged_steps, saved_tensors
from titan.parallel import build_mesh
from titan.parallel.init_distributed import start_process_group
from titan.parallel.torch_compat import set_timeout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
SETTINGS = (
    "--training.steps=3",
    "--lr_scheduler.total_steps=6",
    "--training.global_batch_size=8",
    "--training.mixed_precision_param=float32",
)
FAULTY = str(ROOT / "tests/tools/faulty_train.py")
EXPERTS = ("--model.name=qwen3", "--model.flavor=tiny_moe")
LAYOUTS = {
    "FSDP 2": (),
    "TP 2": ("--parallelism.tensor_parallel_degree=2",),
    "CP 2": ("--parallelism.context_parallel_degree=2",),
    "CP 2, ring": (
        "--parallelism.context_parallel_degree=2",
        "--parallelism.context_parallel_rotate_method=ring",
    ),
    "EP 2": (*EXPERTS, "--parallelism.expert_parallel_degree=2"),
    "weights on the host": ("--training.enable_cpu_offload=true",),
}


def train(folder: Path, ranks: int, *settings: str) -> None:
    batch = f"--training.local_batch_size={4 if ranks == 2 else 8}"
    run = Run(folder, *SETTINGS, batch, f"--nproc={ranks}", *settings)
    try:
        assert run.end() == 0, run.said()
    finally:
        run.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[tuple[float, float]]]:
    """Loss and gradient norm of each step on one GPU, without and with experts."""
    results = {}
    for has_experts in (False, True):
        folder = tmp_path_factory.mktemp("one") / "run"
        train(folder, 1, "--checkpoint.enable=false", *(EXPERTS if has_experts else ()))
        results[has_experts] = [(r["loss"], r["grad_norm"]) for r in logged_rows(folder)]
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_gpu(
    layout: str, tmp_path: Path, expected: dict[bool, list[tuple[float, float]]]
) -> None:
    folder = tmp_path / "run"
    local = ("--training.local_batch_size=8",) if layout.startswith(("TP", "CP")) else ()
    train(folder, 2, "--checkpoint.enable=false", *local, *LAYOUTS[layout])
    rows = logged_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, (loss, norm) in zip(rows, expected[layout == "EP 2"], strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_async_checkpoint_resumes(tmp_path: Path) -> None:
    settings = ("--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.interval=3")
    train(tmp_path / "whole", 2, *settings, "--training.steps=6")
    train(tmp_path / "parts", 2, *settings)
    train(tmp_path / "parts", 2, *settings, "--training.steps=6")
    assert logged_steps(tmp_path / "parts") == list(range(1, 7))
    whole, parts = (
        saved_tensors(tmp_path / n / "checkpoint/step-6") for n in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6, msg=name)


def _check_groups(rank: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "TITAN_STORE": store}
    start_process_group(init_timeout_s=77, expandable_segments=True)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    mesh = build_mesh(device.type, dp_shard=2)
    set_timeout(timedelta(seconds=77))
    for group in (dist.group.WORLD, mesh.get_group()):
        assert group is not None
        # On GPUs no group of gloo beside it.
        assert dist.get_backend(group) == dist.get_default_backend_for_device(device)
        if device.type == "cuda":
            assert {d.type for d in group._device_types} == {"cuda"}
        assert group._get_backend(device).options._timeout == timedelta(seconds=77)
    dist.destroy_process_group()


def test_groups_have_one_backend_and_the_time_limit_of_the_job(tmp_path: Path) -> None:
    multiprocessing.spawn(_check_groups, (str(tmp_path),), nprocs=2)


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    """Rank 1 raises in step 3, and rank 0 waits for it in a collective of NCCL."""
    launch = ["-m", "titan.ops.launch", "--standalone", "--max-restarts=0"]
    run = Run(
        tmp_path / "run",
        *SETTINGS,
        "--training.local_batch_size=4",
        program=[*launch, "--nproc-per-node=2", FAULTY],
        FAULT="device_oom",
    )
    try:
        assert run.end() != 0, run.said()
        assert "CUDA out of memory" in run.said()
        assert logged_steps(run.folder) == [1, 2]
    finally:
        run.kill()
