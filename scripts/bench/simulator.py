"""How fast the simulator is: cold on a small and on large jobs, on pipelines, warm, and on a sweep.

    python scripts/bench/simulator.py [8b] [pipeline] [405b] [16384] [few] [sweep]     default: all of them

Every case is a process of its own, timed from its start to its end, with an empty trace cache (cold) or the one it left (warm).
CPU time and memory are those of all its processes together (Linux).
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIM = [sys.executable, "-m", "titan.cli", "sim"]
JOBS = ROOT / "train_configs" / "published"
SMALL = [str(JOBS / "R1.toml"), "--world-size", "8", "--hardware", "h100-96g-500w"]
PIPELINE = [
    *(str(ROOT / "train_configs" / "llama3_8b.toml"), "--world-size", "8"),
    *("--hardware", "h100-sxm", "--model.overrides", "{n_layers = 14}"),
    *(
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.data_parallel_shard_degree",
    ),
    *("4", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
    *("--parallelism.pipeline_parallel_layers_per_stage", "4", "--training.local_batch_size"),
]
LARGEST = [str(ROOT / "train_configs" / "llama3_405b.toml"), "--world-size", "16384", "--hardware", "h100-sxm"]  # fmt: skip
LARGE = [str(JOBS / "R9.toml"), "--world-size", "512", "--hardware", "h100-96g-500w"]
# 72 variants of one model: 18 programs on four kinds of hardware.
FEW = [
    *(str(ROOT / "train_configs" / "llama3_8b.toml"), "--world-size", "64"),
    *("--compile.enable=false", "--hardware", "h100-sxm,h200-sxm,b200,a100-80g"),
    *("--sweep", "parallelism.tensor_parallel_degree=1,2,4"),
    *("--sweep", "training.local_batch_size=1,2"),
    *("--sweep", "activation_checkpoint.mode=none,selective,full"),
]
# 1,152 variants: 288 programs.
SWEEP = [
    *FEW,
    *("--sweep", "parallelism.data_parallel_replicate_degree=1,2,4,8"),
    *("--sweep", "training.seq_len=4096,8192"),
    *("--sweep", "parallelism.fsdp_reshard_after_forward=default,never"),
]


def timed(what: str, arguments: list[str], cache: str) -> None:
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*SIM, *arguments],
            env=os.environ | {"XDG_CACHE_HOME": cache},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        peak_gib = 0.0
        while process.poll() is None:
            peak_gib = max(peak_gib, _memory_gib())
            time.sleep(0.2)
        seconds = time.monotonic() - start
        with suppress(ChildProcessError):  # its children are ours now
            while True:
                os.wait()
        output.seek(0)
        last = [line for line in output.read().splitlines() if line.strip()][-1]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{what:<40} {seconds:8.1f} s {cpu_s:8.1f} CPU-s {peak_gib:6.2f} GiB   exit {process.returncode}   {last.strip()}",
        flush=True,
    )


def _memory_gib() -> float:
    """The memory of all descendants of this process; pages they share count once."""
    parents, kib = {}, 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
    for number in parents:
        ancestor = parents[number]
        while ancestor in parents and ancestor != str(os.getpid()):
            ancestor = parents[ancestor]
        with suppress(OSError):
            if ancestor == str(os.getpid()):
                text = Path(f"/proc/{number}/smaps_rollup").read_text()
                kib += int(text.partition("Pss:")[2].split()[0])
    return kib / 2**20


def main(wanted: list[str]) -> None:
    # Processes that outlive their parents become ours, so that their time counts.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    for name, what, job in (
        ("8b", "8B, 8 GPUs", SMALL),
        ("pipeline", "8B, 4 stages, 8 microbatches", [*PIPELINE, "8"]),
        ("pipeline", "8B, 4 stages, 64 microbatches", [*PIPELINE, "64"]),
        ("405b", "405B, 512 GPUs, 8 stages, compiled", LARGE),
        ("16384", "405B, 16,384 GPUs, compiled", LARGEST),
        ("few", "72 variants of 8B", FEW),
        ("sweep", "1,152 variants of 8B", SWEEP),
    ):
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as cache:
            timed(f"{what}, cold", job, cache)
            timed(f"{what}, warm", job, cache)


if __name__ == "__main__":
    main(sys.argv[1:])
