"""Launcher of several processes on this machine: `titan train --nproc N`.

It is torchrun with the same arguments, made safe. The launcher passes a signal on to the ranks, not
to torchrun, which would give them 30 seconds to save and does not handle SIGUSR1. torchrun ends
with 1 for any code of its ranks; status.json, written by the ranks, keeps the real exit code. If
ranks have failed, their own messages suffice, so torchrun's traceback of itself is left out. If the
launcher or torchrun is killed, the processes below it end with it (titan/base/signals.py). Ranks
of `titan train` start warm (titan/ops/warm_start.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from titan.base.errors import COMMUNICATION
from titan.base.hardware import require_memory, usable_cores
from titan.base.run_folder import STATUS, RunFolder, write_status
from titan.base.run_writer import run_files
from titan.base.signals import (
    ASKING,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    STOPPING,
    child_environment,
    die_with_parent,
    handled,
)
from titan.config.options import is_quiet

from . import warm_start
from .activity import count_oom_kills

# Faults in native code, which Python cannot report.
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
FORWARDED = (*STOPPING, ASKING)
_PATIENCE_S = 20  # torchrun sends SIGKILL 30 s after SIGTERM


def launch(
    argv: Sequence[str], *, num_processes: int, dump_folder: str, max_restarts: int = 0
) -> int:
    """Run `titan.train` in several processes.

    Args:
        argv: arguments of `titan train`.
        num_processes: number of ranks.
        dump_folder: run folder, whose status.json has the exit code.
        max_restarts: how often torchrun starts the ranks again after a failure.

    Returns:
        The run's exit code.
    """
    run_dir = Path(dump_folder)
    # status.json of an earlier run may still be there.
    before = _version(run_dir)
    command = _torchrun_command("titan.train", argv, num_processes, max_restarts)
    if not is_quiet():
        with suppress(OSError):  # a full disk, a pipe that nobody reads
            print(
                f"titan: starting {num_processes} processes; each imports torch first",
                flush=True,
            )
    # Its own session: a Ctrl-C reaches this process alone, which passes it on once.
    agent = subprocess.Popen(command, env=environment(num_processes), start_new_session=True)
    # The caller's handlers come back: `titan train` may be called from a program.
    with handled(FORWARDED, _forwarder(agent)):
        code = agent.wait()
    if code < 0 and -code != signal.SIGTERM:  # we send SIGTERM to torchrun while it starts
        # Its ranks end with it, and no other process is left to report this.
        name = signal.Signals(-code).name
        reason = f"torchrun (pid {agent.pid}), which `titan train` starts the ranks with, was ended by {name}"
        with suppress(OSError):
            print(reason, file=sys.stderr)
        if RunFolder(run_dir).status.state == "running":
            kind = "launcher_killed"
            write_status(
                run_dir, state="failed", exit_code=EXIT_FAILED, reason=reason, kind=kind
            )
    # The code of a run without a report: 0 or 1.
    unknown = min(abs(code), 1)
    if _version(run_dir) == before:  # status.json is of an earlier run
        return unknown
    # The trainer's own exit code; torchrun's if the trainer wrote none, or wrote 0.
    return RunFolder(run_dir).status.exit_code or unknown


def launch_command(name: str, argv: Sequence[str] | None, *, num_processes: int) -> int:
    """Run a command of titan in several processes, without its option --nproc.

    Args:
        name: name of the command.
        argv: its arguments; None: the arguments of this process.
        num_processes: number of ranks.

    Returns:
        torchrun's exit code.
    """
    # torchrun would read --nproc as one of its options.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc")
    rest = parser.parse_known_args(argv)[1]
    return launch_module("titan.cli", [name, *rest], num_processes=num_processes)


def launch_module(name: str, argv: Sequence[str], *, num_processes: int) -> int:
    """Run a module in several processes that are no training run.

    Args:
        name: name of the module.
        argv: its arguments.
        num_processes: number of ranks.

    Returns:
        torchrun's exit code.
    """
    command = _torchrun_command(name, argv, num_processes)
    return subprocess.call(command, env=environment(num_processes))


def _torchrun_command(
    module: str, argv: Sequence[str], num_processes: int, max_restarts: int = 0
) -> list[str]:
    how = [f"--nproc-per-node={num_processes}", f"--max-restarts={max_restarts}"]
    return [sys.executable, "-m", __name__, "--standalone", *how, "-m", module, *argv]


def torchrun(argv: Sequence[str]) -> int:
    """Run torchrun itself, with one line instead of its traceback if a rank has failed.

    Returns:
        0; 2 or 75 if all failed ranks ended with that code; otherwise 1.
    """
    die_with_parent()
    os.environ |= child_environment()  # for the ranks
    logging.disable(logging.ERROR)  # torchrun's account of a failed rank
    oom_kills_before = count_oom_kills()
    # torchrun would replace nohup's setting by a handler that ends the run.
    handled = os.environ.get("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(
        ","
    )
    kept = [n for n in handled if getattr(signal, n, None) not in warm_start.IGNORED]
    os.environ["PET_SIGNALS_TO_HANDLE"] = ",".join(kept)
    if "titan.train" in argv:
        warm_start.prepare()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    from . import rendezvous

    rendezvous.register()
    # torchrun's own --standalone listens on every interface, and unpickles the data it receives.
    arguments = [
        f"--rdzv-backend={rendezvous.BACKEND}" if argument == "--standalone" else argument
        for argument in argv
    ]
    try:
        main(arguments)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if text := _describe_kill(rank, failure):
                print(text, file=sys.stderr)
        if not any("preflight" in argument for argument in argv):  # preflight has no run folder
            num_oom_kills = count_oom_kills() - oom_kills_before
            with suppress(Exception):  # this only explains a failure
                _write_failures(argv, error.failures, num_oom_kills=num_oom_kills)
        # SIGTERM is torchrun's own, to the ranks that are left.
        # All ranks that failed must agree on 2 or 75.
        codes = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}
        return codes.pop() if codes in ({EXIT_USER_ERROR}, {EXIT_STOPPED}) else EXIT_FAILED
    return 0


def _describe_kill(rank: int, failure: Any) -> str:
    """Describe the signal that ended a rank. Return an empty string if the rank exited or torchrun ended it."""
    if failure.exitcode >= 0 or -failure.exitcode == signal.SIGTERM:
        return ""
    name = signal.Signals(-failure.exitcode).name
    return f"rank {rank} (pid {failure.pid}) was ended by {name}"


def _write_failures(
    argv: Sequence[str], failures: Mapping[int, Any], *, num_oom_kills: int
) -> None:
    """Write how the ranks ended, since perhaps no rank lived to report it.

    logs/launch-HOST.json is for `titan doctor`. status.json is written if it still says "running".
    """
    from titan.config.load import load_from_argv

    # The job's arguments follow torchrun's.
    first = next(n for n, argument in enumerate(argv) if argument.endswith(".toml"))
    run_dir = Path(load_from_argv(argv[first:]).job.dump_folder)
    ranks = {
        rank: {"pid": failure.pid, "exit_code": failure.exitcode, "unix_s": failure.timestamp}
        for rank, failure in failures.items()
    }
    host = socket.gethostname()
    content = {"host": host, "ranks": ranks, "oom_kills": num_oom_kills}
    run_files(run_dir).replace(
        f"logs/launch-{host}.json", json.dumps(content) + "\n", last=True
    )
    status = RunFolder(run_dir).status
    # A fault in native code outranks the reports of its peers, which lost their connection.
    faults = {
        rank: failure for rank, failure in failures.items() if -failure.exitcode in FAULTS
    }
    # So does SIGKILL, unless torchrun has waited for that rank first.
    is_late = time.time() - status.unix_s > _PATIENCE_S
    if status.kind in COMMUNICATION and not is_late:
        faults |= {r: f for r, f in failures.items() if -f.exitcode == signal.SIGKILL}
    # The monitor has ended silent ranks. A rank may crash while it writes its stacks.
    if status.state == "hung":
        faults = {}
    if faults or status.state == "running":
        texts = filter(
            None, (_describe_kill(*item) for item in sorted((faults or failures).items()))
        )
        reason = "; ".join(texts) or f"all ranks on {host} ended without a report"
        write_status(run_dir, state="failed", exit_code=EXIT_FAILED, reason=reason)


def environment(num_processes: int) -> dict[str, str]:
    """Return the environment for torchrun. Variables that the user has set stay.

    It warns about far too many processes, and refuses more than the memory holds. The processes share the cores: torchrun would give each
    process one thread, and warn. Each attempt has its own store: in the store that torchrun keeps
    over restarts, a fast rank finds the address of a dead rank (6 of 10 restarts, torch 2.13;
    pytorch#135712; docs/architecture.md).
    """
    require_memory("--nproc", num_processes)
    cores = usable_cores()
    if num_processes > 4 * cores:
        text = f"{num_processes} processes on {cores} cores: they need minutes to start, and train no faster than {cores}"
        print(f"warning: {text}", file=sys.stderr, flush=True)
    # At least one, also with more processes than cores.
    threads = str(max(1, cores // num_processes))
    ours = {"OMP_NUM_THREADS": threads, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return ours | child_environment()


def _forwarder(agent: subprocess.Popen[Any]) -> Any:
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        # SIGUSR2 asks for stacks and does not count as a request to stop.
        if number != ASKING:
            received.append(number)
        ranks = ranks_of(agent.pid)
        # If it is still starting, or this is the third signal, torchrun ends the ranks.
        if number != ASKING and (not ranks or len(received) > 2):
            agent.terminate()
        for rank in ranks:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(rank, number)

    return forward


def ranks_of(agent: int) -> list[int]:
    """Return the process ids of the ranks: torchrun's children that run titan.train."""
    children = Path(f"/proc/{agent}/task/{agent}/children")
    if not children.exists():  # macOS
        search = ["pgrep", "-P", str(agent), "-f", "titan.train"]
        output = subprocess.run(search, capture_output=True, text=True).stdout
        return [int(pid) for pid in output.split()]
    ranks = []
    for pid in children.read_text().split():
        with suppress(OSError):  # it has just ended
            if b"titan.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(int(pid))
    return ranks


def _version(run_dir: Path) -> tuple[int, int] | None:
    """Return a value that changes with each write of status.json."""
    try:
        stat = (run_dir / STATUS).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


if __name__ == "__main__":
    code = torchrun(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: triton would list objects that live, after the reason why a rank has failed.
    os._exit(code)
