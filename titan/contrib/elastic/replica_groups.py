"""Connection of replica groups on torchft (pytorch.org/torchft): the groups of a step, their sums, and healing.

A replica group is a separate run: processes, a process group, a layout. The lighthouse knows which groups live. Before each
step, the groups that live make a quorum, and torchft connects rank r of each group with rank r of the others. A group that is
behind gets weights, optimizer and counters from a peer's memory.

    begin   makes the quorum of the next step, and heals this group if it is behind (healing.py)
    sum_    sums tensors over the groups; after an error it does nothing, and the step does not commit
    agree   compares what groups tell each other about a step, such as its first sample
    commit  returns whether the step commits, the same on all ranks of a group

Example: groups 0, 1, 2 have `rank` 0, 1, 2 and `size` 3. Group 1 is lost while gradients are summed: `sum_` fails in groups
0 and 2, and their `commit` returns False. Their next `begin` makes a quorum of two, in which group 0 has rank 0, group 2 has
rank 1, and `size` is 2. membership.py shows which samples each group gets before and after.

A group that must give way, because it differs or cannot be reached, raises GroupLeaves. Groups that trained before stay, and
among equals the one with the lowest rank.

torchft's manager listens on every interface, on random ports (docs/cluster.md). The state that heals a group is read without
unpickling.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from titan.base.untrusted import InputError
from titan.optim.states import local

from .agreement import MOST_APART, GroupLeaves, apart, require_same_samples
from .healing import Healing
from .launch_groups import LOCAL
from .process_group import connect_groups, group_name
from .section import GroupsSection

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's name
_RETRY_S = 5  # how long a quorum is waited for at a time
_MOST_BYTES = 2**16  # of a group's name, text and status
_BUCKET_ELEMENTS = 2**24  # of a sum
_MOST_FAILURES = 2  # in a row, of a group that would join the others

# Status of a rank, a group, or all groups after a quorum. The worst status counts.
# _OURS is the failure of this group, which would join others. _APART: groups that live cannot connect, and this one ends.
_READY, _HEALING, _LOST, _OURS, _APART = range(5)


class ReplicaGroups:
    """This rank's connection to the same rank of the other groups.

    Attributes:
        manager: torchft's manager.
    """

    def __init__(
        self,
        section: GroupsSection,
        *,
        device: torch.device,
        state: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """Connect to the lighthouse.

        Args:
            section: [fault_tolerance].
            device: device of this rank.
            state: function that returns the state for healing: JSON and plain tensors of this rank.
            load: function that restores a peer's state.

        Raises:
            InputError: torchft is not installed, or no lighthouse is named.
        """
        os.environ.setdefault("RUST_LOG", "error")  # torchft reports every quorum and step
        try:
            from torchft import Manager
            from torchft.manager import REPLICA_ID_KEY
        except ImportError:
            raise InputError(
                "fault_tolerance.enable needs torchft: pip install 'titan-pretrain[elastic]'"
            ) from None
        for name in ("torchft", "torchft.manager", "torchft_quorums", "torchft_commits"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.device, self._quorum_id = device, -1
        self._num_steps = 0  # that this group has done with the others
        self._min_replicas = section.min_replicas
        self._name = f"group-{section.replica_id}"
        self._where = section.lighthouse or os.environ.get(LIGHTHOUSE, "")
        if not self._where:
            raise InputError(f"fault_tolerance.lighthouse is empty, and so is {LIGHTHOUSE}")
        timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        self._lighthouse, route = _await_lighthouse(self._where)
        host = _host(route)
        self.group = connect_groups(
            device, timeout, host=host, lighthouse=lambda: self._lighthouse
        )
        self._healing = Healing(
            host,
            device=device,
            limit_s=section.healing_timeout_seconds,
            state=lambda: whole_state()["user"],
        )
        # The manager's server is rank 0's.
        self._host, port, self._store = _store(host)
        self.manager: Any = Manager(
            pg=self.group,
            load_state_dict=load,
            state_dict=state,
            min_replica_size=section.min_replicas,
            use_async_quorum=False,  # a step's groups are known before its samples are
            timeout=timeout,
            connect_timeout=timedelta(seconds=_RETRY_S),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=self._host,
            store_port=port,
            lighthouse_addr=self._lighthouse,
            replica_id=self._name,
            hostname=self._host,
            checkpoint_transport=self._healing,  # pyrefly: ignore[bad-argument-type]
            init_sync=False,  # weights come from the seed, or all groups load one checkpoint
        )
        self.group.member = self.manager._store.get(REPLICA_ID_KEY).decode()
        # torchft would transfer states within a quorum, and all groups would wait: `_meet` does it instead.
        whole_state, self.manager._manager_state_dict = self.manager._manager_state_dict, dict
        self.manager._apply_pending_state_dict = lambda: None

    @property
    def rank(self) -> int:
        """Return this group's rank among the groups of the current step."""
        return self.manager.participating_rank() or 0

    @property
    def size(self) -> int:
        """Return the number of groups of the current step."""
        return self.manager.num_participants()

    def at(self, step: int) -> None:
        """Set the number of steps that this group has done."""
        self.manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin(
        self,
        *,
        step: int,
        text: str,
        waiting: Callable[[str], None],
        require_same: Callable[[str, str], None],
    ) -> None:
        """Wait until enough groups live, and heal this group if it is behind.

        Args:
            step: steps that this group has done.
            text: text that the other groups get from this group, below 64 KiB.
            waiting: function that is called with the reason, on all ranks, each time that a quorum has not come within seconds.
            require_same: function that is called, if the set of groups has changed, with the name and text of each group
                to which this one must give way.

        Raises:
            GroupLeaves: This group has failed to join the others twice, or to connect to them three times.
        """
        num_failures = 0
        while True:
            self.at(step)
            self._healing.disallow_checkpoint()
            code, reason = self._quorum()
            code = self._worst(code)
            if code == _READY and self.manager._quorum_id != self._quorum_id:
                code, reason = self._meet(text, require_same)
            if code == _READY:
                self._quorum_id, self.group.has_joined = self.manager._quorum_id, True
                return
            self.group.control = None  # so that no group waits for this group there
            # The next quorum connects all again, also if it has the same number: a new lighthouse counts from 1.
            self._quorum_id = self.manager._quorum_id = -1
            reason = reason or "another rank of this group has no quorum"
            num_failures += code == _OURS
            if code == _APART:
                raise apart([*map(group_name, self.group.members)], self._name, reason)
            if num_failures == _MOST_FAILURES:
                ends = f"{self._name} ends, so that the others go on; start it again"
                raise GroupLeaves(f"cannot join the other replica groups: {reason}. {ends}")
            # Other groups may already sum by this quorum. The next must connect all again, or sums of two attempts would mix.
            self.manager._commit_failures += 1
            waiting(reason)
            self._follow_lighthouse()

    def _quorum(self) -> tuple[int, str]:
        """Make the quorum of the next step and connect to its groups. Return this rank's status, and the reason."""
        try:
            self.manager.start_quorum(timeout=timedelta(seconds=_RETRY_S))
        except (TimeoutError, RuntimeError) as error:
            self.manager._quorum_future = None  # or the next quorum would raise this again
            is_late = isinstance(error, TimeoutError)
            return _LOST, "there are fewer, or one is busy" if is_late else _first_line(error)
        if error := self.manager.errored() or self.group.errored():
            reason = _first_line(getattr(error, "original_exception", error))
            if self.group.num_failed >= MOST_APART and self.rank:
                return _APART, reason
            # Groups that all begin cannot know which of them cannot connect.
            joins = self.group.has_veterans or not self.group.num_failed
            joins &= not self.group.has_joined and self.size > 1
            return _OURS if joins else _LOST, f"one was lost ({reason})"
        if self.size < self._min_replicas:  # the lighthouse may be content with fewer
            time.sleep(1)
            return _LOST, f"there are {self.size}"
        return _READY, ""

    def _meet(self, text: str, require_same: Callable[[str, str], None]) -> tuple[int, str]:
        """Exchange texts until all groups that were behind have a peer's state. Return status and reason."""

        def tick() -> None:
            if (code := self._tell(text, _HEALING)[0]) != _HEALING:
                raise _MeetingEnded(code)

        code, reason, state = _READY, "", None
        try:
            if self._healing.source:
                state = self._healing.receive(tick)
        except _MeetingEnded as end:
            return end.args[0], "one was lost"
        except Exception as error:
            code, reason = _OURS, f"a peer's state did not come ({_first_line(error)})"
        while (found := self._tell(text, code))[0] == _HEALING:
            pass  # the group that heals tells it once a second
        worst, texts, failed = found
        for name, other in texts if worst == _READY else ():
            require_same(name, other)
        if worst == _READY and state is not None:
            for key, load in self.manager._load_state_dict_fns.items():
                load(state[key])
            self._num_steps = 0
        return worst, reason or failed

    def _tell(self, text: str, code: int) -> tuple[int, list[tuple[str, str]], str]:
        """Exchange this rank's status and text with the other groups.

        Returns:
            The worst status of all groups' ranks, names and texts of the groups to which this one must give way, and the failure.
        """
        # A group that takes a peer's state gives way to all, and one that begins to those that have trained.
        standing = 0 if self._healing.source else 1 + self.group.has_joined
        message = json.dumps([self._name, text, min(code, _LOST), standing])
        mine = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        # Each group fills its own row and leaves zeros in the others, so that a sum gathers all rows.
        rows = torch.zeros(self.size, _MOST_BYTES, dtype=torch.uint8)
        rows[self.rank, : len(mine)] = mine
        found: list[tuple[str, str, int, int]] = [("one", "", _LOST, 0)]
        with suppress(RuntimeError, ValueError):  # its connections have ended
            self.group.gather(rows)
            found = [tuple(json.loads(row.numpy().tobytes().rstrip(b"\0"))) for row in rows]
        worst = self._worst(max(code, *(code for _, _, code, _ in found)))
        failed = ", ".join(name for name, _, code, _ in found if code == _LOST)
        stay = [
            (name, text)
            for rank, (name, text, _, other) in enumerate(found)
            if (other, -rank) > (standing, -self.rank)
        ]
        return worst, stay, f"{failed} was lost"

    def _worst(self, code: int) -> int:
        """Return the worst status of this group's ranks, which may have given up at different moments."""
        codes = torch.tensor([float(code)], device=self.device)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX)
        return int(codes.item())

    def _follow_lighthouse(self) -> None:
        """Reconnect to the lighthouse if its file has a new address."""
        if "://" in self._where:
            return
        from torchft._torchft import ManagerClient, ManagerServer

        found, manager, connect = (
            [self._lighthouse, ""],
            self.manager,
            timedelta(seconds=_RETRY_S),
        )
        if dist.get_rank() == 0:
            with suppress(OSError, ValueError):
                found[0] = _probe(self._where)[0]
            if found[0] != self._lighthouse:
                manager._manager.shutdown()
                manager._manager = ManagerServer(
                    replica_id=self.group.member,
                    lighthouse_addr=found[0],
                    hostname=self._host,
                    bind="[::]:0",
                    store_addr=f"{self._host}:{self._store.port}",
                    world_size=dist.get_world_size(),
                    heartbeat_interval=timedelta(milliseconds=100),
                    connect_timeout=connect,
                    quorum_retries=0,
                )
                found[1] = manager._manager.address()
        dist.broadcast_object_list(found, src=0)
        if found[0] != self._lighthouse:
            self._lighthouse = found[0]
            manager._client = ManagerClient(found[1], connect_timeout=connect)

    def agree(self, facts: dict[str, int]) -> None:
        """Compare facts about the next step with the other groups'. After an error, the step does not commit.

        Args:
            facts: numbers that must be the same in all groups, by name.

        Raises:
            GroupLeaves: This group is wrong, as `require_same_samples` decides.
        """
        rows = torch.zeros(self.size, len(facts) + 1, dtype=torch.int64)
        rows[self.rank] = torch.tensor([*facts.values(), self._num_steps])
        try:
            self.group.gather(rows)
        except RuntimeError as error:
            self.manager.report_error(error)
            return
        require_same_samples(
            [*map(group_name, self.group.members)], rows.tolist(), own=self.rank, facts=[*facts]
        )

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the groups, in place, in buckets of one dtype."""
        if (
            self.device.type != "cpu"
        ):  # a sum's time limit must not include kernels that still run
            torch.accelerator.current_stream().synchronize()
        for bucket in _in_buckets([*map(local, tensors)]):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self.manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(
                bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)]
            )
        _report_failure(self.manager, self.group.await_device)

    def commit(self) -> bool:
        """Return whether the step commits: no group was lost in it."""
        _report_failure(self.manager, self.group.require_current)
        commits = self.manager.should_commit()
        self._num_steps += commits
        return commits

    @property
    def failure(self) -> str:
        """Return why the step did not commit, if this rank knows it."""
        error = self.manager.errored()
        return _first_line(error.original_exception) if error else "another rank's sum failed"

    def close(self) -> None:
        """Leave the groups."""
        self.manager.shutdown(wait=False)
        self.group.shutdown()


class _MeetingEnded(Exception):
    """Failure of another rank or group while this rank heals. Its argument is the worst status of all groups."""


def _store(host: str) -> tuple[str, int, Any]:
    """Create a store of this group's ranks, in which torchft keeps addresses. Return host, port, and on rank 0 the store."""
    store = dist.TCPStore(host, 0, is_master=True) if dist.get_rank() == 0 else None
    found: list[Any] = [host, store.port if store is not None else 0]
    dist.broadcast_object_list(found, src=0)
    return found[0], found[1], store


def _probe(where: str) -> tuple[str, str]:
    """Return the lighthouse's address, and this machine's address on the route to it.

    Args:
        where: the lighthouse's address, or the file that contains it.

    Raises:
        OSError: Nothing listens at the address.
    """
    address = where if "://" in where else Path(where).read_text().strip()
    url = urlsplit(address)
    with socket.create_connection((url.hostname or "", url.port or 80), _RETRY_S) as probe:
        return address, probe.getsockname()[0]


def _await_lighthouse(where: str) -> tuple[str, str]:
    """Wait until the lighthouse listens, and return the result of `_probe`."""
    is_said = dist.get_rank() != 0
    while True:
        try:
            return _probe(where)
        except (OSError, ValueError) as error:  # noqa: PERF203
            if not is_said:
                print(f"waiting for the lighthouse, {where}: {error}", flush=True)
            is_said = True
            time.sleep(1)


def _host(route: str) -> str:
    """Return the address or name by which other groups reach this machine.

    Args:
        route: this machine's address on the route to the lighthouse.
    """
    if LOCAL in os.environ:
        return "127.0.0.1"
    if route.startswith("127."):  # the lighthouse is here; others come another way
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(
                ("192.0.2.1", 9)
            )  # an address of nobody (RFC 5737); this sends nothing
            route = probe.getsockname()[0]
    return socket.gethostname() if ":" in route or route.startswith("127.") else route


def _report_failure(manager: Any, wait: Callable[[], None]) -> None:
    """Call a function, and let the step not commit if it fails."""
    try:
        wait()
    except RuntimeError as error:
        manager.report_error(error)


def _first_line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line)  # gloo begins with its source file


def _in_buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Divide tensors into lists of one dtype that are summed together."""
    by_dtype = defaultdict[torch.dtype, list[list[Tensor]]](lambda: [[]])
    for tensor in tensors:
        buckets = by_dtype[tensor.dtype]
        if sum(map(Tensor.numel, buckets[-1])) > _BUCKET_ELEMENTS:
            buckets.append([])
        buckets[-1].append(tensor)
    return chain.from_iterable(by_dtype.values())
