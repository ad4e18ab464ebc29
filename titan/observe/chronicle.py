"""What a run tells of itself beside its losses: ranks' own times, spikes, norms of blocks, events and goodput.

The trainer calls it in a handful of places; docs/watching.md says what each file and column means.
"""

from __future__ import annotations

import logging
import math
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from titan.config.schema import JobConfig
from titan.health.recovery import spike_score
from titan.observe.clock import StepTimer, Window
from titan.observe.goodput import Events
from titan.observe.metrics import MetricsLog
from titan.observe.norms import LayerNorms
from titan.observe.ranks import ForwardClock, Stragglers, TimesLog
from titan.program import Program
from titan.readback import Readback

_LOG = logging.getLogger("titan")


class Spikes:
    """Robust z-scores (titan/health/recovery.py) of loss and gradient norm among the steps before; the highest since they were last taken."""

    def __init__(self, *, window: int, min_steps: int) -> None:
        self._before = (deque[float](maxlen=window), deque[float](maxlen=window))
        self._min_steps = min_steps
        self._highest: list[float | None] = [None, None]

    def add(self, loss: float, grad_norm: float) -> tuple[float | None, float | None]:
        """This step's; None where too few steps are known, or the value is no number."""
        found: list[float | None] = [None, None]
        for k, (value, before) in enumerate(zip((loss, grad_norm), self._before, strict=True)):
            if not math.isfinite(value):
                continue
            if len(before) >= self._min_steps:
                found[k] = z = spike_score(value, before)
                highest = self._highest[k]
                self._highest[k] = z if highest is None else max(highest, z)
            before.append(value)
        return found[0], found[1]

    def take(self) -> dict[str, float | None]:
        """Columns of metrics.jsonl."""
        row = dict(zip(("loss_z", "grad_norm_z"), self._highest, strict=True))
        self._highest = [None, None]
        return {key: z if z is None else round(z, 2) for key, z in row.items()}


class Chronicle:
    """One rank's. Ranks call it together where it says so."""

    def __init__(
        self, config: JobConfig, *, run_dir: Path, rank: int, program: Program, step: int
    ) -> None:
        """step: where this start goes on. All ranks together."""
        section = config.fault_tolerance
        self.rank, self.world_size = rank, dist.get_world_size()
        self.hosts: list[str] = [socket.gethostname()] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(self.hosts, socket.gethostname())
        self.threshold = section.spike_threshold
        self.spikes = Spikes(window=section.spike_window, min_steps=section.spike_min_steps)
        self.stragglers = Stragglers(log_freq=config.metrics.log_freq)
        self.times = TimesLog(run_dir, rank=rank, host=self.hosts[rank])
        blocks = [b for part in program.parts for b in part.get_submodule("layers").children()]
        self.clock = ForwardClock(blocks, device=program.device)
        self.own_s = 0.0
        self.events = Events(
            run_dir, rank=rank, step=step, world_size=self.world_size, host=self.hosts[0]
        )
        self.norms_every = config.metrics.log_layer_norms_every_n_steps
        self.norms: LayerNorms | None = None
        self.norms_due: Readback | None = None
        self.step: int | None = None
        self.is_warm = False
        if self.norms_every:
            self.norms = LayerNorms(program.parts, stages=program.groups.stages)
            program.on_gradients = self._measure_norms

    def begin(self, step: int, *, timer: StepTimer) -> None:
        """A step begins."""
        self.clock.begin_step()
        if self.step is None:
            self.events.begin_steps()
        elif not self.is_warm:
            self.is_warm = True
            self.events.warm(timer.total_s)
        self.step = step

    def own_times(self, *, data_wait_s: float, num_steps: int) -> list[float]:
        """A slot for each rank, with this one's own time in its slot: seconds per step since the last call."""
        self.own_s = self.clock.take(num_steps) + data_wait_s / max(num_steps, 1)
        slots = [0.0] * self.world_size
        slots[self.rank] = self.own_s
        return slots

    def saw(self, step: int, *, loss: float, grad_norm: float) -> None:
        """Each step's results, in order."""
        loss_z, norm_z = self.spikes.add(loss, grad_norm)
        for what, value, z in (("loss", loss, loss_z), ("gradient norm", grad_norm, norm_z)):
            if z is not None and z > self.threshold:
                self.events.write("spike", step=step, what=what, value=value, z=round(z, 2))

    def columns(
        self, *, step: int, window: Window, timer: StepTimer, own_s: Sequence[float]
    ) -> dict[str, Any]:
        """Columns for a logged step's row; also this rank's row of times, and word of stragglers."""
        self.times.write(
            step=step,
            step_s=round(window.step_s, 6),
            data_wait_s=round(window.data_wait_s, 6),
            own_s=round(self.own_s, 6),
        )
        row: dict[str, Any] = self.spikes.take()
        if self.rank == 0:
            row["goodput"] = round(self.events.share(timer.total_s), 5)
        if len(own_s) > 1:
            standing = self.stragglers.add(own_s, step_s=window.step_s)
            row["slowest_rank"] = standing.slowest_rank
            row["slowest_rank_s"], row["median_rank_s"] = standing.slowest_s, standing.median_s
            for rank in standing.new:
                self._tell_of_straggler(rank, own_s, step=step)
            for rank in standing.gone:
                _LOG.info(f"rank {rank} on {self.hosts[rank]} is as fast as the others again")
                self.events.write("recovered", step=step, rank=rank, host=self.hosts[rank])
        return row

    def write_norms(self, metrics: MetricsLog) -> None:
        """Norms that were measured in this step, if it was one of those."""
        if self.norms is not None and self.norms_due is not None:
            metrics.write_norms(self.step or 0, self.norms.row(self.norms_due))
            self.norms_due = None

    def close(self) -> None:
        self.times.flush()
        self.events.end("failed", step=self.step or 0)

    def _measure_norms(self) -> None:
        if self.norms is not None and (self.step or 0) % self.norms_every == 0:
            self.norms_due = self.norms.measure()

    def _tell_of_straggler(self, rank: int, own_s: Sequence[float], *, step: int) -> None:
        middle, host = median(own_s), self.hosts[rank]
        text = (
            f"step {step}: rank {rank} on {host} is slow: {own_s[rank] * 1e3:.0f} ms of its own per step, where the "
            f"median rank takes {middle * 1e3:.0f} (in most of the last {self.stragglers.num_rows} logged steps); the others wait for it"
        )
        (_LOG.warning if self.rank == 0 else _LOG.info)(text)
        self.events.write(
            "straggler", step=step, rank=rank, host=host, own_s=own_s[rank], median_s=middle
        )
