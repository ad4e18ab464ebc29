"""Hook for profiler traces and memory snapshots (titan/tools/profiler.py)."""

from __future__ import annotations

import torch

from titan.run.hook import Hook
from titan.run.progress import RunProgress

from .profiler import Profiler


class Profiling(Hook):
    """Profiler around each step. Its own time is taken out of the throughput."""

    priority = 60

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.profiler: Profiler | None = None

    def start(self) -> None:
        trainer = self.trainer
        self.profiler = Profiler(
            trainer.config.profiling,
            run_dir=trainer.run_dir,
            rank=trainer.rank,
            device=trainer.device,
            parts=trainer.train_step.model_parts,
            say=trainer.console.message,
        )

    def step_begin(self) -> None:
        if self.profiler is not None:
            with self.trainer.timer.pause("profiling"):
                self.profiler.begin(self.trainer.step)

    def step_end(self) -> None:
        if self.profiler is not None:
            with self.trainer.timer.pause("profiling"):
                self.profiler.end()

    rewound = step_end  # the step ended early

    def failed(self, error: Exception) -> None:
        # Before `close`, while the allocator's history is there.
        if self.profiler is not None and isinstance(error, torch.OutOfMemoryError):
            self.profiler.out_of_memory()
        # The end of a trace would wait for the device, which may wait for ranks that have ended.
        if self.trainer.device.type != "cpu":
            self.profiler = None

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.close()
