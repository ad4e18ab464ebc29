"""`titan prepare` on many hosts: tasks of a Ray cluster, or of a Slurm array. titan/data/parts.py divides the work."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from titan.data import DataError, require
from titan.data.parts import Parts, Run

# Ray begins a task elsewhere if its host or its process is lost, at most so often. Hosts that are cheap are lost all the time.
_RETRIES = 10
_MAX_ARRAY = 1000  # Slurm's own limit of an array, unless a cluster has another (MaxArraySize)


def connect(address: str, *, asked_by: str) -> Any:
    """Connect to a Ray cluster. Return the module `ray`.

    Raises:
        DataError: Ray is not installed, or there is no cluster at the address.
    """
    ray = require("ray", purpose=asked_by, extra="ray")
    try:
        # Ray itself tries for minutes where nobody listens.
        if ":" in address:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (
        Exception
    ) as error:  # Ray raises many kinds: no cluster, no such address, another version
        raise DataError(
            f"{asked_by}: no Ray cluster answers at '{address}' ({_line(error)}); start one with `ray start --head`, "
            "or give --address HOST:PORT"
        ) from error
    return ray


def _line(error: BaseException) -> str:
    """Return the first line of an error, without Ray's report of where it was raised."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return (lines or [type(error).__name__])[0].rstrip(".")


@contextmanager
def on_ray(parts: Parts, address: str, *, at_a_time: int | None) -> Iterator[Run]:
    """Yield a function that runs tasks on a Ray cluster, after a check that every node sees the folder and the text.

    Args:
        parts: the work.
        address: address of the cluster, or "auto".
        at_a_time: tasks that run together, each on one core, or None for all cores.
    """
    ray = connect(address, asked_by="--engine ray")
    failures, where = ray.exceptions, ray.util.scheduling_strategies
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_task)
    box = [ray.put(parts)], str(Path.cwd())  # in a list, so that each process unpacks it once

    def run(method: str, items: Iterable[Any]) -> Iterator[Any]:
        waiting, left = [], iter(items)
        while True:
            # A few more tasks than cores: a core that is free finds one. The number of cores may change.
            limit = at_a_time or 2 * int(ray.cluster_resources().get("CPU", 1))
            more = islice(left, max(0, limit - len(waiting)))
            waiting += [task.remote(*box, method, item) for item in more]
            if not waiting:
                return
            [done], waiting = ray.wait(waiting)
            yield ray.get(done)

    try:
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                only = where.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                # Nothing is lost with a node that is lost just now.
                with suppress(failures.TaskUnschedulableError, failures.NodeDiedError):
                    probe = task.options(num_cpus=0, scheduling_strategy=only)
                    ray.get(probe.remote(*box, "check", None))
        yield run
    except failures.RayTaskError as error:
        raise DataError(_line(error)) from error
    except failures.RayError as error:
        raise DataError(
            f"a task ended {_RETRIES + 1} times ({_line(error)}), perhaps because memory ran out; the same command continues"
        ) from error
    finally:
        ray.shutdown()


@cache
def _unpacked(reference: Any, folder: str) -> Parts:
    """Return the work in a process of the cluster, once for all of its tasks."""
    import ray

    # Paths of the text may be relative to the folder of the command.
    with suppress(OSError):
        os.chdir(folder)
    parts: Any = ray.get(reference)
    parts.check()
    return parts


def _task(reference: list[Any], folder: str, method: str, item: Any) -> Any:
    try:
        return getattr(_unpacked(reference[0], folder), method)(item)
    except (OSError, DataError) as error:
        raise DataError(f"host {socket.gethostname()}: {error}") from error


def run_here(parts: Parts) -> Run:
    """Return a function that does the work in this process."""
    return lambda method, items: map(getattr(parts, method), items)


def checked_for_sbatch(folder: Path) -> Path:
    """Return a folder if an #SBATCH line, whose values cannot be quoted, can name it.

    Raises:
        DataError: It has a space, a quote, or a character that sbatch replaces.
    """
    if wrong := [mark for mark in str(folder) if mark in " \t\n\"'%#\\"]:
        raise DataError(f"{folder}: sbatch cannot write logs there, since {wrong[0]!r} has a meaning for it: use another folder")  # fmt: skip
    return folder


def write_array(parts: Parts, words: list[str], *, tasks: int | None) -> Path:
    """Write the script of a Slurm array, and return it. Each task has a share of the units, and the last one joins them.

    Args:
        parts: the work.
        words: arguments of `titan prepare`.
        tasks: number of tasks, or None for one a unit.
    """
    units = len(parts.plan.sizes)
    tasks = min(tasks or units, units, _MAX_ARRAY)
    folder = checked_for_sbatch(parts.folder / "slurm")
    folder.mkdir(exist_ok=True)
    command = shlex.join([sys.executable, "-m", "titan.cli", "prepare", *words])
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=titan-prepare --array=1-{tasks} --nodes=1 --ntasks=1 --cpus-per-task=1",
        f"#SBATCH --output={folder}/%a.log --requeue --open-mode=append",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'exec {command} --share "$SLURM_ARRAY_TASK_ID" {tasks}',
    ]
    (script := folder / "prepare.sbatch").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return script
