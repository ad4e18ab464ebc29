"""Execution of a sweep's runs, several at a time, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from titan.base.hardware import count_accelerators, device_share, require_memory
from titan.base.signals import STOPPING, child_environment, handled
from titan.base.untrusted import InputError
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
                    ended = process.returncode
                    see = "" if ended in (0, STOPPED) else f"; see {trial.log}"
                    _say(f"{trial.folder.name}/{trial.name}: ended with exit code {ended}{see}")
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
