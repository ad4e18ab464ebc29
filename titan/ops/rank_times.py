"""Hook for each rank's own time per step, and for stragglers (titan/ops/ranks.py)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from titan.observe.clock import Window
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress

from .ranks import ForwardClock, Stragglers, TimesLog

_LOG = logging.getLogger("titan")


class RankTimes(Hook):
    """Own times, which ranks share at logged steps and write to logs/rank-N.times.jsonl."""

    priority = 50

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.hosts: list[str] = [socket.gethostname()] * trainer.world_size
        if trainer.world_size > 1:
            # Collect the hosts once, at the start: a warning names the host of any rank.
            dist.all_gather_object(self.hosts, socket.gethostname())
        self.stragglers = Stragglers(log_freq=trainer.config.metrics.log_freq)
        self.times = TimesLog(trainer.run_dir, rank=trainer.rank, host=self.hosts[trainer.rank])
        parts = trainer.train_step.model_parts
        blocks = [block for part in parts for block in part.get_submodule("layers").children()]
        self.clock = ForwardClock(blocks, device=trainer.device)
        self.own_s = 0.0
        self.since_step = 0

    def start(self) -> None:
        self.since_step = self.trainer.step

    rewound = start

    def step_begin(self) -> None:
        self.clock.begin_step()

    def flags(self) -> Sequence[float]:
        """Return a slot for each rank, with this rank's own seconds per step in its slot.

        Between logged steps there are no slots.
        """
        trainer = self.trainer
        if not trainer.logs_this_step:
            return ()
        num_steps = trainer.step - self.since_step
        self.since_step = trainer.step
        # The wait for data is the rank's own time, too.
        data_wait_s = trainer.timer.data_wait_s / max(num_steps, 1)
        self.own_s = self.clock.take(num_steps)["own"] + data_wait_s
        # The maximum over ranks fills every slot, since all but one rank send 0 there.
        slots = [0.0] * trainer.world_size
        slots[trainer.rank] = self.own_s
        return slots

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        self.times.write(
            step=self.trainer.step,
            step_s=round(window.step_s, 6),
            data_wait_s=round(window.data_wait_s, 6),
            own_s=round(self.own_s, 6),
        )
        own_s = result.flags.get(self, ())
        if len(own_s) <= 1:  # one rank waits for no other
            return {}
        standing = self.stragglers.add(own_s, step_s=window.step_s)
        for rank in standing.new:
            self._report_straggler(rank, own_s)
        for rank in standing.gone:
            _LOG.info(f"rank {rank} on {self.hosts[rank]} is as fast as the others again")
            self._record("recovered", rank)
        return {
            "slowest_rank": standing.slowest_rank,
            "slowest_rank_s": standing.slowest_s,
            "median_rank_s": standing.median_s,
        }

    def close(self) -> None:
        self.times.flush()

    def _report_straggler(self, rank: int, own_s: Sequence[float]) -> None:
        middle = median(own_s)
        text = (
            f"step {self.trainer.step}: rank {rank} on {self.hosts[rank]} is slow: its own work takes "
            f"{own_s[rank] * 1e3:.0f} ms per step, that of the median rank {middle * 1e3:.0f} ms (in most of the last "
            f"{self.stragglers.num_rows} logged steps); the others wait for it"
        )
        # One warning on the console; the other ranks' logs have it for the record.
        (_LOG.warning if self.trainer.rank == 0 else _LOG.info)(text)
        self._record("straggler", rank, own_s=own_s[rank], median_s=middle)

    def _record(self, event: str, rank: int, **facts: Any) -> None:
        step, host = self.trainer.step, self.hosts[rank]
        self.trainer.events.write(event, step=step, rank=rank, host=host, **facts)
