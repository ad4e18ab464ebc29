"""Multiprocessing's fork server, which ends with the process that started it, even while it still imports torch.

The server imports this module first.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from titan.base.signals import (
    EXIT_FAILED,
    LAUNCHER,
    child_environment,
    die_with_launcher,
    die_with_parent,
)

die_with_launcher()


def fork_server(preload: Iterable[str]) -> ForkServerContext:
    """Start the server unless it runs. Return the context whose processes are its forks.

    Args:
        preload: names of the modules that the forks find imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    os.environ |= child_environment()
    forkserver.ensure_running()
    del os.environ[LAUNCHER]
    return context


def die_with_command() -> None:
    """End this fork with the server, and so with the command."""
    die_with_parent()
    command = multiprocessing.parent_process()
    if command and not command.is_alive():  # it and the server ended before
        os._exit(EXIT_FAILED)
