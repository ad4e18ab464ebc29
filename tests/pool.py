"""A warm pool of gloo ranks: torch is imported once for the whole test run, not once for each test and rank.

Workers are forked from multiprocessing's fork server, which has torch imported and has never run a parallel
region (forking a process whose OpenMP threads are running can hang). A job is a module-level function; every
rank of it gets a fresh process group.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


class Pool:
    """`run(world, function, *args)` calls function(*args) on each of `world` ranks and returns their results."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["titan.program", "torch.distributed.checkpoint"])
        self.workers: list[tuple[Any, Any]] = []  # (process, connection)

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        while len(self.workers) < world:
            self.workers.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, connection) in enumerate(self.workers[:world]):
                job = pickle.dumps((function, args))
                connection.send((sys.path, f"{folder}/store", rank, world, job))
            results = [self._receive(connection) for _, connection in self.workers[:world]]
        failures = [text for ok, text in results if not ok]
        if failures:
            self.close()  # the others may hang in a collective
            raise RankFailed("\n".join(failures))
        return [pickle.loads(value) for _, value in results]

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        self.workers = []

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=True)  # pyright: ignore
        process.start()
        theirs.close()
        return process, ours

    def _receive(self, connection: Any) -> tuple[bool, Any]:
        if not connection.poll(TIMEOUT_S):
            return False, f"no answer within {TIMEOUT_S} s"
        try:
            return connection.recv()
        except EOFError:
            return False, "the worker died"


def _serve(connection: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            path, store, rank, world, job = connection.recv()
        except (EOFError, ConnectionResetError):  # the test run is over
            return
        sys.path[:] = path
        try:
            function, args = pickle.loads(job)
            dist.init_process_group(
                "gloo",
                init_method=Path(store).as_uri(),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
            result = pickle.dumps(function(*args))
            dist.barrier()
            dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:  # a checkpoint error is no Exception
            connection.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
            return
