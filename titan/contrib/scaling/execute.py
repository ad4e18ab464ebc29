"""Execution of a sweep's runs: several at a time on this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from titan.base.hardware import count_accelerators, device_share, require_memory
from titan.base.signals import STOPPING, child_environment, handled
from titan.base.untrusted import InputError
from titan.data import DataError, require
from titan.ops.run_lock import RunLock, RunLocked

from .trials import Trial

STOPPED = 75  # a run that saved when it was asked to stop


def run_here(trials: Sequence[Trial], *, at_a_time: int, processes: int) -> int:
    """Run trials on this machine, and return 75 if a signal stopped them, otherwise 0.

    Args:
        trials: runs that are not done.
        at_a_time: number of runs that train together. Each has its share of the accelerators, or of the cores.
        processes: processes of each run.
    """
    require_memory("--jobs", at_a_time * processes)
    shares = _shares(at_a_time, processes)
    waiting = list(trials)
    running: dict[subprocess.Popen[bytes], tuple[Trial, dict[str, str]]] = {}
    code = 0

    def stop(number: int, _: object) -> None:
        nonlocal code
        code = STOPPED
        for process in running:
            process.send_signal(number)

    try:
        with handled(STOPPING, stop):
            while running or (waiting and not code):
                ready = [] if code or not shares else [t for t in waiting if not _goes_on(t)]
                for trial, share in zip(ready, shares.copy(), strict=False):
                    waiting.remove(trial)
                    shares.remove(share)
                    _say(f"{trial.folder.name}/{trial.name}: begins ({len(waiting)} wait)")
                    running[_start(trial, processes, share)] = trial, share
                for process in [each for each in running if each.poll() is not None]:
                    trial, share = running.pop(process)
                    shares.append(share)
                    _say_ended(trial, process.returncode)
                time.sleep(0.2)
    finally:
        for process in running:
            process.terminate()
    return code


def _goes_on(trial: Trial) -> bool:
    """Return whether a run that an earlier command began is still alive."""
    try:
        RunLock(trial.run).require_free()
    except RunLocked:
        return True
    return False


def _start(trial: Trial, processes: int, share: dict[str, str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "titan.cli", "train", str(trial.job), f"--nproc={processes}"]
    trial.run.mkdir(parents=True, exist_ok=True)
    with trial.log.open("ab") as log:
        # In a separate session, a run gets each signal once, from here.
        return subprocess.Popen(
            words,
            stdout=log,
            stderr=log,
            env=child_environment() | share,
            start_new_session=True,
        )


def _say(line: str) -> None:
    print(line, flush=True)


def _say_ended(trial: Trial, code: int) -> None:
    see = "" if code in (0, STOPPED) else f"; see {trial.log}"
    _say(f"{trial.folder.name}/{trial.name}: ended with exit code {code}{see}")


def _shares(at_a_time: int, processes: int) -> list[dict[str, str]]:
    """Return the environment of each run that trains at the same time.

    Raises:
        InputError: There are accelerators, and too few.
    """
    devices, needed = count_accelerators(), at_a_time * processes
    if not devices:
        threads = max(1, (os.cpu_count() or 1) // needed)
        return [{"OMP_NUM_THREADS": str(threads)}] * at_a_time
    if needed > devices:
        raise InputError(
            f"{at_a_time} runs of {processes} processes need {needed} accelerators, and there are {devices}: "
            "use fewer --jobs"
        )
    return [device_share(number, processes) for number in range(at_a_time)]


def connect(address: str) -> Any:
    """Connect to a Ray cluster. Return the module `ray`.

    Raises:
        DataError: Ray is not installed, or there is no cluster at the address.
    """
    ray = require("ray", purpose="--ray", extra="ray")
    try:
        # Ray itself tries for minutes where nobody listens.
        if ":" in address:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # of many kinds: no cluster, no such address, another version
        # Without Ray's report of where it was raised.
        lines = str(getattr(error, "cause", None) or error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        raise DataError(
            f"--ray: no Ray cluster answers at '{address}' ({reason}); start one with `ray start --head`, "
            "or give --address HOST:PORT"
        ) from error
    return ray


def run_on_ray(trials: Sequence[Trial], address: str, *, processes: int) -> int:
    """Run trials as tasks of a Ray cluster, whose nodes see the folder of the sweep. A task whose node is lost begins elsewhere.

    A run that goes on without its task, since Ray has ended before it, is known by its lock. Its new task waits for its end.
    Return an exit code: 0, or that of a command which Ctrl-C or SIGTERM has stopped.

    Args:
        trials: runs that are not done.
        address: address of the cluster, or "auto".
        processes: processes of each run, with a GPU for each if the cluster has GPUs, otherwise a core.
    """
    ray = connect(address)
    resource = "num_gpus" if ray.cluster_resources().get("GPU") else "num_cpus"

    def train(trial: Trial) -> int:
        process = None
        try:
            while _goes_on(trial):
                time.sleep(1)
            process = _start(trial, processes, {})
            while process.poll() is None:
                time.sleep(0.2)
        except KeyboardInterrupt:  # by ray.cancel
            if process is None:
                return STOPPED
            process.terminate()
        return process.wait()

    options: dict[str, Any] = {resource: processes, "max_retries": 3}
    remote = ray.remote(**options)(train)
    for trial in filter(_goes_on, trials):
        _say(f"{trial.name}: goes on since an earlier command; its task waits for its end")
    tasks = {remote.remote(trial): trial for trial in trials}
    # After `connect`, since Ray ends the command at once. Slurm and Kubernetes send SIGTERM.
    with handled([signal.SIGTERM], signal.default_int_handler):
        try:
            while tasks:
                [done, *_], _ = ray.wait(list(tasks))
                _say_ended(tasks.pop(done), ray.get(done))
        except KeyboardInterrupt:
            _say("stopping: runs save a checkpoint, and the same command goes on from there")
            for task in tasks:
                ray.cancel(task)
            for task in tasks:
                ray.wait([task], timeout=120)
            return STOPPED
        finally:
            ray.shutdown()
    return 0
