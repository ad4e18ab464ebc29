"""A pool of gloo ranks that start warm: torch is imported once for all runs, not once for each run and rank.

Ranks are forked from multiprocessing's fork server, which has torch imported and has never run a parallel region
(forking a process whose OpenMP threads are running can hang). Each job has fresh processes: torch caches meshes and
groups by their shape, and a process group destroyed and made again would be taken for the old one.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from titan.base.errors import COMMUNICATION, kind_of
from titan.base.failure import UserError
from titan.base.fork_server import die_with_command, fork_server

AFTER_FAILURE_S = 2
PRELOAD = ("titan.step.train_step", "torch.distributed.pipelining")
# These take a second, which each rank that compiles or multiplies in float8 would spend.
MORE = ("torch.distributed.checkpoint", "torch._inductor.compile_fx", "torchao.float8")


@dataclass(frozen=True)
class RankError:
    """Error of one rank.

    Attributes:
        text: its traceback.
        line: type and message, in one line.
        refuses: whether the user can fix it.
        follows: whether it only says that another rank has gone.
    """

    text: str
    line: str
    refuses: bool = False
    follows: bool = False

    @staticmethod
    def of(error: BaseException, *, rank: int, world: int) -> RankError:
        """Return the record of the error that this process handles."""
        refuses = isinstance(error, UserError)
        first = next(iter(str(error).splitlines()), "")
        return RankError(
            text=f"rank {rank} of {world}:\n{traceback.format_exc()}",
            line=first if refuses else f"{_module_of(error)}{type(error).__name__}: {first}",
            refuses=refuses,
            follows=kind_of(error) in COMMUNICATION,
        )


def _module_of(error: BaseException) -> str:
    """Return "NAME: " of the innermost module of a model whose forward pass raised an error, or an empty string."""
    from torch import nn

    from titan.parallel.init_weights import canonical_name

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [m for f in frames if isinstance(m := f.f_locals.get("self"), nn.Module)]
    names = {m: name for name, m in modules[0].named_modules()} if modules else {}
    found = [canonical_name(names[m]) for m in modules if names.get(m)]
    return f"{found[-1]}: " if found else ""


class RankFailed(AssertionError):
    """A rank raised; the message holds the tracebacks of all that did.

    Attributes:
        cause: the first error that does not follow from another rank's.
    """

    def __init__(self, errors: Sequence[RankError]) -> None:
        super().__init__("\n".join(error.text for error in errors))
        self.cause = min(errors, key=lambda error: error.follows)


class Pool:
    """`run(world, function, *args)` calls function(*args) on each of `world` ranks and returns their results.

    The function must be at the top level of its module. With a world of one it has a process group too.
    """

    def __init__(self, more: Sequence[str] = MORE, *, quiet: bool = False) -> None:
        """Prepare the server.

        Args:
            more: modules that ranks find imported, besides those that all need.
            quiet: leave out what ranks write to stderr, such as advice about speed. Errors are results.
        """
        shown = os.dup(2)
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self.context = fork_server([*PRELOAD, *more])
        os.dup2(shown, 2)

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        job = pickle.dumps((function, args))
        ranks = []
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                ours, theirs = self.context.Pipe()
                arguments = (theirs, sys.path, f"{folder}/store", rank, world, job)
                process = self.context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            results = _receive(ranks)
            failures = [error for error in results.values() if isinstance(error, RankError)]
            for process, connection in ranks:
                connection.close()
                process.join(0 if failures else AFTER_FAILURE_S)
                process.kill()  # where another has failed, it may hang in a collective
                process.join()
        if failures:
            raise RankFailed(failures)
        return [pickle.loads(results[rank]) for rank in range(world)]


def _receive(ranks: list[tuple[Any, Any]]) -> dict[int, Any]:
    """Return the messages of the ranks in the order of their ends, since a failure may cause others.

    After a failure, give the others a moment to say what they saw.

    Nothing here limits the time that ranks take, which depends on what else the machine does: scripts/test.sh limits the
    whole run.
    """
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    patience = None
    while waiting:
        ready: list[Any] = wait([*waiting], patience)
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                results[rank] = _death(rank, ranks[rank][0])
            if isinstance(results[rank], RankError):
                patience = AFTER_FAILURE_S
    return results


def _death(rank: int, process: Any) -> RankError:
    """Return the error of a rank that ended without a result."""
    process.join()
    code = process.exitcode
    how = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    text = f"rank {rank} died {how}"
    return RankError(text, text)


def _work(
    connection: Any, path: list[str], store: str, rank: int, world: int, job: bytes
) -> None:
    die_with_command()
    import torch
    import torch.distributed as dist

    from titan.parallel.torch_compat import limit_gloo

    torch.set_num_threads(1)
    sys.path[:] = path
    limit_gloo(loopback=True)  # a second thread would corrupt the heap in some runs
    try:
        function, args = pickle.loads(job)
        dist.init_process_group(
            "gloo",
            init_method=Path(store).as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(hours=1),
        )
        result = pickle.dumps(function(*args))
        dist.barrier()
        connection.send(result)
    except BaseException as error:  # a checkpoint error is no Exception
        connection.send(RankError.of(error, rank=rank, world=world))
