"""Preflight on CPU ranks: what is slow, full, unequal or too large is found and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import finished
from tests.support.ranks import Pool
from titan.checks.rules import check_to_run
from titan.config.schema import JobConfig
from titan.ops.preflight import cli, dry_run, judge, measure
from titan.ops.preflight.judge import problems
from titan.ops.preflight.measure import DiskFacts, RankFacts
from titan.parallel import build_mesh
from titan.sim.price.profiles import load_profile

ROOT = Path(__file__).parents[2]
HOST = os.uname().nodename
CPU = torch.device("cpu")
MATMUL, LINK = "matrix product, bfloat16", "link to a neighbour"


def facts(rank: int, slow: dict[str, float] | None = None, **changed: Any) -> RankFacts:
    """One of several equal H100s."""
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank // 2}",
        "device": "NVIDIA H100 80GB HBM3",
        "versions": {"torch": "2.13.0", "nccl": "2.28"},
        "clock_s": 0.001,
        "disk": None,
        "gpu": {},
    }
    rates = {MATMUL: 700.0, "memory, copy": 2900.0, LINK: 300.0, "dp_shard all-reduce": 40.0}
    return RankFacts(rates=rates | (slow or {}), **(values | changed))


def problems_of(ranks: list[RankFacts], *, checkpoint_gib: float = 1.0) -> list[str]:
    return problems(ranks, load_profile("h100-sxm"), checkpoint_gib=checkpoint_gib, num_kept=2)


@pytest.mark.parametrize(("cudnn", "kernel"), [(91500, "flash2"), (91501, "cudnn")])
def test_the_machines_cudnn_decides_on_attention(
    monkeypatch: pytest.MonkeyPatch, cudnn: int, kernel: str
) -> None:
    """torch since 2.10 wants one above 9.15.0 (check_prefer_cudnn_attention in sdp_utils.cpp)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    known = measure.versions()
    assert (known["cudnn"], known["attention"]) == (f"9.15.{cudnn - 91500}", kernel)


def test_equal_ranks_have_no_problems() -> None:
    assert problems_of([facts(rank) for rank in range(4)]) == []


def test_each_outlier_is_named_with_rank_host_and_figure() -> None:
    ranks = [facts(rank) for rank in range(8)]
    gpu = {"clocks.sm": "1200", "clocks.max.sm": "1980", "temperature.gpu": "88"}
    ranks[3] = facts(3, {MATMUL: 560.0}, gpu=gpu)
    ranks[4] = facts(4, versions={"torch": "2.13.0", "nccl": "2.27"}, clock_s=-2.5)
    ranks[5] = facts(5, {LINK: 150.0, "memory, copy": 2700.0})  # the copy is within 10 %
    ranks[6] = facts(6, disk=DiskFacts(folder="/out", free_gib=1.5))
    ranks[7] = facts(
        7, disk=DiskFacts(folder="/out", free_gib=9.0, error="Read-only file system")
    )
    assert problems_of(ranks) == [
        "rank 4 on node2: nccl is 2.27, on most ranks 2.28",
        "rank 4 on node2: its clock is -2.5 s off rank 0's; run locks and logs need clocks that agree (NTP)",
        "rank 3 on node1: matrix product, bfloat16 560 TFLOP/s, 20% below the median 700 (at 1200 of 1980 MHz, 88 C)",
        "rank 5 on node2: link to a neighbour 150 GB/s, 50% below the median 300",
        "rank 6 on node3: /out has 1.5 GiB free; 2 checkpoints of 1 GiB need 2",
        "rank 7 on node3: /out cannot be written: Read-only file system",
    ]


def test_all_ranks_below_the_profile_are_a_problem_too() -> None:
    [problem] = problems_of([facts(rank, {MATMUL: 350.0}) for rank in range(4)])
    assert problem.startswith(
        "all ranks: matrix product, bfloat16 350 TFLOP/s, where the hardware profile expects"
    )
    on_cpu = [facts(rank, {MATMUL: 0.1}, device="CPU") for rank in range(4)]
    assert problems(on_cpu, load_profile("cpu"), checkpoint_gib=0, num_kept=2) == []


def job(folder: Path, **changes: Any) -> JobConfig:
    sections: dict[str, Any] = {
        "job": {"dump_folder": str(folder)},
        "model": {"flavor": "tiny", "overrides": {"n_layers": 2}},
        "training": {
            "dataset": "synthetic",
            "seq_len": 32,
            "local_batch_size": 2,
            "mixed_precision_param": "float32",
        },
    }
    return JobConfig.model_validate(sections | changes)


def preflight(folder: Path, fault: str, dry: bool) -> tuple[int, dict[str, Any]]:
    """On one rank; rank 1 is the odd one, if there is a fault."""
    measure._MATMUL["cpu"], measure.MESSAGE_BYTES["cpu"] = 128, 2**18
    measure._COPY_BYTES["cpu"] = 2**20
    is_odd, mm, versions = dist.get_rank() == 1, torch.mm, measure.versions
    if fault == "slow" and is_odd:

        def slow(*args: Any) -> Any:
            time.sleep(0.02)
            return mm(*args)

        torch.mm = slow  # pyrefly: ignore[bad-assignment]
    elif fault == "version" and is_odd:
        measure.versions = lambda: versions() | {"torch": "2.11.0"}
    elif fault == "memory":

        def build(*args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."
            )

        dry_run.build_train_step, os._exit = build, _raise  # pyrefly: ignore[bad-assignment]
    world = dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    degrees = {
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 2 if world == 4 else 1,
    }
    config = job(folder, parallelism=degrees)
    layout = check_to_run(config, world_size=world)
    mesh = build_mesh("cpu", dp_shard=layout.dp_shard, tp=layout.tp)
    file = folder / f"report-{dist.get_rank()}.json"
    code = 1
    with suppress(SystemExit):
        code = cli.check_all(
            config, layout, device=CPU, mesh=mesh, json_file=str(file), dry=dry
        )
    return code, json.loads(file.read_text()) if file.exists() else {}


def _raise(code: int) -> None:
    raise SystemExit(code)


def test_four_ranks_on_two_axes_and_a_dry_run(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(4, preflight, tmp_path, "", True)
    report = results[0][1]
    # Ranks share cores with whatever else runs here: a rate may be an outlier, anything else may not.
    others = [text for text in report["problems"] if "below the median" not in text]
    assert (others, {c for c, _ in results}) == ([], {int(bool(report["problems"]))})
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 2, 3]
    axes = {
        f"{axis} {what}" for axis in ("dp_shard", "tp") for what in ("all-reduce", "all-gather")
    }
    for rank in report["ranks"]:
        assert rank["rates"].keys() == axes | {"matrix product, float32", "memory, copy", LINK}
        assert min(rank["rates"].values()) > 0 and abs(rank["clock_s"]) < 1
    assert report["ranks"][0]["disk"]["write_gb_per_s"] > 0
    assert len(report["dry_run"]["steps_s"]) == 2
    assert report["dry_run"]["losses"][0] == pytest.approx(7.6, abs=0.8)  # ln 2048: untrained
    assert 0 < report["checkpoint_gib"] < 0.1
    assert not list(tmp_path.glob(".preflight*"))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("slow", f"rank 1 on {HOST}: matrix product, float32"),
        ("version", f"rank 1 on {HOST}: torch is 2.11.0, on most ranks {torch.__version__}"),
    ],
)
def test_an_odd_rank_is_named(tmp_path: Path, pool: Pool, fault: str, text: str) -> None:
    results = pool.run(3, preflight, tmp_path, fault, False)
    assert [code for code, _ in results] == [1, 1, 1]
    assert any(problem.startswith(text) for problem in results[0][1]["problems"])


def test_memory_that_runs_out_in_the_dry_run(tmp_path: Path, pool: Pool) -> None:
    for rank, (code, report) in enumerate(pool.run(2, preflight, tmp_path, "memory", True)):
        assert code == 1 and report["dry_run"] is None
        assert report["problems"][-1].startswith(
            f"dry run: rank {rank} on {HOST} is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. Use a smaller"
        )


def test_the_command(tmp_path: Path) -> None:
    """Two processes; then weights that no machine holds: torch's own message, and exit 1."""
    command = [sys.executable, "-m", "titan.cli", "preflight", "train_configs/debug_model.toml"]
    command += f"--nproc 2 --job.dump_folder={tmp_path} --training.dataset=synthetic".split()
    file = tmp_path / "report.json"
    huge = f"--model.overrides.dim=16384 --model.overrides.ffn_dim=16777216 --checkpoint.enable=false --json {file}".split()
    run = finished([*command, *huge], cwd=ROOT, timeout=120, code=None)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    assert "2 ranks on" in run.stdout and "PROBLEM  dry run: rank" in run.stdout
    assert "is out of memory: DefaultCPUAllocator: can't allocate memory" in run.stdout
    assert "is out of memory" in json.loads(file.read_text())["problems"][-1]
    nonsense = finished([*command, "--training.step=3"], cwd=ROOT, code=None)
    assert nonsense.returncode == 2 and "did you mean 'steps'" in nonsense.stderr


def test_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs root, to mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "titan", tmp_path])
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        full = measure.disk(tmp_path)
        assert full.error == "No space left on device" and full.free_gib < 0.01
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    [cannot, too_little] = problems_of([facts(0, {"dp_shard all-reduce": 480.0}, disk=full)])
    assert cannot == f"rank 0 on node0: {tmp_path} cannot be written: No space left on device"
    assert "2 checkpoints of 1 GiB need 2" in too_little


def test_the_table_is_a_table() -> None:
    ranks = [replace(facts(rank), host="node0") for rank in range(2)]
    text = judge.render(ranks, load_profile("h100-sxm"), checkpoint_gib=1)
    assert text.startswith("2 ranks on node0, NVIDIA H100 80GB HBM3; torch 2.13.0, nccl 2.28")
    [line] = [line for line in text.splitlines() if line.startswith("matrix product, bfloat16")]
    assert line.split()[3:7] == ["700", "rank", "0", "700"] and line.endswith("TFLOP/s")


def across_hosts(rates: dict[str, float], groups: dict[str, list[int]]) -> list[str]:
    """Return the problems of four H100 nodes with two GPUs each, whose collectives reach `rates`."""
    rates = {f"dp_shard {kind}": rate for kind, rate in rates.items()}
    return problems_of([facts(rank, rates, groups=groups) for rank in range(8)])


def test_a_network_that_fell_back_is_reported_across_hosts() -> None:
    """Expected: of a ring over hosts with m ranks each, m cards, each with what a card of H100 nodes is known to reach (400 Gbit/s)."""
    all_ranks = {"dp_shard": [*range(8)]}
    assert across_hosts({"all-reduce": 85.0, "all-gather": 85.0}, all_ranks) == []
    # TCP over the same cards, or over an Ethernet of the host.
    for rate in (4.0, 12.0, 30.0):
        lines = across_hosts({"all-reduce": rate, "all-gather": rate}, all_ranks)
        assert [line.split(",")[0] for line in lines] == [
            f"all ranks: dp_shard {kind} {rate:.3g} GB/s"
            for kind in ("all-reduce", "all-gather")
        ]
        [expected] = {float(line.split("expects ")[1].split(";")[0]) for line in lines[1:]}
        assert 0.7 * 100 < expected < 100 and "NCCL_DEBUG=INFO" in lines[1]
    # One rank of each host has one card. Without a list of the ranks, no more than that is expected.
    for groups in ({"dp_shard": [0, 2, 4, 6]}, {}):
        assert across_hosts({"all-reduce": 43.0}, groups) == []
        assert len(across_hosts({"all-reduce": 12.0}, groups)) == 1


def test_a_step_that_takes_longer_than_predicted_is_a_problem() -> None:
    values: dict[str, Any] = {"losses": [7.6, 7.5], "peak_gib": 40.0, "fullest_rank": 0}
    result = dry_run.DryRun(steps_s=[60.0, 4.1], compiled="", predicted_s=0.98, **values)
    [problem] = result.problems
    assert "took 4.10 s, where titan sim predicts 0.98 s" in problem
    assert "titan sim predicts 0.98 s a step" in str(result)
    assert not replace(result, steps_s=[60.0, 1.2]).problems
    assert not replace(result, predicted_s=None).problems


def test_the_prediction_is_that_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked as a rank asks, whose variables must not make a rank of the simulator; a CPU's profile is no measure."""
    job = ["train_configs/debug_model.toml", "--training.dataset=synthetic"]
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "3")
    found = cli.predict(job, 2, load_profile("h100-sxm"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "titan.cli", "sim", *job, "--world-size=2"]
    command += ["--hardware=h100-sxm", "--json=/dev/stdout"]
    said = finished(command, code=None).stdout
    assert found is not None and f'"step_time_s": {found}' in said
    assert cli.predict(job, 2, load_profile("cpu")) is None
