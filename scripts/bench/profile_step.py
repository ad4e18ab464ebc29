"""Where a step's time goes on an accelerator: `python scripts/bench/profile_step.py JOB.toml [--section.key=value ...]`.

Runs the job's own program (titan.program) on random tokens for a few steps and prints the kernels that took longest,
the step time, and the peak memory.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from titan.config.load import load_from_argv
from titan.config.rules import model_config
from titan.data.loader import Batch
from titan.parallel import build_mesh
from titan.program import build_program

WARM_UP, STEPS = 3, 5


def main() -> None:
    config = load_from_argv(sys.argv[1:])
    device = torch.accelerator.current_accelerator()
    assert device is not None, "needs an accelerator"
    torch.accelerator.set_device_index(0)
    dist.init_process_group(
        f"cpu:gloo,{device.type}:nccl", store=dist.HashStore(), rank=0, world_size=1
    )
    program = build_program(
        config, device=torch.device(device.type, 0), mesh=build_mesh(device.type)
    )
    training, sizes = config.training, model_config(config.model)
    shape = (training.local_batch_size, training.seq_len + 1)
    rows = torch.randint(sizes.vocab_size, shape, device=device)
    batch = Batch(tokens_BS=rows[:, :-1], labels_BS=rows[:, 1:])
    for step in range(1, WARM_UP + 1):
        program.train_step([batch], step=step)
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for step in range(STEPS):
        program.train_step([batch], step=step + 1)
    torch.accelerator.synchronize()
    step_s = (time.perf_counter() - begin) / STEPS
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        program.train_step([batch], step=1)
        torch.accelerator.synchronize()
    kernels = [
        e
        for e in profiler.key_averages()
        if e.self_device_time_total > 0 and e.device_type != torch.autograd.DeviceType.CPU
    ]
    total_us = sum(e.self_device_time_total for e in kernels)
    print(f"kernels: {total_us / 1e3:.1f} ms of a step of {step_s * 1e3:.1f} ms")
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:25]:
        share = event.self_device_time_total / total_us
        print(
            f"{share:6.1%} {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d}x  {event.key[:110]}"
        )
    tokens = training.local_batch_size * training.seq_len
    tflops = sizes.flops_per_token(training.seq_len) * tokens / step_s / 1e12
    peak = torch.accelerator.max_memory_allocated() / 2**30
    print(
        f"{tokens / step_s:,.0f} tokens/s, {tflops:.0f} TFLOP/s (full attention), peak {peak:.1f} GiB allocated"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
