"""Network namespaces as hosts: each has an address, a host name and a /dev/shm of its own, and a link that can be cut. Needs root."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from tempfile import gettempdir, mkdtemp

from tests.support.commands import finished

ENTER = """hostname "$1"; mount -t tmpfs tmpfs /dev/shm; mount --bind "$2" /etc/hosts; shift 2; exec "$@" """


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not (which("ip") and which("unshare")):
        return "network namespaces need ip and unshare (apt: iproute2, util-linux)"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True
    )
    return (
        "" if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"
    )


def run(*command: str) -> str:
    """Its output; raises if it fails."""
    done = finished(command)
    return done.stdout.strip()


class Hosts:
    """`count` hosts on one bridge: {name}1 has the address {subnet}.1, and so on; this machine is {subnet}.254."""

    def __init__(self, count: int, *, name: str, subnet: str) -> None:
        self.name, self.subnet, self.count = name, subnet, count
        # Names and addresses are the machine's: another worker, or another run of the tests, waits until `close`.
        self.lock = (Path(gettempdir()) / "titan-tests-hosts.lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self._remove()  # what a killed test has left
        self.hosts_file = Path(mkdtemp(prefix="titan-hosts-")) / "hosts"
        lines = [f"{subnet}.{i} {name}{i}" for i in self.numbers]
        self.hosts_file.write_text("\n".join([Path("/etc/hosts").read_text(), *lines, ""]))
        run("ip", "link", "add", f"{name}-br", "type", "bridge")
        run("ip", "address", "add", f"{subnet}.254/24", "dev", f"{name}-br")
        run("ip", "link", "set", f"{name}-br", "up")
        for i in self.numbers:
            host, cable = f"{name}{i}", f"{name}-v{i}"
            run("ip", "netns", "add", host)
            run(*f"ip link add {cable} type veth peer name eth0 netns {host}".split())
            run(*f"ip link set {cable} master {name}-br up".split())
            run(*f"ip -n {host} address add {subnet}.{i}/24 dev eth0".split())
            run(*f"ip -n {host} link set eth0 up".split())
            run(*f"ip -n {host} link set lo up".split())

    @property
    def numbers(self) -> range:
        return range(1, self.count + 1)

    def on(self, i: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on host i, as the very same process."""
        host = f"{self.name}{i}"
        enter = [
            "ip",
            "netns",
            "exec",
            host,
            "unshare",
            "--uts",
            "--mount",
            "bash",
            "-c",
            ENTER,
        ]
        return [*enter, "bash", host, str(self.hosts_file), *command]

    def cut(self, i: int) -> None:
        """No packet comes or goes, and nobody is told: the other end of the cable is pulled."""
        run("ip", "link", "set", f"{self.name}-v{i}", "down")

    def mend(self, i: int) -> None:
        run("ip", "link", "set", f"{self.name}-v{i}", "up")

    def slow_down(self, i: int, *, megabits_per_s: float | None) -> None:
        """What others send to host i; None: no limit any more."""
        cable = [
            "tc",
            "qdisc",
            "replace" if megabits_per_s else "delete",
            "dev",
            f"{self.name}-v{i}",
            "root",
        ]
        limit = f"tbf rate {megabits_per_s}mbit burst 32kb latency 500ms".split()
        run(*cable, *(limit if megabits_per_s else []))

    def sent_bytes(self, i: int) -> int:
        """By host i since it exists, with all headers."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(run("ip", "netns", "exec", f"{self.name}{i}", "cat", path))

    def processes(self, i: int) -> dict[int, str]:
        """Process ids and command lines of what runs on host i, zombies left out."""
        found = finished(["ip", "netns", "pids", f"{self.name}{i}"], code=None)
        commands = {}
        for pid in found.stdout.split():
            with suppress(OSError):  # it has just ended
                if command := Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    commands[int(pid)] = command
        return commands

    def close(self) -> None:
        """Kill what runs on the hosts, remove them, and let other tests have theirs."""
        self._remove()
        self.lock.close()

    def _remove(self) -> None:
        for i in self.numbers:
            deadline = time.monotonic() + 10
            while (left := self.processes(i)) and time.monotonic() < deadline:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            for what in (
                ["link", "delete", f"{self.name}-v{i}"],
                ["netns", "delete", f"{self.name}{i}"],
            ):
                subprocess.run(["ip", *what], capture_output=True)
        subprocess.run(["ip", "link", "delete", f"{self.name}-br"], capture_output=True)
