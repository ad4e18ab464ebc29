"""Warm start: the ranks of one machine are forks of a launcher that has imported torch and titan.

A fresh interpreter imports for seconds before it can train, and a restart waits for the slowest
import. A fork has nothing left to import. It stays a child of torchrun, which signals it and reads
its exit code as before.

A fork copies only the calling thread, and no use of an accelerator survives it. If a launcher has a
second thread or an open accelerator, and on systems other than Linux, ranks start cold.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from titan.base.signals import EXIT_FAILED

# torchrun's command for a rank, before the job's arguments.
_RANK = (sys.executable, "-u", "-m", "titan.train")
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
# Signals that the parent process made this process ignore (nohup, or a shell for a background job) and block.
# A program inherits both. launch.py imports this module before torchrun has handlers.
IGNORED = frozenset(n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN)
_BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())


def can_fork() -> bool:
    """Return whether a fork of this process may train: it has one thread, and no accelerator open."""
    if not sys.platform.startswith("linux") or len([*Path("/proc/self/task").iterdir()]) > 1:
        return False
    opened = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    return not any(path.startswith(_ACCELERATORS) for path in opened)


def prepare() -> None:
    """Import the ranks' modules, and make torchrun fork them. Do nothing if `can_fork` is false.

    Call it before torch is imported, which imports numpy. OpenMP reads OMP_NUM_THREADS when it is
    loaded. Without that variable torchrun sets it for the ranks only, so they start cold.
    """
    if "OMP_NUM_THREADS" not in os.environ or not can_fork():
        return
    # numpy's OpenBLAS starts its threads when it is imported. Ranks multiply no matrices with numpy.
    ours = {"OPENBLAS_NUM_THREADS"} - {*os.environ}
    os.environ |= dict.fromkeys(ours, "1")
    importlib.import_module("numpy")
    for name in ours:
        del os.environ[name]
    # By name, as torchrun starts it: this module does not import the trainer.
    importlib.import_module(_RANK[-1]).import_all()
    # Otherwise the ranks' first garbage collection copies every page that they share with this process.
    gc.freeze()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _Rank


class _Rank(subprocess.Popen[bytes]):
    """Replacement for torchrun's Popen. It forks a rank, and starts any other program as usual."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **options: Any) -> None:
        if tuple(args[: len(_RANK)]) == _RANK and can_fork():
            sys.stdout.flush()  # otherwise the fork would print the text once more
            sys.stderr.flush()
            # Called in the fork, with its files and its session set up. It never returns, so Popen executes no program.
            options["preexec_fn"] = partial(_run_rank, args[len(_RANK) :], env)
            # Python ignores SIGPIPE: a rank reports a lost connection as an error. Popen would let the signal kill it.
            options["restore_signals"] = False
        super().__init__(args, env=env, **options)


def close_inherited() -> None:
    """Close all files but standard input, output and error.

    It closes open files only, not every possible number: containers allow 2^30, and without the
    system's close_range `os.closerange` would try each of them.
    """
    for path in [*Path("/proc/self/fd").iterdir()]:
        if int(path.name) > 2:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(int(path.name))


def _run_rank(argv: Sequence[str], env: dict[str, str]) -> None:
    """Run a rank, and end with its exit code. Files, signals and variables are as in a new program."""
    try:
        # Popen waits until its pipe, one of these files, is closed.
        close_inherited()
        # The launcher's handlers end its ranks.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) is not None:  # otherwise the handler is not Python's
                signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
        if signal.SIGINT not in IGNORED:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED)
        gc.enable()  # Popen has stopped it
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(env)
        # `ps` shows the launcher's command line for all ranks.
        Path("/proc/self/comm").write_text(f"titan rank {env['RANK']}")
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]
        sys.argv = [_RANK[-1], *argv]
        sys.modules[_RANK[-1]].run_rank()  # of titan/run/train.py
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(EXIT_FAILED)
