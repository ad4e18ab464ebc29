"""Dry run: two steps of the real job on throw-away weights, so that it fails now and not in an hour.

The step is the trainer's (titan/step/train_step.py), and so is the data. Nothing is logged or saved. The
second step shows time and memory without compilation and with the optimizer's state. Compiled
programs stay in the compile cache, where the real run finds them.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan.base.async_scalars import AsyncScalars
from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.observe.memory import peak_memory
from titan.parallel.mesh import axis_rank
from titan.parallel.torch_compat import set_timeout
from titan.step.resolved import resolve_job
from titan.step.train_step import build_train_step

NUM_STEPS = 2
# The second step is not yet at full speed, so a smaller factor is no fault of the machines.
_SLOWER = 2.0
# Message of torch's RuntimeError on a CPU.
_CPU_OUT_OF_MEMORY = "can't allocate memory"


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        steps_s: seconds of each step. The first one includes compilation.
        losses: loss of each step.
        peak_gib: peak memory of the fullest rank.
        fullest_rank: its number.
        compiled: summary of the compiler.
        predicted_s: seconds of a step by `titan sim`; None without a prediction.
    """

    steps_s: list[float]
    losses: list[float]
    peak_gib: float
    fullest_rank: int
    compiled: str
    predicted_s: float | None = None

    def __str__(self) -> str:
        text = (
            f"dry run: first step {self.steps_s[0]:.2f} s, second {self.steps_s[1]:.2f} s, loss {self.losses[0]:.4f}, "
            f"peak {self.peak_gib:.2f} GiB on rank {self.fullest_rank}"
        )
        if self.predicted_s:
            text += f"; titan sim predicts {self.predicted_s:.2f} s a step"
        return f"{text}; {self.compiled}" if self.compiled else text

    @property
    def problems(self) -> list[str]:
        """Return the problems of the figures, a line for each."""
        bad = [loss for loss in self.losses if not math.isfinite(loss)]
        lines = [f"dry run: the loss is {bad[0]}"] if bad else []
        predicted_s, measured_s = self.predicted_s, self.steps_s[-1]
        if predicted_s and measured_s > _SLOWER * predicted_s:
            lines.append(
                f"dry run: the second step took {measured_s:.2f} s, where titan sim predicts {predicted_s:.2f} s; the rates above, "
                "`titan sim` with the job, and a trace of it (profiling.enable_profiling) tell where the time goes"
            )
        return lines


def dry_run(
    config: JobConfig, layout: Layout, *, device: torch.device, mesh: DeviceMesh
) -> DryRun:
    """Run the steps on all ranks together.

    An exception of the job passes through; `explain` turns it into a line.

    Args:
        config: the job.
        layout: layout of the ranks.
        device: this rank's device.
        mesh: device mesh of the job.
    """
    if device.type != "cpu":  # the measurements' memory is not the job's
        torch.get_device_module(device).empty_cache()
        peak_memory(reset=True)
    rank = axis_rank(mesh, "dp_replicate", "dp_shard")
    job = resolve_job(config, layout, device=device.type)
    loader = job.task.loader(rank=rank, world=layout.dp, accumulation=layout.accumulation)
    try:
        train_step = build_train_step(job, device=device, mesh=mesh)
        set_timeout(
            timedelta(seconds=config.comm.init_timeout_seconds)
        )  # also for its new groups
        seconds, losses = [], []
        for step in range(1, NUM_STEPS + 1):
            start_s = time.perf_counter()
            report = train_step.train(loader.next_step(), step=step)
            # Reading the loss waits for the device, so the time below is the step's.
            losses += AsyncScalars([report.loss]).values()
            seconds.append(time.perf_counter() - start_s)
    finally:
        loader.close()
    # All ranks know the fullest rank.
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_memory().reserved_gib)
    return DryRun(
        steps_s=seconds,
        losses=losses,
        peak_gib=max(peaks),
        fullest_rank=max(range(len(peaks)), key=peaks.__getitem__),
        compiled=train_step.compile_log.summary() if train_step.compile_log is not None else "",
    )


def out_of_memory(error: Exception) -> bool:
    """Return whether a device, or the host, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error)


def explain(error: Exception, *, rank: int, host: str) -> str:
    """Explain a failed dry run in a line, with advice if there is any.

    Args:
        error: error of the job.
        rank: this rank.
        host: its host.
    """
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    # torch's allocator for CPUs begins with its own check.
    text = re.sub(r"^\[enforce fail at [^]]*\] (err == 0\. )?", "", text)
    if out_of_memory(error):
        return (
            f"dry run: rank {rank} on {host} is out of memory: {text.rstrip('.')}. Use a smaller training.local_batch_size, "
            'activation_checkpoint.mode = "full", or more shards; titan check JOB.toml --hardware H lists what would fit'
        )
    return f"dry run: rank {rank} on {host}: {type(error).__name__}: {text}"
