"""How fast the simulator is: cold on a small and on a large job, warm, and on a sweep.

    python scripts/bench/simulator.py [8b] [405b] [sweep]     default: all of them

Every case is a process of its own, timed from its start to its end, with an empty trace cache (cold) or the one it left (warm).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIM = [sys.executable, "-m", "titan.cli", "sim"]
JOBS = ROOT / "train_configs" / "published"
SMALL = [str(JOBS / "R1.toml"), "--world-size", "8", "--hardware", "h100-96g-500w"]
LARGE = [str(JOBS / "R9.toml"), "--world-size", "512", "--hardware", "h100-96g-500w"]
# 1,152 variants of one model: 288 programs on four kinds of hardware.
SWEEP = [
    *(str(ROOT / "train_configs" / "llama3_8b.toml"), "--world-size", "64"),
    *("--hardware", "h100-sxm,h200-sxm,b200,a100-80g"),
    *("--sweep", "parallelism.tensor_parallel_degree=1,2,4"),
    *("--sweep", "parallelism.data_parallel_replicate_degree=1,2,4,8"),
    *("--sweep", "training.local_batch_size=1,2"),
    *("--sweep", "activation_checkpoint.mode=none,selective,full"),
    *("--sweep", "training.seq_len=4096,8192"),
    *("--sweep", "parallelism.fsdp_reshard_after_forward=default,never"),
]


def timed(what: str, arguments: list[str], cache: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [*SIM, *arguments],
        env=os.environ | {"XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    seconds = time.monotonic() - start
    last = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()][-1]
    print(f"{what:<40} {seconds:8.1f} s   exit {done.returncode}   {last.strip()}", flush=True)


def main(wanted: list[str]) -> None:
    for name, what, job in (
        ("8b", "8B, 8 GPUs", SMALL),
        ("405b", "405B, 512 GPUs, 8 stages, compiled", LARGE),
        ("sweep", "sweep of 8B", SWEEP),
    ):
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as cache:
            timed(f"{what}, cold", job, cache)
            timed(f"{what}, warm", job, cache)


if __name__ == "__main__":
    main(sys.argv[1:])
