"""A run on one machine leaves strangers no door: not from another address, and not to another user."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.runs import Run

LISTEN = "0A"  # the state in /proc/net/tcp


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """`titan train --nproc 2` after its first step. It must then end well, whatever the tests did to it."""
    folder = tmp_path_factory.mktemp("strangers")
    settings = ("--nproc=2", "--training.steps=100000")
    run = Run(folder / "run", *settings, TMPDIR=str(folder))
    try:
        run.wait_until_training()
        yield run.process
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.said()
    finally:
        run.kill()


def processes(parent: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *(pid for child in children for pid in processes(int(child)))]


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """The hexadecimal address and the port of every socket on which these processes listen."""
    inodes = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(OSError):  # closed by now
            inodes.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def test_nothing_listens_beyond_loopback(run: subprocess.Popen[bytes]):
    pids = processes(run.pid)
    assert len(pids) >= 4, "titan train, its launcher and two ranks"
    sockets = listening(pids)
    assert sockets, "gloo's"
    assert {address for address, _ in sockets} == {"0100007F"}, sockets  # 127.0.0.1


def test_no_socket_takes_what_the_launcher_would_unpickle(run: subprocess.Popen[bytes]):
    """The attack: write a pickle to the launcher's store. Nothing that listens speaks its protocol, from any address."""
    own = socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(
            ("192.0.2.1", 9)
        )  # sends nothing; shows the address that other machines see
        outside = probe.getsockname()[0]
    doors: list[tuple[str, int]] = []

    def attack(host: str, port: int) -> None:
        with suppress(RuntimeError, ValueError):
            store = dist.TCPStore(host, port, timeout=timedelta(seconds=1))
            store.set("torch.rendezvous.none", "a pickle")
            doors.append((host, port))

    ports = [port for _, port in listening(processes(run.pid))]
    attacks = [
        # It may wait for an answer for ever: gloo gives none.
        threading.Thread(target=attack, args=(host, port), daemon=True)
        for host in {"127.0.0.1", own, outside}
        for port in ports
    ]
    for thread in attacks:
        thread.start()
    for thread in attacks:
        thread.join(3)
    assert not doors
    assert run.poll() is None


def test_the_folder_where_ranks_meet_is_private(run: subprocess.Popen[bytes]):
    environment = Path(f"/proc/{run.pid}/environ").read_bytes().split(b"\0")
    parent = next(Path(os.fsdecode(v[7:])) for v in environment if v.startswith(b"TMPDIR="))
    [folder] = parent.glob("titan-*")
    assert any(folder.glob("attempt-0*")), "where they have met"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
