"""What a save costs: how long training stands still in each mode, how long the save takes, and where that time goes.

    python scripts/bench/checkpoint.py                    # the modes, side by side
    python scripts/bench/checkpoint.py --shares           # hashing, fsync and manifest as shares of a save
    python scripts/bench/checkpoint.py --peers --ranks 1,2,4,8 --tensors 100,1000    # against DCP and torch.save

The same Llama in every mode, fp32 with AdamW, synthetic data, one process (the accelerator if there is one). Each mode is a run of
its own, its saves far enough apart not to meet. Blocked: seconds of training lost at the save itself and, pinned, before the
next update. Lost in all: the time of a run's steps less that of as many steps of a run that saves nothing, per save.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titan.checkpoint import commit, manifest
from titan.checkpoint.manager import CheckpointManager
from titan.checkpoint.storage import LocalStorage
from titan.checkpoint.tensors import load
from titan.config.load import load_config
from titan.config.schema import CheckpointSection
from titan.run.checkpointing import Checkpointing
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer

MODES = ("disabled", "async", "async_with_pinned_mem")


JOB = """
[model]
flavor = "tiny"
overrides = {{ dim = {dim}, ffn_dim = {ffn_dim}, n_layers = {layers} }}
[training]
dataset = "synthetic"
local_batch_size = 1
seq_len = {seq_len}
steps = 1_000_000
mixed_precision_param = "float32"
[metrics]
log_freq = 1_000_000
enable_tensorboard = false
[checkpoint]
interval = 1_000_000
keep_latest_k = 1
"""


class Spent:
    """Seconds, by what for; functions are timed by being wrapped."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)


def measure(mode: str, args: argparse.Namespace) -> tuple[list[float], float, float]:
    """Seconds blocked by each save; seconds a save takes in all; seconds of all steps."""
    setting = "enable=false" if mode == "none" else f"async_mode={mode}"
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        redirect_stdout(io.StringIO()),
    ):
        job = Path(folder) / "job.toml"
        job.write_text(JOB.format(**vars(args), ffn_dim=4 * args.dim))
        config = load_config(
            job, overrides=[f"job.dump_folder={folder}", f"checkpoint.{setting}"]
        )
        trainer = Trainer(config, hooks=standard_hooks)
        trainer.start()
        checkpointing = trainer.hook(Checkpointing)
        assert checkpointing is not None
        blocked: list[float] = []
        manager, spent = checkpointing.manager, Spent()
        spent.wrap(manager, "_write", "save")

        def step() -> None:
            trainer.train_one_step()
            if trainer.device.type != "cpu":
                torch.accelerator.synchronize()

        for _ in range(3):
            step()
        start = time.perf_counter()
        for number in range(args.saves * args.every):
            if mode != "none" and number % args.every == 0:
                before = time.perf_counter()
                manager.save(trainer.step, checkpointing.state(), metadata={}, wait=False)
                blocked.append(time.perf_counter() - before)
            waited = trainer.timer._spent_s["checkpoint"]
            step()
            if blocked:
                blocked[-1] += trainer.timer._spent_s["checkpoint"] - waited
        manager.poll(wait=True)
        total = time.perf_counter() - start
        trainer.close()
    # The first save allocates buffers, and warms caches.
    return blocked[1:], spent.seconds["save"] / args.saves, total


def compare_modes(args: argparse.Namespace) -> None:
    _, _, plain = measure("none", args)
    print(f"{args.saves * args.every} steps that save nothing: {plain:.1f} s")
    print(f"{'mode':<24}{'blocked s':>11}{'ratio':>8}{'save s':>9}{'lost in all s':>15}")
    first = None
    for mode in MODES:
        blocked, took, total = measure(mode, args)
        median = statistics.median(blocked)
        first = first or median
        lost = (total - plain) / args.saves
        print(f"{mode:<24}{median:>11.4f}{first / median:>8.1f}{took:>9.3f}{lost:>15.3f}")


def state_of(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    return {f"model.{i}": torch.randn(4 * 2**20) for i in range(args.mib // 16)}


def shares(args: argparse.Namespace) -> None:
    """Of a synchronous save, in one process."""
    spent = Spent()
    spent.wrap(manifest.HashingStream, "write", "writing, and hashing")
    spent.wrap(LocalStorage, "fsync", "fsync of files")
    spent.wrap(LocalStorage, "fsync_folder", "fsync of folders")
    spent.wrap(commit, "write_manifest", "manifest")
    state, totals = state_of(args), []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        manager = CheckpointManager(CheckpointSection(keep_latest_k=1), run_dir=Path(folder))
        for step in range(args.saves):
            start = time.perf_counter()
            manager.save(step, state, metadata={})
            totals.append(time.perf_counter() - start)
    start = time.perf_counter()
    for value in state.values():
        data: Any = value.numpy()
        manifest.xxh3_128(data).hexdigest()
    hashing, total = time.perf_counter() - start, sum(totals) / len(totals)
    rows = {name: seconds / args.saves for name, seconds in spent.seconds.items()}
    rows["hashing alone"] = hashing
    print(f"a save of {args.mib} MiB: {total:.3f} s")
    for name, seconds in rows.items():
        print(f"  {name:<22}{seconds:>8.4f} s {seconds / total:>6.1%}")


def peers(args: argparse.Namespace) -> None:
    """Compare saves and loads with DCP's and torch.save's, on each number of ranks and of tensors."""
    print(
        "| ranks | tensors | dcp.save, s | sync | async blocks | pinned blocks | torch.save | dcp.load, s | load | torch.load |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for ranks in map(int, args.ranks.split(",")):
        for tensors in map(int, args.tensors.split(",")):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                torch.multiprocessing.spawn(_peers_on, (ranks, tensors, folder, args), ranks)


def _peers_on(
    rank: int, ranks: int, tensors: int, folder: str, args: argparse.Namespace
) -> None:
    """Measure on one rank, in turns; rank 0 prints medians of the slowest rank's seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    rows = max(args.mib * 2**20 // 4 // 64 // tensors // ranks, 1)
    state: dict[str, Any] = {
        f"model.{i}": DTensor.from_local(
            torch.randn(rows, 64), mesh, [Shard(0)], run_check=False
        )
        for i in range(tensors)
    }
    plain, saved = {k: v.to_local() for k, v in state.items()}, Path(folder)
    managers = {
        mode: CheckpointManager(
            CheckpointSection(async_mode=mode, keep_latest_k=1), run_dir=saved / mode
        )
        for mode in MODES
    }

    def ours(mode: str, step: int) -> None:
        managers[mode].save(step, state, metadata={}, wait=False)

    def torch_save(step: int) -> None:
        torch.save(plain, saved / f"{rank}.pt")

    def dcp_save(step: int) -> None:
        # As titan does: into a new folder, each file flushed to the disk, and then the older folder goes.
        dcp.save(state, checkpoint_id=str(saved / f"dcp-{step}"))
        if rank == 0:
            shutil.rmtree(saved / f"dcp-{step - 1}", ignore_errors=True)

    def titan_load(step: int) -> None:
        load(saved / "disabled" / "checkpoint" / f"step-{step}", state)

    ways: dict[str, Callable[[int], Any]] = {"dcp.save": dcp_save}
    ways |= {mode: partial(ours, mode) for mode in MODES}
    ways |= {"torch.save": torch_save}
    ways |= {"dcp.load": lambda step: dcp.load(state, checkpoint_id=str(saved / f"dcp-{step}"))}
    ways |= {"load": titan_load, "torch.load": lambda step: torch.load(saved / f"{rank}.pt")}
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for turn in range(args.saves + 1):
        for name, work in ways.items():
            dist.barrier()
            start = time.perf_counter()
            work(turn + 1)
            took = torch.tensor(time.perf_counter() - start)
            for manager in managers.values():
                manager.staging.before_update()
                manager.poll(wait=True)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn:  # the first turn allocates buffers
                seconds[name].append(took.item())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    if rank == 0:
        sync, saving, loading = median["disabled"], median["dcp.save"], median["dcp.load"]
        cells = [f"{saving:.3f}", f"{sync / saving:.2f}"]
        cells += [f"{median[mode] / sync:.3f}" for mode in MODES[1:]]
        cells += [f"{median['torch.save'] / saving:.2f}", f"{loading:.3f}"]
        cells += [f"{median[name] / loading:.2f}" for name in ("load", "torch.load")]
        print(f"| {ranks} | {tensors} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--every", type=int, default=12, help="steps from save to save")
    parser.add_argument("--mib", type=int, default=400, help="of the others")
    parser.add_argument(
        "--folder", help="where to save; default: the system's temporary folder"
    )
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument(
        "--tensors", default="100,1000", help="into how many tensors --mib are cut"
    )
    args = parser.parse_args()
    (peers if args.peers else shares if args.shares else compare_modes)(args)


if __name__ == "__main__":
    main()
