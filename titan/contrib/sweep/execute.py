"""Execution of a sweep's runs: several at a time on this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from titan.hardware import count_accelerators
from titan.health.run_lock import RunLock, RunLocked
from titan.tools.ray_cluster import connect
from titan.untrusted import InputError

from .grid import Trial

STOPPED = 75  # a run that saved when it was asked to stop
Say = Callable[[str], None]


def command(trial: Trial, processes: int) -> list[str]:
    """Return the command of a run."""
    words = [sys.executable, "-m", "titan.cli", "train", str(trial.job)]
    return [*words, "--nproc", str(processes)]


def ended(trial: Trial, code: int) -> str:
    """Return the line about a run that has ended."""
    return f"{trial.name}: ended with exit code {code}" + f"; see {trial.log}" * (code not in (0, STOPPED))  # fmt: skip


def run_here(trials: Sequence[Trial], *, at_a_time: int, processes: int, say: Say) -> int:
    """Run trials on this machine, and return 75 if a signal stopped them, otherwise 0.

    Args:
        trials: Runs that are not done.
        at_a_time: Number of runs that train together. Each has its share of the accelerators, or of the cores.
        processes: Processes of each run.
        say: Prints a line.
    """
    shares = _shares(at_a_time, processes)
    waiting, free = list(trials), list(range(at_a_time))
    running: dict[int, tuple[subprocess.Popen[bytes], Trial]] = {}
    stopped = False

    def stop(number: int, _: object) -> None:
        nonlocal stopped
        stopped = True
        for process, _ in running.values():
            process.send_signal(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not stopped):
            while free and not stopped and (ready := [t for t in waiting if not _goes_on(t)]):
                trial, place = ready[0], free.pop(0)
                waiting.remove(trial)
                say(f"{trial.name}: begins ({len(waiting)} wait)")
                process = _start(command(trial, processes), trial, shares[place])
                running[place] = process, trial
            for place, (process, trial) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[place]
                    free.append(place)
                    say(ended(trial, code))
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            process.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return STOPPED if stopped else 0


def _goes_on(trial: Trial) -> bool:
    """Return whether a run that an earlier command began is still alive."""
    try:
        RunLock(trial.run).require_free()
    except RunLocked:
        return True
    return False


def _start(words: list[str], trial: Trial, share: dict[str, str]) -> subprocess.Popen[bytes]:
    trial.run.mkdir(parents=True, exist_ok=True)
    with trial.log.open("ab") as log:
        # In a separate session, a run gets each signal once, from here.
        return subprocess.Popen(
            words, stdout=log, stderr=log, env=os.environ | share, start_new_session=True
        )


def _shares(at_a_time: int, processes: int) -> list[dict[str, str]]:
    """Return the environment of each run that trains at the same time.

    Raises:
        InputError: There are accelerators, and too few.
    """
    devices = count_accelerators()
    if not devices:
        threads = max(1, (os.cpu_count() or 1) // (at_a_time * processes))
        return [{"OMP_NUM_THREADS": str(threads)}] * at_a_time
    if at_a_time * processes > devices:
        raise InputError(
            f"titan sweep: {at_a_time} runs of {processes} processes need {at_a_time * processes} accelerators, and there are {devices}: "
            "use fewer --jobs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(visible[n * processes : (n + 1) * processes])}
        for n in range(at_a_time)
    ]


def run_on_ray(trials: Sequence[Trial], address: str, *, processes: int, say: Say) -> int:
    """Run trials as tasks of a Ray cluster, whose nodes see the folder of the sweep. A task whose node is lost begins elsewhere.

    A run that goes on without its task, since Ray has ended before it, is known by its lock. Its new task waits for its end.
    Return an exit code: 0, or that of a command which Ctrl-C or SIGTERM has stopped.

    Args:
        trials: Runs that are not done.
        address: Address of the cluster, or "auto".
        processes: Processes of each run, with a GPU for each if the cluster has GPUs, otherwise a core.
        say: Prints a line.
    """
    ray = connect(address, asked_by="--ray")
    resource = "num_gpus" if ray.cluster_resources().get("GPU") else "num_cpus"

    def train(trial: Trial) -> int:
        process = None
        try:
            while _goes_on(trial):
                time.sleep(1)
            with trial.log.open("ab") as file:
                process = subprocess.Popen(command(trial, processes), stdout=file, stderr=file)
            while process.poll() is None:
                time.sleep(0.2)
        except KeyboardInterrupt:  # by ray.cancel
            if process is None:
                return STOPPED
            process.terminate()
        return process.wait()

    options: dict[str, Any] = {resource: processes, "max_retries": 3}
    remote: Any = ray.remote(**options)(train)
    for trial in filter(_goes_on, trials):
        say(f"{trial.name}: goes on since an earlier command; its task waits for its end")
    tasks = {remote.remote(trial): trial for trial in trials}
    # After `connect`, since Ray ends the command at once. Slurm and Kubernetes send SIGTERM.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while tasks:
            [done, *_], _ = ray.wait(list(tasks))
            say(ended(tasks.pop(done), ray.get(done)))
    except KeyboardInterrupt:
        say("stopping: runs save a checkpoint, and the same command goes on from there")
        for task in tasks:
            ray.cancel(task)
        for task in tasks:
            ray.wait([task], timeout=120)
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()
    return 0
