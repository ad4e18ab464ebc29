"""Transfer of a rank's state to the same rank of another replica group, tensor by tensor.

    receiver -> peer     SECRET/STEP and a line break
    peer -> receiver     8 bytes: length of the header; the header: the state with tensors that have a shape and a dtype only;
                         the bytes of each tensor

replica_groups.py calls it. Neither side holds a second copy: the peer sends the tensors that it trains, which do not change
before all groups continue. The receiver reads the header without unpickling.
"""

from __future__ import annotations

import io
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from titan.optim.states import local

_CHUNK_BYTES = 2**24
_MOST_HEADER_BYTES = 2**30
_CONNECT_S = 4  # below the 5 seconds that a quorum is waited for
_TICK_S = 1


class Healing:
    """torchft's checkpoint transport between replica groups.

    During a quorum it only records which rank sends and which rank needs the state: a transfer
    would make all groups wait for each other's quorum.

    Attributes:
        limit_s: time limit of a transfer, in seconds.
        source: address of the state after a quorum. Empty if this rank has the state.
    """

    def __init__(
        self,
        host: str,
        *,
        device: torch.device,
        limit_s: float,
        state: Callable[[], Any],
    ) -> None:
        """Open the server that sends this rank's state.

        Args:
            host: address by which other ranks reach this rank. Only this machine reaches
                127.0.0.1.
            device: device of the state.
            limit_s: time limit of a transfer, in seconds.
            state: function that returns the state. It is called for each transfer, in a thread.
        """
        self.limit_s, self.source, self._served = limit_s, "", ""
        self._secret = secrets.token_urlsafe(16)
        healing = self

        class Handler(StreamRequestHandler):
            timeout = _CONNECT_S  # for the request

            def handle(self) -> None:
                with suppress(OSError):  # the peer has ended, or given up
                    asked = self.rfile.readline(100).strip()
                    if secrets.compare_digest(
                        asked.partition(b"/")[0], healing._secret.encode()
                    ):
                        self._answer(asked.decode())

            def _answer(self, asked: str) -> None:
                ends_s = time.monotonic() + limit_s
                while healing._served != asked:  # the peer may have its quorum earlier
                    if time.monotonic() > ends_s:
                        return
                    time.sleep(0.05)
                if device.type != "cpu":
                    torch.accelerator.set_device_index(device)
                self.connection.settimeout(limit_s)
                _send(self.connection, state(), goes_on=lambda: healing._served == asked)

        listening = host if host == "127.0.0.1" else ""
        self._server = ThreadingTCPServer((listening, 0), Handler)
        self._server.daemon_threads = True
        self._address = f"{host}:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, name="titan-healing", daemon=True).start()

    def metadata(self) -> str:
        """Return the address and the secret of this rank's server."""
        return f"{self._address}/{self._secret}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Allow the transfer of a step's state, which the peer then requests."""
        self._served = f"{self._secret}/{step}"

    def disallow_checkpoint(self) -> None:
        """End the transfers under way."""
        self._served = self.source = ""

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Record where the state comes from, for `receive`, and return torchft's own state only."""
        self.source = f"{metadata}/{step}"
        return {"torchft": {"step": step, "batches_committed": 0}}

    def receive(self, tick: Callable[[], None]) -> Any:
        """Receive the state from `source`, on the host.

        Args:
            tick: function that is called once a second during the transfer. Its exception ends the transfer.

        Returns:
            The peer's state, with tensors on the CPU.

        Raises:
            OSError: The state does not come, or takes longer than `limit_s`.
        """
        address, _, asked = self.source.partition("/")
        host, _, port = address.rpartition(":")
        ends_s = time.monotonic() + self.limit_s
        tick_s = time.monotonic() + _TICK_S

        def fill(view: memoryview) -> None:
            nonlocal tick_s
            while view:
                with suppress(TimeoutError):
                    count = peer.recv_into(view[:_CHUNK_BYTES])
                    if not count:
                        raise ConnectionError("the peer has stopped sending its state")
                    view = view[count:]
                now_s = time.monotonic()
                if now_s > ends_s:
                    limit = f"fault_tolerance.healing_timeout_seconds = {self.limit_s:g}"
                    raise OSError(f"the peer's state has not come within {limit}")
                if now_s > tick_s:
                    tick()
                    tick_s = time.monotonic() + _TICK_S

        with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as peer:
            peer.settimeout(_TICK_S)
            peer.sendall(f"{asked}\n".encode())
            fill(memoryview(length := bytearray(8)))
            if (size := int.from_bytes(length, "big")) > _MOST_HEADER_BYTES:
                raise OSError(f"the peer's state has a header of {size} bytes")
            fill(memoryview(header := bytearray(size)))
            state = _empty(torch.load(io.BytesIO(header), weights_only=True), "cpu")
            for tensor in _tensors(state):
                fill(_bytes(tensor).numpy().data)
        return state

    def shutdown(self, wait: bool = True) -> None:
        """End the server."""
        self._server.shutdown()


def _send(peer: socket.socket, state: Any, *, goes_on: Callable[[], bool]) -> None:
    torch.save(_empty(state, "meta"), header := io.BytesIO())
    peer.sendall(len(header.getbuffer()).to_bytes(8, "big") + header.getbuffer())
    for tensor in _tensors(state):
        for chunk in _bytes(tensor).split(_CHUNK_BYTES):
            if not goes_on():
                return
            peer.sendall(chunk.cpu().numpy().data)


def _empty(state: Any, device: str) -> Any:
    """Return the state with new contiguous tensors of the same shapes."""
    return tree_map_only(
        Tensor,
        lambda tensor: torch.empty_like(
            tensor, device=device, memory_format=torch.contiguous_format
        ),
        state,
    )


def _tensors(state: Any) -> list[Tensor]:
    """Return the tensors that have elements. A DTensor is replaced by this rank's shard."""
    tensors = [local(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.numel()]


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
