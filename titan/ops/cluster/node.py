"""torchrun on one node of a cluster, safe to signal.

    python -m titan.ops.cluster.node TORCHRUN-OPTIONS -m titan.train JOB.toml

Schedulers signal every process of a job (Slurm) or only the first one (Kubernetes). SIGUSR1 would
end torchrun, and torchrun kills its ranks 30 seconds after SIGTERM. Here the ranks handle both
signals: they finish their step, save, and exit with 75 (titan/base/signals.py). torchrun waits
for them without a limit.

    exit code   meaning
    0, 2, 75    the ranks' exit code, if they agree; 75 also if SIGUSR1 came before there were ranks
    143         SIGTERM came before there were ranks
    1           any other end, for which the file TITAN_BAD_EXIT is made, if the variable is set. This includes ranks that have ended while torchrun waits for a store whose host is gone:
                TCP alone would wait for a quarter of an hour

`prepare_host` first corrects unsuitable settings of a login shell or an image: limits, the
interface of gloo, the compile cache.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from titan.base.signals import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from titan.ops.launch import ranks_of, torchrun

LEFT_TO_RANKS = (signal.SIGTERM, signal.SIGUSR1)
LINGER_S = 30.0  # seconds without an answer of the store's host after the ranks have ended
# Files and sockets that a process may need: checkpoints, loaders, a peer for each rank.
_NUM_FILES = 65_536
_LOCKED = "set LimitMEMLOCK=infinity for slurmd, or the container's runtime (ulimit -l)"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
# Test addresses (RFC 5737). A datagram's socket finds the route there, and nothing is sent.
_OUTSIDE = "192.0.2.1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a job. Return the exit code."""
    for number in LEFT_TO_RANKS:
        signal.signal(number, _pass_on)
    # torchrun installs handlers over ours when it starts the ranks: these are the signals that it may handle.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")
    # Otherwise a restarted rank may find the address that a dead rank left in the agent's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    store = store_address(arguments)
    prepare_host(store[0] if store and "--nnodes=1" not in arguments else None)
    if store:
        threading.Thread(target=_end_with_store, args=store, name="store", daemon=True).start()
    # The first node hosts the store. torchrun would guess by comparing addresses.
    if (number := os.environ.get("SLURM_NODEID")) is not None:
        is_first = int(number == "0")
        arguments.insert(0, f"--rdzv-conf=rank={number},is_host={is_first}")
    return torchrun(arguments)


def prepare_host(head: str | None) -> None:
    """Set limits, and the environment of NCCL, gloo and inductor. Variables that the user has set stay.

    Args:
        head: host of the rendezvous; None: there is one node.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _NUM_FILES)), hard))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked, locked))
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        _warn(
            f"a process may lock {locked >> 10} KiB of memory, too little for InfiniBand: {_LOCKED}"
        )
    if head and "GLOO_SOCKET_IFNAME" not in os.environ and _is_loopback(socket.gethostname()):
        # Debian and Ubuntu map a host to 127.0.1.1 in its own /etc/hosts, and gloo would send that address to others.
        others = os.environ.get("TITAN_NODES", "").split()
        name = next(filter(None, map(interface_to, (head, *others, _OUTSIDE))), "")
        os.environ |= {"GLOO_SOCKET_IFNAME": name} if name else {}
        use = f"gloo uses {name}" if name else "no interface leads out, so ranks may hang"
        _warn(f"its own name means 127.0.0.1 here; {use} (GLOO_SOCKET_IFNAME)")
    # A container's /tmp is gone when the job is requeued, perhaps to other nodes. So the folder belongs to the node's number.
    if folder := os.environ.get("TITAN_COMPILE_FOLDER"):
        place = f"{folder}/node-{os.environ.get('SLURM_NODEID', 0)}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", place)


def interface_to(host: str) -> str:
    """Return the name of the network interface that leads to a host.

    It is empty if the host is unknown, or is this host itself as 127.0.0.1.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                row = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(row[20:24]) == source and name != "lo":
                    return name
    return ""


def _is_loopback(host: str) -> bool:
    """Return whether one of a host's addresses is a loopback address; gloo takes the first that it can bind."""
    try:
        return any(a.startswith("127.") for a in socket.gethostbyname_ex(host)[2])
    except OSError:
        return True


def _warn(text: str) -> None:
    print(f"titan: {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Pass a signal on to the ranks. They may have it already, and count no signal twice."""
    ranks = ranks_of(os.getpid())
    for rank in ranks:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(rank, number)
    # Before there are ranks, there is nothing to save.
    if not ranks and not _seen_ranks.is_set():
        os._exit(EXIT_STOPPED if number == signal.SIGUSR1 else 128 + number)


_seen_ranks = threading.Event()


def _end_with_store(host: str, port: int) -> None:
    """End this process when its ranks have ended and the store's host has not answered for LINGER_S since."""
    last_good_s = time.monotonic()
    # Before there are ranks, torchrun waits for other nodes, with its own limit.
    while not _seen_ranks.is_set() or time.monotonic() - last_good_s < LINGER_S:
        # Once a second: are there ranks, and if they have ended, does the store's host answer?
        if ranks_of(os.getpid()):
            _seen_ranks.set()
            last_good_s = time.monotonic()
        elif _seen_ranks.is_set():
            with suppress(OSError), socket.create_connection((host, port), timeout=5):
                last_good_s = time.monotonic()
        # Signals still interrupt the main thread, and a second is short compared with LINGER_S.
        time.sleep(1)
    _warn(f"all ranks of this node have ended, and {host} does not answer: given up")
    _end(EXIT_FAILED)


def _end(code: int) -> NoReturn:
    """End this process. train.sbatch learns of an error here: srun tells it when all nodes have ended."""
    mark = os.environ.get("TITAN_BAD_EXIT")
    if mark and code not in (EXIT_DONE, EXIT_USER_ERROR, EXIT_STOPPED):
        with suppress(OSError):
            Path(mark).touch()
    os._exit(code)


def store_address(arguments: Sequence[str]) -> tuple[str, int] | None:
    """Return host and port of torchrun's rendezvous, or None if no option names them."""
    # torchrun takes each option from PET_ variables too; the command line wins.
    endpoint = os.environ.get("PET_RDZV_ENDPOINT", "")
    for word in arguments:
        if word.startswith("--rdzv-endpoint="):
            endpoint = word.partition("=")[2]
    if not endpoint and "PET_MASTER_ADDR" in os.environ:
        endpoint = "{PET_MASTER_ADDR}:{PET_MASTER_PORT}".format(**os.environ)
    host, _, port = endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # An interpreter that shuts down removes its handlers, and a signal would then change the exit code.
    _end(code)
