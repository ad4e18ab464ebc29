"""From the command to the first trained step on a CPU: `python scripts/bench/startup.py`.

Runs `titan train train_configs/debug_model.toml` a few times, once with and then without its text in the cache, and
times the process from outside until metrics.jsonl has its first row; beside it, `import torch` alone.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def first_step_s(folder: Path, cache: Path, ranks: int) -> float:
    command = [
        *(sys.executable, "-m", "titan.cli", "train", "train_configs/debug_model.toml"),
        *("--nproc", str(ranks), f"--job.dump_folder={folder}", f"--data.cache_folder={cache}"),
        *("--training.steps=2", "--lr_scheduler.warmup_steps=1", "--checkpoint.enable=false"),
    ]
    metrics = folder / "metrics.jsonl"
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() in (None, 0), "the run failed"
        time.sleep(0.005)
    elapsed = time.perf_counter() - begin
    process.wait()
    return elapsed


def import_torch_s() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        cold = first_step_s(folder / "cold", cache, 1)
        rows = {"import torch": [], "1 process": [], "2 ranks (torchrun)": []}
        for number in range(5):
            rows["import torch"].append(import_torch_s())
            rows["1 process"].append(first_step_s(folder / f"one-{number}", cache, 1))
            rows["2 ranks (torchrun)"].append(first_step_s(folder / f"two-{number}", cache, 2))
    print(f"first run ever (tokenises the standard library): {cold:.1f} s")
    for what, values in rows.items():
        print(f"{what}: {statistics.median(values):.1f} s")


if __name__ == "__main__":
    main()
