"""A hook that makes one part of a run slow from some step on, and a run on gloo ranks with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.jobs import job
from tests.support.trainers import PoolTrainer
from titan.config.schema import JobConfig
from titan.contrib.twin import hook as twin
from titan.run import checkpointing
from titan.run.hook import Hook
from titan.run.trainer import Trainer

LOG_FREQ = 4  # five rows are judged together
# Collectives that FSDP and the trainer call, and the argument that is sent.
_COLLECTIVES = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 0}


class SlowPart(Hook):
    """Sleep in a part: "rank", "data", "host" or "checkpoint" of a rank, the "link" between two, or let the "allocator" retry.

    Args:
        first: the step from which on.
        ranks: where; of a link the two ends.
        seconds: of a sleep. Of a link, for each MiB: all links take that from the first step on, and the slow one twice as long.
    """

    def __init__(
        self, trainer: Trainer, part: str, *, first: int, ranks: tuple[int, ...], seconds: float
    ) -> None:
        self.trainer, self.part, self.first, self.ranks = trainer, part, first, ranks
        self.seconds, self.retries = seconds, 0
        self.patches = ExitStack()
        if part == "link":
            for name, sent in _COLLECTIVES.items():
                self._patch(dist, name, self._over_link(getattr(dist, name), sent))
            self._patch(dist, "batch_isend_irecv", self._between(dist.batch_isend_irecv))
        if trainer.rank not in ranks:
            return
        if part == "rank":
            blocks = trainer.train_step.model_parts[0].get_submodule("layers").children()
            block = next(iter(blocks))
            block.forward = self._after_sleep(
                block.forward
            )  # within the block: FSDP has gathered
        if part == "data":
            trainer.loader.next_step = self._after_sleep(trainer.loader.next_step)
        if part == "allocator":
            self._patch(twin, "allocator_retries", lambda: self.retries)
        if part == "checkpoint":
            hook = trainer.hook(checkpointing.Checkpointing)
            assert hook is not None
            hook.manager.save = self._after_sleep(hook.manager.save)

    @property
    def is_slow(self) -> bool:
        return self.trainer.step >= self.first and self.trainer.rank in self.ranks

    def step_end(self) -> None:
        self.retries += self.is_slow
        if self.part == "host" and self.is_slow:
            time.sleep(self.seconds)

    def close(self) -> None:
        self.patches.close()

    def _patch(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self.patches.enter_context(patch.object(module, name, function))

    def _after_sleep(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **options: Any) -> Any:
            if self.is_slow:
                time.sleep(self.seconds)
            return call(*args, **options)

        return slow

    def _over_link(self, call: Callable[..., Any], sent: int) -> Callable[..., Any]:
        """A collective is as slow as the slowest link between its ranks."""

        def slow(*args: Any, **options: Any) -> Any:
            tensor = args[sent] if len(args) > sent else options["input"]
            self._pass(tensor, dist.get_process_group_ranks(options.get("group")))
            return call(*args, **options)

        return slow

    def _between(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(operations: list[dist.P2POp]) -> Any:
            self._pass(operations[0].tensor, [operations[0].peer, self.trainer.rank])
            return call(operations)

        return slow

    def _pass(self, tensor: torch.Tensor, ranks: list[int]) -> None:
        is_slow = self.trainer.step >= self.first and set(self.ranks) <= set(ranks)
        time.sleep(self.seconds * tensor.nbytes / 2**20 * (2 if is_slow else 1))


def twin_job(folder: Path, *, steps: int, **changes: Any) -> JobConfig:
    """Return a job with a twin."""
    return job(
        folder,
        training={"steps": steps},
        metrics={"log_freq": LOG_FREQ},
        # The others wait in a collective while rank 0 waits for the simulation, on a machine that may be busy.
        comm={"train_timeout_seconds": 900},
        **{"checkpoint": {"enable": False}, "simulator": {"twin": True}, **changes},
    )


def train_with(
    folder: Path,
    part: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    simulated: bool = False,
) -> None:
    """Train on a rank of a pool.

    Args:
        part: what becomes slow; "" for a clean run.
        options: of SlowPart.
        settings: of twin_job.
        simulated: whether to simulate the job. The run then waits for it in its second step.
    """
    trainer = (
        PoolTrainer(twin_job(folder, **settings))
        if simulated
        else _unpredicted(folder, settings)
    )
    if part:
        trainer.hooks.insert(0, SlowPart(trainer, part, **options))
    if simulated:
        trainer.hooks.insert(0, Wait(trainer))
    trainer.run()
    trainer.close()


def _unpredicted(folder: Path, settings: dict[str, Any]) -> PoolTrainer:
    with patch.object(twin.Prediction, "start"):
        return PoolTrainer(twin_job(folder, **settings))


class Wait(Hook):
    """Wait for the simulation in the second step, so that a test does not depend on the machine's speed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def step_begin(self) -> None:
        hook = self.trainer.hook(twin.Twin)
        if self.trainer.step == 2 and hook is not None and hook.prediction is not None:
            while hook.prediction.is_running:
                hook.prediction.poll()
                time.sleep(0.1)
