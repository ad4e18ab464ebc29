"""Rendezvous of the launchers and ranks of a run, closed to strangers.

torchrun's own rendezvous (c10d) unpickles any value of a store that listens on every interface
without a password. titan.ops.launch and titan.ops.cluster.node use this handler instead, which
unpickles nothing:

    one machine     launcher: a store in its own memory    ranks: a file in a folder that only their user can open
    several nodes   both: a TCP store of node 0's launcher, bound to the address that the nodes were given

titan/parallel/init_distributed.py is the ranks' side. docs/cluster.md says what remains open, and
to whom.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from titan.parallel.init_distributed import STORE_FOLDER

BACKEND = "titan"
JOIN_TIMEOUT = timedelta(minutes=10)  # torchrun's own, for nodes that start one after the other


class _Rendezvous(RendezvousHandler):
    """Rendezvous of a fixed set of launchers, one per node, with ranks set from outside."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.parameters = parameters
        self.num_nodes = parameters.max_nodes
        self.rank = int(parameters.config.get("rank", 0))
        self.store: Store | None = None  # kept alive, for the ranks use it
        # Counts restarts: next_rendezvous begins the first one as 0.
        self.attempt = -1
        if self.num_nodes == 1:
            os.environ[STORE_FOLDER] = tempfile.mkdtemp(prefix="titan-")  # the ranks inherit it
            # Nobody listens there. The port distinguishes this attempt from others (titan/ops/run_lock.py).
            self.host, self.port = "127.0.0.1", 1024 + secrets.randbelow(2**15)
        else:
            # A launcher that started this one may have set it.
            os.environ.pop(STORE_FOLDER, None)
            self.host, self.port = parse_rendezvous_endpoint(parameters.endpoint, -1)
            if self.port <= 0 or not 0 <= self.rank < self.num_nodes:
                raise ValueError(
                    f"{self.num_nodes} nodes need --rdzv-endpoint=HOST:PORT and --rdzv-conf=rank=N, "
                    f"got {parameters.endpoint!r} and {self.rank}"
                )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self.num_nodes > 1

    def next_rendezvous(self) -> RendezvousInfo:
        # A store for each attempt: a restarted rank must not find the address of a dead one.
        self.attempt += 1
        port = self.port + self.attempt
        self.store = HashStore() if self.num_nodes == 1 else self._open_tcp_store(port)
        info = RendezvousStoreInfo(self.host, port)
        # Keys of two runs at the same address differ by the run's id.
        store = PrefixStore(self.parameters.run_id, self.store)
        return RendezvousInfo(store, self.rank, self.num_nodes, info)

    def _open_tcp_store(self, port: int) -> Store:
        listening: dict[str, Any] = {}
        if self.rank == 0:
            # torch would listen on every interface (docs/architecture.md).
            listening["master_listen_fd"] = listen(self.host, port).detach()
        return TCPStore(
            self.host,
            port,
            is_master=self.rank == 0,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            **listening,
        )

    # torchrun asks for these to add and remove nodes while it runs. Here their number is fixed.
    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.parameters.run_id

    def shutdown(self) -> bool:
        if folder := os.environ.pop(STORE_FOLDER, None):
            shutil.rmtree(folder, ignore_errors=True)
        return True


def register() -> None:
    """Register this handler with torchrun, as --rdzv-backend=titan."""
    with suppress(ValueError):  # registered already
        rendezvous_handler_registry.register(BACKEND, _Rendezvous)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens only on the address of `host`.

    A host that resolves its own name to 127.0.1.1, as with Debian's /etc/hosts, must still be
    reachable from others: then the socket listens on all interfaces.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    ip = str(address[0])
    if ip == "::1" or ip.startswith("127."):
        if socket.has_dualstack_ipv6():  # others may know the host by either kind of address
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    return socket.create_server((ip, port), family=family)
