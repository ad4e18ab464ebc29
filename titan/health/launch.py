"""Several processes on this machine: `titan train --nproc N` is torchrun with the same arguments, made a good citizen.

A signal is passed on to the ranks, not to torchrun, which would give them 30 seconds to save or know nothing of
SIGUSR1. torchrun ends with 1 whatever its ranks said; status.json, written by the trainer, keeps the real exit
code. And where ranks have failed, their own words are enough: torchrun's traceback of itself is left out. Whichever
process is killed, launcher or torchrun, those below it end with it (titan/health/signals.py).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from titan.health.errors import oom_kills
from titan.health.signals import ASKING, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, die_with_parent
from titan.observe.runinfo import read_status, write_status, write_text_atomically

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, ASKING)


def launch(
    argv: Sequence[str], *, num_processes: int, dump_folder: str, max_restarts: int = 0
) -> int:
    """Run `titan.train` in `num_processes` processes, again up to `max_restarts` times; returns the run's exit code."""
    status = Path(dump_folder) / "status.json"
    before = _version(status)
    command = [sys.executable, "-m", "titan.health.launch", "--standalone"]
    command += [f"--nproc-per-node={num_processes}", f"--max-restarts={max_restarts}"]
    command += ["-m", "titan.train", *argv]
    print(f"titan: starting {num_processes} processes; each imports torch first", flush=True)
    agent = subprocess.Popen(command, env=_environment(num_processes), start_new_session=True)
    handlers = {number: signal.signal(number, _forwarder(agent)) for number in FORWARDED}
    try:
        code = agent.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if code < 0 and -code != signal.SIGTERM:  # which is ours, to one that is still starting
        _tell_of_killed(agent.pid, signal.Signals(-code).name, Path(dump_folder))
    if _version(status) == before:  # an older run's status says nothing of this one
        return min(abs(code), 1)
    return _exit_code(status, unknown=min(abs(code), 1))


def _tell_of_killed(pid: int, name: str, run_dir: Path) -> None:
    """torchrun's last words, which had no chance to say any; its ranks end with it, and say nothing either."""
    reason = f"torchrun (pid {pid}), which `titan train` starts the ranks with, was ended by {name}"
    print(reason, file=sys.stderr)
    if read_status(run_dir).get("state") == "running":
        write_status(run_dir, state="failed", exit_code=EXIT_FAILED, reason=reason)


def torchrun(argv: Sequence[str]) -> int:
    """torchrun itself, in a process of its own; one line instead of its traceback where a rank has failed. Returns 2 or 75 where
    that is what all of them said, else 1."""
    die_with_parent()
    logging.disable(logging.ERROR)  # torchrun's account of a failed rank
    oom_kills_before = oom_kills()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    from titan.health import rendezvous

    rendezvous.register()
    # torchrun's own --standalone listens on every interface, and unpickles what it reads there.
    arguments = [
        f"--rdzv-backend={rendezvous.BACKEND}" if argument == "--standalone" else argument
        for argument in argv
    ]
    try:
        main(arguments)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if killed := _describe_kill(rank, failure):
                print(killed, file=sys.stderr)
        if not any("preflight" in argument for argument in argv):  # it is no run
            _write_failures(argv, error.failures, num_oom_kills=oom_kills() - oom_kills_before)
        said = {f.exitcode for f in error.failures.values()} - {-signal.SIGTERM}  # torchrun's own
        return said.pop() if said in ({EXIT_USER_ERROR}, {EXIT_STOPPED}) else EXIT_FAILED
    return 0


def _describe_kill(rank: int, failure: Any) -> str:
    """Say which signal ended a rank; nothing where it exited. SIGTERM is torchrun's own, to the ranks that are left."""
    if failure.exitcode >= 0 or -failure.exitcode == signal.SIGTERM:
        return ""
    name = signal.Signals(-failure.exitcode).name
    return f"rank {rank} (pid {failure.pid}) was ended by {name}"


def _write_failures(
    argv: Sequence[str], failures: Mapping[int, Any], *, num_oom_kills: int
) -> None:
    """Write how the ranks ended, which no rank may have lived to say: logs/launch-HOST.json for `titan doctor`, and status.json
    where it still says "running"."""
    from titan.config.load import load_from_argv

    ranks = {
        rank: {"pid": failure.pid, "exit_code": failure.exitcode, "unix_s": failure.timestamp}
        for rank, failure in failures.items()
    }
    host = socket.gethostname()
    content = {"host": host, "ranks": ranks, "oom_kills": num_oom_kills}
    with suppress(Exception):  # it only explains a failure
        first = next(n for n, argument in enumerate(argv) if argument.endswith(".toml"))
        config = load_from_argv(argv[first:])
        run_dir = Path(config.job.dump_folder)
        path = run_dir / "logs" / f"launch-{host}.json"
        write_text_atomically(path, json.dumps(content) + "\n")
        status = read_status(run_dir)
        # A fault in native code outranks what its peers say, who lost their connection to it.
        faults = {rank: f for rank, f in failures.items() if -f.exitcode in FAULTS}
        if faults or status.get("state") == "running":
            failures = faults or failures
            kills = filter(None, (_describe_kill(*item) for item in sorted(failures.items())))
            reason = "; ".join(kills) or f"all ranks on {host} ended without a report"
            write_status(
                run_dir,
                state="failed",
                exit_code=EXIT_FAILED,
                step=status.get("step"),
                reason=reason,
            )


def _environment(num_processes: int) -> dict[str, str]:
    """What torchrun needs to be told, unless the user has.

    Share the cores among the processes: it would give each one thread, and warn. And a store for each attempt: in the one
    it keeps over restarts, a fast rank finds the address of a dead one (6 of 10 restarts, torch 2.13; pytorch#135712).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    threads = str(max(1, cores // num_processes))
    ours = {"OMP_NUM_THREADS": threads, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return ours | dict(os.environ)


def _forwarder(agent: subprocess.Popen[Any]) -> Any:
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number != ASKING:
            received.append(number)
        ranks = ranks_of(agent.pid)
        # Still starting, or asked for the third time: torchrun ends them.
        if number != ASKING and (not ranks or len(received) > 2):
            agent.terminate()
        for rank in ranks:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(rank, number)

    return forward


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks: torchrun's children that run titan.train."""
    children = Path(f"/proc/{agent}/task/{agent}/children")
    if not children.exists():
        search = ["pgrep", "-P", str(agent), "-f", "titan.train"]
        return [
            int(pid)
            for pid in subprocess.run(search, capture_output=True, text=True).stdout.split()
        ]
    return [
        int(pid) for pid in children.read_text().split() if b"titan.train" in _command_line(pid)
    ]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _version(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file is written."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def _exit_code(status: Path, *, unknown: int) -> int:
    """What the trainer says its exit code was; torchrun's where it had no time to say, or said that all was well."""
    try:
        content = json.loads(status.read_text())
    except (OSError, ValueError):
        return unknown
    return content.get("exit_code") or unknown


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
