"""Train in replica groups that come and go, on torchft (pytorch.org/torchft): the groups of a step, their sums, and healing.

A replica group is a separate run: processes, a process group, a layout. The lighthouse knows which groups live. Before each
step, the groups that live make a quorum, and torchft connects rank r of each group with rank r of the others. A group that is
behind gets weights, optimizer and counters from a peer's memory.

    begin   the quorum of the next step; heals this group if it is behind
    sum_    a sum over the groups; after an error it does nothing, and the step does not count
    commit  whether the step counts, the same on all ranks of a group

torchft's manager listens on every interface, on random ports (docs/security.md). The state that heals a group is read without
unpickling.
"""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.config.schema import FaultToleranceSection
from titan.untrusted import InputError

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's name
T = TypeVar("T")
_RETRY_S = 5  # how long a quorum is waited for at a time
_BUCKET_ELEMENTS = 2**24
_MOST_BYTES = 2**16  # of what a group tells the others


class ReplicaGroups:
    """Hold this rank's connection to the same rank of the other groups.

    rank, size: of this group among those of the current step. has_healed: `begin` got a peer's state. manager: torchft's.
    """

    def __init__(
        self,
        section: FaultToleranceSection,
        *,
        device: torch.device,
        state: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """Connect. Raises InputError without torchft.

        Args:
            state, load: what heals a group: JSON and plain tensors of this rank.
        """
        try:
            from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
        except ImportError:
            raise InputError(
                "fault_tolerance.enable needs torchft: pip install 'titan-pretrain[elastic]'"
            ) from None
        for name in ("torchft", "torchft.manager", "torchft_quorums", "torchft_commits"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.device, self._load = device, load
        self.has_healed, self._quorum_id = False, -1
        self._min_replicas = section.min_replicas
        self._name = f"group-{section.replica_id}"
        kind = ProcessGroupGloo if device.type == "cpu" else ProcessGroupNCCL
        timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        # Ranks of one machine need no other address.
        ranks = os.environ.get("WORLD_SIZE", "1")
        is_local = os.environ.get("LOCAL_WORLD_SIZE", ranks) == ranks
        host = "127.0.0.1" if is_local else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._transport = _transport("127.0.0.1" if is_local else "0.0.0.0", timeout)
        self.group = kind(timeout)
        self._store, port = _store(host)
        self.manager: Any = Manager(
            pg=self.group,
            load_state_dict=self._take,  # pyright: ignore[reportArgumentType]
            state_dict=state,
            min_replica_size=section.min_replicas,
            use_async_quorum=False,  # a step's groups are known before its samples are
            timeout=timeout,
            connect_timeout=timedelta(seconds=_RETRY_S),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=host,
            store_port=port,
            lighthouse_addr=section.lighthouse or os.environ.get(LIGHTHOUSE),
            replica_id=self._name,
            hostname=host,
            checkpoint_transport=self._transport,
            init_sync=False,  # weights come from the seed, or all groups load one checkpoint
        )

        self._start_quorum = self.manager.start_quorum

    @property
    def rank(self) -> int:
        return self.manager.participating_rank() or 0

    @property
    def size(self) -> int:
        return self.manager.num_participants()

    def at(self, step: int) -> None:
        """Set the number of steps that this group has done."""
        self.manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin(
        self, *, step: int, text: str, waiting: Callable[[str], None]
    ) -> list[tuple[str, str]]:
        """Wait until enough groups live, and heal this one if it is behind.

        Returns the names and the texts of groups that came before this one if the groups are others than before, else nothing.

        Args:
            step: steps that this group has done.
            text: what the others get from this group, below 64 KiB.
            waiting: called with the reason, on all ranks, each time that a quorum has not come within seconds.
        """
        self.at(step)
        while True:
            self.has_healed, reason = False, ""
            try:
                self._start_quorum(timeout=timedelta(seconds=_RETRY_S))
            except TimeoutError:
                reason = "there are fewer, or one is busy"
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
            if reason:
                self.manager._quorum_future = None  # or the next one would raise this again
            elif error := self.manager.errored():
                reason = f"one was lost ({str(error.original_exception).splitlines()[0]})"
            elif self.size < self._min_replicas:  # the lighthouse may be content with fewer
                reason = f"there are {self.size}"
                time.sleep(1)
            texts: list[tuple[str, str]] = []
            if not reason and self.manager._quorum_id != self._quorum_id:
                texts = self._exchange(text)
                if self.manager.errored():
                    reason = "one was lost"
            # Ranks may differ by the moment at which each gave up.
            failed = torch.tensor([float(bool(reason))], device=self.device)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
            if not failed.item():
                self._quorum_id = self.manager._quorum_id
                return texts
            # Other groups may already sum by this quorum: the next one must connect all again, or sums of two attempts would meet.
            self.manager._commit_failures += 1
            waiting(reason or "another rank of this group has no quorum")

    def _exchange(self, text: str) -> list[tuple[str, str]]:
        """Return the names and the texts of the groups before this one."""
        mine = json.dumps([self._name, text]).encode()
        # Rows of one group are zero in the others', so that a sum gathers them.
        rows = torch.zeros(self.size, _MOST_BYTES, dtype=torch.uint8, device=self.device)
        rows[self.rank, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.sum_([rows])
        if self.manager.errored():
            return []
        sent = [bytes(row.tolist()).rstrip(b"\0") for row in rows[: self.rank].cpu()]
        return [tuple(json.loads(row)) for row in sent if row]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the groups, in place, in buckets of one dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (t.to_local() if isinstance(t, DTensor) else t for t in tensors):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for bucket in (b for same in by_dtype.values() for b in in_buckets(same, Tensor.numel)):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self.manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def commit(self) -> bool:
        """Return whether the step counts: no group was lost in it."""
        return self.manager.should_commit()

    def close(self) -> None:
        """Leave the groups."""
        self.manager.shutdown(wait=False)
        self.group.shutdown()

    def _take(self, state: dict[str, Any]) -> None:
        self.has_healed = True
        self._load(state)


def in_buckets(items: Iterable[T], num_elements: Callable[[T], int]) -> list[list[T]]:
    """Return tensors, or what stands for them, as lists that are summed together."""
    buckets: list[list[T]] = [[]]
    for item in items:
        if sum(map(num_elements, buckets[-1])) > _BUCKET_ELEMENTS:
            buckets.append([])
        buckets[-1].append(item)
    return buckets


def in_fragments(units: Sequence[T], count: int) -> list[Sequence[T]]:
    """Return the units of a model in `count` runs of about the same length, which meet by turns."""
    ends = [len(units) * number // count for number in range(count + 1)]
    return [units[a:b] for a, b in pairwise(ends)]


def _store(host: str) -> tuple[Any, int]:
    """Return a store of this group's ranks, in which torchft keeps addresses, and its port."""
    store = dist.TCPStore(host, 0, is_master=True) if dist.get_rank() == 0 else None
    found = [store.port if store is not None else 0]
    dist.broadcast_object_list(found, src=0)
    return store, found[0]


def _transport(host: str, timeout: timedelta) -> Any:
    """Return what hands this rank's state to a peer, over HTTP on `host`."""
    from torchft.checkpointing import CheckpointTransport

    class Transport(CheckpointTransport[dict[str, Any]]):
        """Serve a copy of the state at a secret address; read one without unpickling."""

        def __init__(self) -> None:
            served: dict[str, bytes] = {}

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    content = served.get(self.path)
                    self.send_response(404 if content is None else 200)
                    self.end_headers()
                    self.wfile.write(content or b"")

                def log_message(self, *_: Any) -> None: ...

            self._served, self._secret = served, secrets.token_urlsafe(16)
            self._server = ThreadingHTTPServer((host, 0), Handler)
            Thread(target=self._server.serve_forever, name="titan-healing", daemon=True).start()

        def metadata(self) -> str:
            import socket

            name = "127.0.0.1" if host == "127.0.0.1" else socket.gethostname()
            return f"http://{name}:{self._server.server_port}/{self._secret}/"

        def send_checkpoint(
            self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
        ) -> None:
            torch.save(state_dict, file := io.BytesIO())
            self._served[f"/{self._secret}/{step}"] = file.getvalue()

        def disallow_checkpoint(self) -> None:
            self._served.clear()  # whoever reads has a reference

        def recv_checkpoint(
            self, src_rank: int, metadata: str, step: int, timeout: timedelta
        ) -> dict[str, Any]:
            ends_s = time.monotonic() + timeout.total_seconds()
            while True:  # the peer may still be copying
                try:
                    with urllib.request.urlopen(metadata + str(step), timeout=10) as file:
                        content = io.BytesIO(file.read())
                    return torch.load(content, weights_only=True, map_location="cpu")
                except urllib.error.HTTPError:  # noqa: PERF203
                    if time.monotonic() > ends_s:
                        raise
                    time.sleep(0.1)

        def shutdown(self, wait: bool = True) -> None:
            self._server.shutdown()

    return Transport()
