"""Launcher of replica groups and their lighthouse on this machine: `titan train --elastic --groups N`.

Each group is a separate `titan train --nproc`, in RUN/group-0, RUN/group-1 and so on. All write and read checkpoints in one
folder. A group that ends with an error is started again, and heals from the others' memory.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

from titan.base import hardware
from titan.base.run_writer import write_text_atomically
from titan.base.signals import EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR, handled
from titan.base.untrusted import InputError
from titan.config.load import load_from_argv
from titan.config.options import add_options, mistake
from titan.config.schema import JobConfig
from titan.config.toml import table_beside
from titan.run.launch_extension import LaunchExtension

from .section import groups_of

# Set if all groups and their lighthouse are on this machine.
LOCAL = "TITAN_LOCAL_GROUPS"
# A group without a heartbeat for this long counts as lost. Lost connections are noticed at once.
_HEARTBEAT_S = 3
_ENDS = (EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR)


class GroupLauncher(LaunchExtension):
    """Options --elastic and --groups of `titan train`."""

    usage = "[--elastic --groups G]"

    def add_options(self, parser: ArgumentParser) -> None:
        add_options(parser, table_beside(__file__, "tables.toml")["train"])

    def launch(
        self, options: Namespace, argv: Sequence[str], load: Callable[[int], JobConfig]
    ) -> int | None:
        if not options.elastic:
            return None
        num_groups = options.groups or 2
        num_processes = processes_of_group(num_groups, options.nproc)
        return launch_groups(
            argv,
            load(num_processes),
            num_groups=num_groups,
            num_processes=num_processes,
            max_restarts=100 if options.max_restarts is None else options.max_restarts,
        )


def launch_groups(
    argv: Sequence[str],
    config: JobConfig,
    *,
    num_groups: int,
    num_processes: int,
    max_restarts: int,
) -> int:
    """Run the groups until the last group has ended.

    Args:
        argv: arguments of `titan train`.
        config: the job.
        num_groups: number of groups.
        num_processes: processes of each group.
        max_restarts: restarts of each group.

    Returns:
        0 if a group has trained to the end, otherwise the largest exit code of the groups.

    Raises:
        InputError: torchft is not installed.
    """
    address, lighthouse = groups_of(config).lighthouse, None
    if not address:
        lighthouse = _lighthouse(config, "127.0.0.1:0")
        address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    run, checkpoints = Path(config.job.dump_folder), config.checkpoint.folder
    folder = checkpoints if "://" in checkpoints else str((run / checkpoints).absolute())
    command = [sys.executable, "-m", "titan.cli", "train", *argv, "--nproc", str(num_processes)]
    command += [
        "--fault_tolerance.enable=true",
        f"--fault_tolerance.replica_groups={num_groups}",
    ]
    command += [f"--fault_tolerance.lighthouse={address}", f"--checkpoint.folder={folder}"]
    from titan.ops.launch import (
        FORWARDED,
        environment,
    )  # a run without groups needs no titan.ops

    variables = environment(num_groups * num_processes)  # groups share the cores
    if lighthouse is not None:  # no group of another machine joins
        variables[LOCAL] = "1"
    groups = [
        _Group(
            number,
            [
                *command,
                f"--fault_tolerance.replica_id={number}",
                f"--job.dump_folder={run / f'group-{number}'}",
            ],
            variables | hardware.device_share(number, num_processes),
        )
        for number in range(num_groups)
    ]

    def forward(number: int, _: object) -> None:
        """Pass a signal on to all groups."""
        for group in groups:
            group.signal(number)

    try:
        with handled(FORWARDED, forward):
            while living := [group for group in groups if group.poll(max_restarts)]:
                living[0].is_shown = True
                time.sleep(0.2)
    finally:
        if lighthouse is not None:
            lighthouse.shutdown()
    codes = {group.code for group in groups}
    return EXIT_DONE if EXIT_DONE in codes else max(codes)


def processes_of_group(num_groups: int, asked: int | None) -> int:
    """Return the number of processes of each group.

    Args:
        num_groups: number of groups.
        asked: value of --nproc. None: one process for each accelerator.

    Raises:
        ConfigError: The accelerators do not suffice, or do not divide among the groups.
    """
    count = hardware.count_accelerators()
    each = asked or max(1, count // num_groups)
    fits = not count or each * num_groups <= count
    if fits and (asked or count % num_groups == 0):
        return each
    known = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    message = (
        f"{num_groups} groups x {each} processes do not fit the {count} accelerators here"
        if not fits
        else f"{count} accelerators do not divide among {num_groups} groups; use --groups {known}, or --nproc {each} to leave some idle"
    )
    raise mistake("--nproc" if asked else "--groups", message)


def _lighthouse(config: JobConfig, bind: str) -> Any:
    os.environ.setdefault(
        "RUST_LOG", "error"
    )  # torchft reports every quorum; groups inherit this
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        raise InputError(
            "--elastic needs torchft: pip install 'titan-pretrain[elastic]'"
        ) from None
    return LighthouseServer(
        bind=bind,
        min_replicas=groups_of(config).min_replicas,
        # Wait for every living group: saving a checkpoint may take long.
        join_timeout_ms=1000 * config.comm.train_timeout_seconds,
        heartbeat_timeout_ms=1000 * _HEARTBEAT_S,
    )


def main(argv: Sequence[str]) -> None:
    """Run the lighthouse of a job until the process is ended.

    Args:
        argv: the file that gets the lighthouse's address, then the arguments of the job.
    """
    file, *job = argv
    lighthouse = _lighthouse(load_from_argv(job), "0.0.0.0:0")
    port = lighthouse.address().rpartition(":")[2]
    write_text_atomically(Path(file), f"http://{socket.gethostname()}:{port}\n")
    while True:
        time.sleep(3600)


@dataclass(eq=False)
class _Group:
    """Launcher process of one group.

    Attributes:
        number: number of the group.
        restarts: number of times that it was started again.
        code: its last exit code.
        is_stopped: whether it was asked to stop.
        is_shown: whether its lines of steps are printed. Other lines always are.
    """

    number: int
    command: Sequence[str]
    variables: dict[str, str]
    restarts: int = 0
    code: int = EXIT_DONE
    is_stopped: bool = False
    is_shown: bool = False
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        # A new session: a Ctrl-C reaches this process alone, which passes it on once.
        self.process = subprocess.Popen(
            self.command,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        Thread(target=self._print, args=(self.process.stdout,), daemon=True).start()

    def _print(self, lines: IO[str]) -> None:
        for line in lines:
            if self.is_shown or not line.startswith("step "):
                print(f"group {self.number} | {line}", end="", flush=True)

    def poll(self, max_restarts: int) -> bool:
        """Return whether the group lives. A group that has failed is started again first."""
        if self.process is None:
            return False
        code = self.process.poll()
        if code is None:
            return True
        self.code = abs(code)
        lives = False
        if code not in _ENDS and not self.is_stopped:
            lives = self.restarts < max_restarts
            self.restarts += lives
            again = f"not started again (--max-restarts {max_restarts}); other groups go on"
            if lives:
                again = f"started again, {self.restarts} of {max_restarts} times"
            name = signal.Signals(-code).name if code < 0 else ""
            end = f"was ended by {name}" if name else f"ended with {code}"
            print(f"group {self.number} | {end}: {again}", flush=True)
        if lives:
            self._start()
        else:
            self.process, self.is_shown = None, False
        return lives

    def signal(self, number: int) -> None:
        """Pass a signal on. A group that is asked to stop is not started again."""
        self.is_stopped |= number in (signal.SIGTERM, signal.SIGINT)
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


if __name__ == "__main__":
    main(sys.argv[1:])
