"""A rank's state over a socket: every kind of tensor comes as it is, and who does not know the secret gets nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from titan.contrib.elastic import healing
from titan.contrib.elastic.healing import Healing

STATE: dict[str, Any] = {
    "default": {
        "tensors": {
            "matrix": torch.randn(300, 200),
            "columns": torch.randn(30, 20).t(),
            "part": torch.arange(100)[3:50:2],
            "bf16": torch.randn(7, 3).bfloat16(),
            "flag": torch.tensor([True, False]),
            "step": torch.tensor(3.0),
            "none": torch.zeros(0, 4),
            "weight": torch.nn.Parameter(torch.randn(5)),
        },
        "metadata": "{}",
    },
    "more": {"state": {0: {"momentum_buffer": torch.randn(4)}}, "lr": 0.7, "order": [1, None]},
}
LIMIT = timedelta(seconds=10)


@pytest.fixture
def peer() -> Iterator[Healing]:
    made = Healing("127.0.0.1", device=torch.device("cpu"), limit_s=3, state=lambda: STATE)
    yield made
    made.shutdown()


def test_every_tensor_comes_as_it_is(peer: Healing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "_CHUNK_BYTES", 1000)
    peer.send_checkpoint([1], 7, None, LIMIT)
    peer.recv_checkpoint(0, peer.metadata(), 7, LIMIT)  # from itself
    found = peer.receive(lambda: None)
    mine, form = tree_flatten(STATE)
    theirs, their_form = tree_flatten(found)
    assert form == their_form
    for a, b in zip(mine, theirs, strict=True):
        assert (
            (a.dtype == b.dtype and torch.equal(a, b))
            if isinstance(a, torch.Tensor)
            else a == b
        )


def test_a_transfer_ends_with_its_limit_or_with_the_meeting(peer: Healing) -> None:
    peer.recv_checkpoint(0, peer.metadata(), 7, LIMIT)  # the peer is at no step
    with pytest.raises(OSError, match="healing_timeout_seconds = 3"):
        peer.receive(lambda: None)

    def tick() -> None:
        raise LookupError("the meeting has ended")

    with pytest.raises(LookupError):
        peer.receive(tick)


@pytest.mark.parametrize("asked", [b"guess/7\n", b"\xff\xfe\n", b"/7\n", b"x" * 200])
def test_without_the_secret_nothing_comes(peer: Healing, asked: bytes) -> None:
    peer.send_checkpoint([1], 7, None, LIMIT)
    host, _, port = peer.metadata().partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(asked)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
