"""Parts that start the processes of a run: their contracts. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Protocol

from titan.config.plug_ins import door, require_part
from titan.config.schema import JobConfig


@door("launch")
class Launcher(Protocol):
    """Functions that start several processes on this machine, such as those of titan.ops.launch."""

    def launch(
        self,
        argv: Sequence[str],
        *,
        num_processes: int,
        dump_folder: str,
        max_restarts: int = 0,
    ) -> int:
        """Run `titan.train` in several processes.

        Args:
            argv: arguments of `titan train`.
            num_processes: number of ranks.
            dump_folder: run folder.
            max_restarts: how often the ranks are started again after a failure.

        Returns:
            The run's exit code.
        """
        ...

    def launch_command(
        self, name: str, argv: Sequence[str] | None, *, num_processes: int
    ) -> int:
        """Run a command of titan in several processes, without its option --nproc.

        Args:
            name: name of the command.
            argv: its arguments; None: the arguments of this process.
            num_processes: number of ranks.

        Returns:
            The exit code.
        """
        ...


def launcher(module: str, num_processes: int) -> Launcher:
    """Return the installed launcher.

    Args:
        module: module that the processes run, with its arguments, for the error.
        num_processes: number of processes, for the error.

    Raises:
        ConfigError: none is installed.
    """
    fix = f"torchrun --nproc-per-node={num_processes} -m {module}"
    missing = f"the launcher of several processes is not installed; start them by `{fix}`"
    return require_part(Launcher, key="--nproc", missing=missing)


class NewLayout(Protocol):
    """Layout that was chosen for a job."""

    def write(self, config: JobConfig) -> None:
        """Write the choice into the job's run folder."""
        ...


@door("layout")
class LayoutChoice(Protocol):
    """Function behind `parallelism.layout = "auto"`."""

    def __call__(
        self, job: Sequence[str], *, world_size: int, keep: bool
    ) -> tuple[list[str], NewLayout | None]:
        """Return the job with its layout on this machine, and the choice if it is new.

        Args:
            job: files and overrides, as on the command line.
            world_size: number of ranks.
            keep: whether the layout in the run folder is kept, if the job can still have it.

        Raises:
            ConfigError: no layout fits.
        """
        ...


@door("train")
class LaunchExtension:
    """Another way of `titan train` to start its processes, train.NAME of `titan.extensions`.

    Attributes:
        usage: its options in the usage line.
    """

    usage = ""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add options to the command."""

    def launch(
        self, options: argparse.Namespace, argv: Sequence[str], load: Callable[[int], JobConfig]
    ) -> int | None:
        """Start the processes, wait for them, and return the exit code. None: the options do not ask for it.

        Args:
            options: options of the command.
            argv: the files and overrides of the job.
            load: returns the checked job for a number of processes.
        """
        return None
