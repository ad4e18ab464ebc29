"""Cost of a recorded step: `python scripts/bench/recorder.py [--steps 20] [--layers 2] [--seq-len 256]`.

Measured for train_configs/debug_model.toml on this CPU: ordinary and recorded steps take turns, and the medians are printed, with the
record's bytes. By formula for Llama 3.2 1B on meta, in bf16 with 8,192 tokens: digests, arithmetic and memory.

For a tensor of N values, of which L are in a row, a digest with P projections takes 2 N P operations for the projections of rows, 2 P N / L
for those of all other dimensions, and 2 N for the norm. It holds a copy of 2**24 values at a time, in fp32 (fp64 for an fp32 tensor).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan.config.layout import resolve_layout
from titan.config.load import load_from_argv
from titan.config.model import family
from titan.config.schema import ModelSection
from titan.numerics.certify.steps import micro_batches
from titan.numerics.digests import PROJECTIONS
from titan.numerics.recorded import FOLDER, write_step
from titan.numerics.recorder import whole_shapes
from titan.numerics.recording import StepRecorder
from titan.parallel import build_mesh
from titan.step.resolved import resolve_job
from titan.step.train_step import build_train_step

_TOKENS = 8192


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Cost of a recorded step.")
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    options = parser.parse_args()
    each = measured(options.steps, options.layers, options.seq_len)
    by_formula(each)


def measured(num_steps: int, layers: int, seq_len: int) -> float:
    """Print what a recorded step of the debug model costs. Return the bytes that a tensor takes in a record."""
    keys = [f"--model.overrides.n_layers={layers}", f"--training.seq_len={seq_len}"]
    keys += ["--training.dataset=synthetic", f"--training.steps={2 * num_steps + 4}"]
    config = load_from_argv(["train_configs/debug_model.toml", *keys], warn=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group(
            "gloo", init_method=(folder / "store").as_uri(), rank=0, world_size=1
        )
        mesh = build_mesh("cpu")
        job = resolve_job(config, resolve_layout(config, 1), device="cpu")
        step = build_train_step(job, device=torch.device("cpu"), mesh=mesh)
        whole = step.task.random_batch(1)
        batches = micro_batches(whole, mesh, 1)
        recorder = StepRecorder(step)
        for number in (1, 2):
            step.train(batches, step=number)
        before = _peak_mib()
        times: dict[bool, list[float]] = {False: [], True: []}
        recorded: Any = None
        for number in range(3, 2 * num_steps + 3):
            records = number % 2 == 0
            start = time.perf_counter()
            if records:
                recorder.begin(batches)
            report = step.train(batches, step=number)
            if records:
                recorded = recorder.end(number, report)
                write_step(folder, recorded)
            times[records].append(time.perf_counter() - start)
        size = (folder / FOLDER / f"step-{recorded.step}.json").stat().st_size
        dist.destroy_process_group()
    plain, with_record = (statistics.median(times[key]) for key in (False, True))
    print(
        f"debug_model, {layers} layers, {config.training.local_batch_size} x {seq_len} tokens, {torch.get_num_threads()} threads"
    )
    print(
        f"  ordinary step {1e3 * plain:.0f} ms, recorded {1e3 * with_record:.0f} ms: {with_record / plain:.2f} times"
    )
    print(
        f"  peak of the process {before:.0f} MiB before the first record, {_peak_mib():.0f} MiB after"
    )
    print(f"  {len(recorded.tensors)} tensors, {size / 1e3:.0f} kB written")
    return size / len(recorded.tensors)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def by_formula(bytes_each: float) -> None:
    """Print what a recorded step of Llama 3.2 1B costs."""
    sizes = ModelSection(name="llama3", flavor="1B").sizes
    with torch.device("meta"):
        model: nn.Module = family("llama3").build_model(sizes)

        def run(model: nn.Module, batch: int, length: int) -> None:
            model(torch.empty(batch, length, dtype=torch.int64))

        shapes = whole_shapes(model, run, length=64)
    named: dict[Any, int] = {"B": 1, "S": _TOKENS, "BS": _TOKENS}
    outputs = [
        [int(named.get(dim, dim)) for dim in shape] for name, shape in shapes.items() if name
    ]
    parameters = [list(parameter.shape) for parameter in model.parameters()]
    # Output and its gradient in bf16; weight before, gradient, weight after, in fp32.
    tensors = [(shape, 4) for shape in 2 * outputs] + [(shape, 8) for shape in 3 * parameters]
    operations = sum(
        2 * prod(shape) * (PROJECTIONS + 1) + 2 * PROJECTIONS * prod(shape) // shape[-1]
        for shape, _ in tensors
    )
    attention = 12 * sizes.n_layers * sizes.n_heads * sizes.head_dim * _TOKENS**2 // 2
    step = 6 * sum(map(prod, parameters)) * _TOKENS + attention
    wide = max(min(prod(shape), 2**24) * size for shape, size in tensors)
    count = 2 * len(outputs) + 3 * len(parameters)
    print(f"Llama 3.2 1B, {_TOKENS:,} tokens on one device")
    print(f"  {count} digests, {count * bytes_each / 1e3:.0f} kB written")
    print(
        f"  {operations / 1e9:.0f} GFLOP of {step / 1e12:.1f} TFLOP of the step: {operations / step:.2%}"
    )
    print(f"  {wide / 2**20:.0f} MiB at a time")


if __name__ == "__main__":
    main()
