"""Run tests in forks of the process that has collected them: torch and all tests are imported once, not once for each worker.

    pytest --forks 3

The tests of a file stay in one fork, since they share fixtures. The ranks of the pool are forked early from each fork, as
multiprocessing's fork server would fork them, and find all tests imported, too.
"""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import os
import signal
import socket
import sys
import traceback
from collections import deque
from importlib import import_module
from multiprocessing import Pipe, connection, forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.costs import SPENT
from titan.base.signals import die_with_parent
from titan.numerics.certify.ranks import MORE, PRELOAD


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run the tests in so many forks of the process that has collected them"
    parser.addoption("--forks", type=int, default=0, metavar="N", help=help)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config, hook = session.config, session.config.hook
    count = config.getoption("--forks")
    if not count or session.testsfailed or config.option.collectonly:
        return None
    if any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
        for name in (*PRELOAD, *MORE):
            import_module(name)
    gc.freeze()  # no fork copies what it only reads
    numbers = range(len(session.items))
    files = itertools.groupby(numbers, lambda n: session.items[n].path)
    waiting = deque([*group] for _, group in files)
    forks: dict[Any, tuple[int, list[int]]] = {}
    try:
        while True:
            while waiting and len(forks) < count:
                pipe, theirs = Pipe()
                config.get_terminal_writer().flush()  # or forks would write it, too
                if not (pid := os.fork()):
                    try:
                        _run(session, theirs)
                    except BaseException:
                        traceback.print_exc()
                    os._exit(1)
                theirs.close()
                forks[pipe] = pid, []
            if not forks:
                return True
            ready: list[Any] = connection.wait([*forks])
            for pipe in ready:
                pid, left = forks[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionResetError):
                    del forks[pipe]
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    if left:
                        item = session.items[left[0]]
                        why = f"the process of this test ended with {code}"
                        report = pytest.TestReport(
                            item.nodeid, item.location, {}, "failed", why, "call"
                        )
                        hook.pytest_runtest_logreport(report=report)
                        waiting.extend(filter(None, [left[1:]]))
                    elif code:
                        raise RuntimeError(f"a fork ended with {code}") from None
                    continue
                if message is None:  # it asks for the next file
                    left[:] = waiting.popleft() if waiting else []
                    pipe.send(left)
                elif isinstance(message, int):  # a test has ended
                    left.remove(message)
                    item = session.items[message]
                    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
                elif "$report_type" in message:
                    report = hook.pytest_report_from_serializable(config=config, data=message)
                    hook.pytest_runtest_logreport(report=report)
                else:
                    config.stash[SPENT].update(message)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    finally:
        for pid, _ in forks.values():
            os.kill(pid, signal.SIGKILL)


def _run(session: pytest.Session, pipe: Any) -> None:
    """Run files of tests until none is left, in a fork, and end it."""
    die_with_parent()
    config: Any = session.config
    reporter, capture = map(
        config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager")
    )
    reporter._tw._file = io.StringIO()
    config._tmp_path_factory._basetemp = config._tmp_path_factory.mktemp("fork")
    # What tests print goes to a separate file.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    _serve_ranks(pipe)
    capture.suspend_global_capture()

    class Send:
        def pytest_runtest_logreport(self, report: Any) -> None:
            hook = config.hook
            pipe.send(hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.register(Send())
    # After the last test of a file all fixtures end but those of the session.
    between: Any = SimpleNamespace(listchain=lambda: [session])
    while True:
        pipe.send(None)
        numbers = pipe.recv()
        if not numbers:
            break
        items = [session.items[n] for n in numbers]
        for number, item, following in zip(numbers, items, [*items[1:], between], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            pipe.send(number)
    session._setupstate.teardown_exact(None)
    pipe.send(config.stash[SPENT])
    os._exit(0)


def _serve_ranks(pipe: Any) -> None:
    """Make a fork of this process multiprocessing's fork server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux chooses a name
    listener.listen()
    alive, held = os.pipe()
    if not (pid := os.fork()):
        die_with_parent()
        atexit._clear()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not what pytest reads
        pipe.close()
        os.close(held)
        try:
            forkserver.main(listener.fileno(), alive, [])
        finally:
            os._exit(0)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_pid = listener.getsockname(), pid
    server._forkserver_alive_fd = held
    listener.close()
    os.close(alive)
