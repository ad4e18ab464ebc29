"""Process group of rank r of all replica groups, which gives up a sum once the lighthouse has lost one of them.

A process that ends closes its connections, and sums with it fail at once. A machine without power and a process that is stopped
close nothing, so that a sum would wait for its time limit. Example, with a lighthouse that loses a group after 3 silent seconds:

    0 s  group 1 falls silent; group 0 waits for its part of a sum
    2 s  group 0 begins to read the lighthouse's page, once a second
    3 s  the lighthouse marks group 1 on its page
    4 s  group 0 gives up the sum: the step does not commit, and the next quorum is without group 1

A process that goes on after it was stopped reads on the page that the others have a newer quorum, and gives up in the same way.
torchft's lighthouse has no other way to ask who lives than its page for people.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin
from urllib.request import ProxyHandler, build_opener

import torch
import torch.distributed as dist

from titan.parallel.torch_compat import gloo_options

_CONNECT_S = 10  # how long groups take to connect
_PATIENCE_S = 2  # of a wait before the lighthouse is asked
_TICK_S = 1.0
_MOST_PAGE_BYTES = 2**22
_HEARTBEAT = re.compile(r'class="heartbeat\s+(old)?\s*">\s*(\S+): seen ')
_OPENER = build_opener(ProxyHandler({}))  # the lighthouse is near, whatever http_proxy says
_QUORUM = re.compile(r"Current quorum_id: (\d+)")


# torchft's class, which is imported for a run in groups only, comes after this one in the order of `super()`.
_Base: Any = object


class SumGivenUp(RuntimeError):
    """A sum that some group will not take part in. The message names the group."""


def read_page(address: str) -> str:
    """Return the lighthouse's page about the groups, or an empty text if it does not come."""
    url, failures = urljoin(address, "/status"), (OSError, HTTPException, ValueError)
    with suppress(*failures), _OPENER.open(url, timeout=_PATIENCE_S) as page:
        return page.read(_MOST_PAGE_BYTES).decode(errors="replace")
    return ""


def why_given_up(page: str, members: list[str], *, own: str, quorum: int) -> str:
    """Return why a sum will not come, in words, or an empty text if all groups of its quorum may still take part.

    Args:
        page: the lighthouse's page.
        members: the replica ids of the quorum.
        own: the replica id of this group.
        quorum: the number of the quorum.
    """
    if has_newer(page, quorum):
        return "the others have gone on"
    is_old = {name: bool(old) for old, name in _HEARTBEAT.findall(page)}
    if is_old.get(own, True):  # the lighthouse does not hear this group either
        return ""
    silent = [group_name(member) for member in members if is_old.get(member)]
    return f"{' and '.join(silent)} fell silent" if silent else ""


def has_newer(page: str, quorum: int) -> bool:
    """Return whether the lighthouse has made a newer quorum."""
    newest = _QUORUM.search(page)
    return newest is not None and int(newest[1]) > quorum


def group_name(member: str) -> str:
    """Return a group's name, such as group-1, without what torchft adds to it at each start."""
    return member.partition(":")[0]


class _Linked(_Base):
    """What titan adds to torchft's process groups; `connect_groups` makes the class with both.

    Attributes:
        host: address by which other groups reach this rank.
        lighthouse: function that returns the lighthouse's address.
        control: a gloo group for the groups' status.
        member: this group's replica id, of torchft. The caller sets it.
        members: the replica ids of the groups in the newest quorum.
        num_failed: how many quorums of these members in a row have failed to connect.
        has_joined: whether this group has trained with the others. It tells them.
        has_veterans: whether another group of the quorum has.
        given_up: operations that still run, with their groups. gloo cannot end one, and its group's destructor would wait.
    """

    def __init__(
        self, device: torch.device, timeout: timedelta, host: str, lighthouse: Callable[[], str]
    ) -> None:
        super().__init__(timeout)
        self.device, self.limit, self.host, self.lighthouse = device, timeout, host, lighthouse
        self.connect_limit = min(timeout, timedelta(seconds=_CONNECT_S))
        self.control: Any = None
        self.member, self.attempt = "", ""
        self.members: list[str] = []
        self.has_joined = self.has_veterans = False
        self.num_failed = self.quorum = 0
        self.gathered_s = 0.0
        self.given_up: list[tuple[Any, Any]] = []

    def get_reconfigure_handle(self) -> str:
        # torchft's own has this machine's name, which others may not know.
        if self._rendezvous_store is None:
            self._rendezvous_store = dist.TCPStore(self.host, 0, is_master=True)
        handle = json.loads(super().get_reconfigure_handle())
        handle["store"] = f"{self.host}:{self._rendezvous_store.port}"
        about = {"member": self.member, "has_joined": self.has_joined}
        return json.dumps(handle | about | {"attempt": time.time_ns()})

    def reconfigure(self, opts: Any) -> Any:
        handles = [json.loads(handle) for handle in opts.handles]
        # A quorum's number may come again, and its keys are still in the store.
        self.attempt, self.control = str(handles[0]["attempt"]), None
        others = [each for each in handles if each["member"] != self.member]
        self.has_veterans = any(each["has_joined"] for each in others)
        members = [each["member"] for each in handles]
        # Counted before it is tried, for it may fail.
        self.num_failed = 1 + (self.num_failed if members == self.members else 0)
        self.members, self.quorum = members, opts.uuid
        self.given_up = [each for each in self.given_up if not each[1].is_completed()]
        # A group that does not come must not hold the others for long.
        self.set_timeout(self.connect_limit)
        try:
            done = super().reconfigure(opts)
        finally:
            self.set_timeout(self.limit)
        self.num_failed = 0
        return done

    def gloo(self, name: str, store: Any, rank: int, world_size: int) -> Any:
        """Return a gloo group of one rank of each group."""
        address = "" if "GLOO_SOCKET_IFNAME" in os.environ else self.host
        options = gloo_options(self.connect_limit, host=address)
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, world_size, options)
        group._set_default_timeout(self.limit)
        return group

    def gather(self, rows: torch.Tensor) -> None:
        """Sum rows of the groups' status, each of which one group has filled."""
        control, self.gathered_s = self.control, time.monotonic()
        _Watched(self, control, control.allreduce([rows], dist.AllreduceOptions())).wait()

    def require_current(self) -> None:
        """Check that no newer quorum has repeated the step that was begun with `gather`.

        A process that was stopped may find that its sums are complete, since gloo has gone on in the others, which gave them up.
        While the lighthouse hears this group, it makes no quorum without it.

        Raises:
            SumGivenUp: There is a newer quorum, or the lighthouse does not hear this group.
        """
        if time.monotonic() - self.gathered_s < _PATIENCE_S:
            return
        for _ in range(30):
            page = read_page(self.lighthouse())
            if has_newer(page, self.quorum):
                raise SumGivenUp("the others have gone on")
            if not page or ("", self.member) in _HEARTBEAT.findall(page):
                return
            time.sleep(0.1)
        raise SumGivenUp("the lighthouse does not hear this group")

    def await_device(self) -> None:
        """Wait for the sums that the device still has to do."""
        if self.device.type == "cpu":
            return
        event = torch.accelerator.current_stream().record_event()
        try:
            self.watch(lambda: event.query() or time.sleep(0.001) or False)
        except SumGivenUp:
            self.abort()  # NCCL ends its kernels
            raise

    def watch(self, wait: Callable[[], bool]) -> None:
        """Call `wait`, which returns whether an operation is done, until it is or the lighthouse has lost a group.

        Raises:
            SumGivenUp: A group will not take part.
        """
        looks_s = time.monotonic() + _PATIENCE_S
        while not wait():
            if (now_s := time.monotonic()) < looks_s:
                continue
            page = read_page(self.lighthouse())
            if why := why_given_up(page, self.members, own=self.member, quorum=self.quorum):
                raise SumGivenUp(why)
            looks_s = now_s + _TICK_S


def connect_groups(
    device: torch.device, timeout: timedelta, *, host: str, lighthouse: Callable[[], str]
) -> Any:
    """Return torchft's process group of the same ranks of all groups, with the attributes of `_Linked`.

    Args:
        device: device of this rank.
        timeout: time limit of a sum.
        host: address by which other groups reach this rank.
        lighthouse: function that returns the lighthouse's address.
    """
    from torchft import ProcessGroupGloo, ProcessGroupNCCL

    kind: Any = ProcessGroupGloo if device.type == "cpu" else ProcessGroupNCCL

    class Group(_Linked, kind):
        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            store = dist.PrefixStore(self.attempt, store)
            self.control = self.gloo("control", store, rank, world_size)
            if kind is ProcessGroupGloo:
                return self.gloo("sums", store, rank, world_size)
            return super()._create_pg(store, rank, world_size)

        def _wrap_work(self, work: Any, opts: Any) -> Any:
            if kind is ProcessGroupGloo:
                return _Watched(self, self._pg, work)
            return super()._wrap_work(work, opts)

    return Group(device, timeout, host, lighthouse)


@dataclass(eq=False)
class _Watched:
    """An operation of gloo that is given up when the lighthouse has lost a group."""

    _group: Any
    _of_group: Any
    _work: Any

    def wait(self, timeout: timedelta | None = None) -> bool:
        def ended() -> bool:
            with suppress(RuntimeError):  # "timed out", or its own error, which is raised below
                self._work.wait(timedelta(seconds=_TICK_S))
            return self._work.is_completed()

        try:
            self._group.watch(ended)
        except SumGivenUp:
            self._group.given_up.append((self._of_group, self._work))
            raise
        return self._work.wait()

    def get_future(self) -> Any:
        return self._work.get_future()
