"""`titan prepare` on many hosts: tasks of a Ray cluster, or of a Slurm array. titan/contrib/prepare_hosts/parts.py divides the work."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from titan.config.options import positive
from titan.data import DataError
from titan.data.cache import display
from titan.data.shards import Index
from titan.data.sources import Documents
from titan.data.writer import TokenizationSpec
from titan.tools.prepare import PrepareExtension
from titan.tools.ray_cluster import connect, reason

from .parts import Parts, Run

# Ray begins a task elsewhere if its host or its process is lost, at most so often. Hosts that are cheap are lost all the time.
_RETRIES = 10
_MAX_ARRAY = 1000  # Slurm's own limit of an array, unless a cluster has another (MaxArraySize)


class Hosts(PrepareExtension):
    """Options --engine, --address and --share."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--engine",
            choices=("ray", "slurm"),
            help="use many hosts: run on a Ray cluster, or write the script of a Slurm array",
        )
        add("--address", metavar="HOST:PORT", help="address of the Ray cluster; default: auto")
        add(
            "--share",
            nargs=2,
            type=positive,
            metavar=("I", "N"),
            help="do the I-th of N shares, as a task of the array does",
        )

    def check(self, arguments: argparse.Namespace) -> None:
        engine, share = arguments.engine, arguments.share
        if arguments.address and engine != "ray":
            raise DataError("--address is that of a Ray cluster: it needs --engine ray")
        if share and share[0] > share[1]:
            raise DataError(
                f"--share {share[0]} {share[1]}: shares are numbered from 1 to {share[1]}"
            )
        if share and engine != "slurm":
            raise DataError("--share is for a task of a Slurm array: it needs --engine slurm")

    def write(
        self,
        documents: Documents,
        spec: TokenizationSpec,
        arguments: argparse.Namespace,
        words: list[str],
    ) -> Index | str | None:
        engine = arguments.engine
        # Other hosts have other working folders.
        folder = arguments.output.absolute()
        parts = Parts(documents, spec, folder, arguments.shard_tokens)
        if not engine:
            if parts.path("plan.json").is_file():  # other hosts began the folder
                parts.check()
            return None
        share, shares = arguments.share or (1, 1)
        # A task must not divide the work: it may be on a host that does not see the folder.
        parts.check() if arguments.share else parts.divide()
        units = len(parts.plan.sizes)
        if engine == "slurm" and not arguments.share and not parts.is_complete:
            script, left = (
                write_array(parts, words, tasks=arguments.workers),
                len(parts.missing()),
            )
            return (
                f"{units - left} of {units} units are done; to do the others: sbatch {script}"
            )
        documents = replace(documents, num_bytes=sum(parts.plan.sizes[share - 1 :: shares]))
        with ExitStack() as stack:
            report = stack.enter_context(display(documents, title=f"preparing {parts.folder}"))
            run = run_here(parts)
            if engine == "ray" and not parts.is_complete:
                address = arguments.address or os.environ.get("RAY_ADDRESS") or "auto"
                run = stack.enter_context(on_ray(parts, address, at_a_time=arguments.workers))
            index = parts.write(run, report, share=share - 1, shares=shares)
        left = f"{len(parts.missing())} of {units} units are left to other tasks"
        return index or f"share {share} of {shares} is done; {left}"


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
        raise DataError(reason(error)) from error
    except failures.RayError as error:
        raise DataError(
            f"a task ended {_RETRIES + 1} times ({reason(error)}), perhaps because memory ran out; the same command continues"
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
    parts = ray.get(reference)
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


def write_array(parts: Parts, words: list[str], *, tasks: int | None) -> Path:
    """Write the script of a Slurm array, and return it. Each task has a share of the units, and the last one joins them.

    Args:
        parts: the work.
        words: arguments of `titan prepare`.
        tasks: number of tasks, or None for one a unit.
    """
    units = len(parts.plan.sizes)
    tasks = min(tasks or units, units, _MAX_ARRAY)
    folder = parts.folder / "slurm"
    # The values of an #SBATCH line cannot be quoted.
    if wrong := [mark for mark in str(folder) if mark in " \t\n\"'%#\\"]:
        reason = f"{wrong[0]!r} has a meaning for it: use another folder"
        raise DataError(f"{folder}: sbatch cannot write logs there, since {reason}")
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
