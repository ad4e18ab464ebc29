"""Binding to the cores beside a GPU, with a folder in the place of /sys."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import job
from titan.parallel import numa
from titan.parallel.init_distributed import start_process_group
from titan.parallel.numa import bind_threads, node_cores

ADDRESS = "0001:c1:00.0"
pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="only Linux binds threads"
)


def host(folder: Path, *, node: str, cores: str) -> Path:
    """A /sys with one device, and node 1 with these cores."""
    for name, text in (
        (f"bus/pci/devices/{ADDRESS}/numa_node", node),
        ("devices/system/node/node1/cpulist", cores),
    ):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("node", "cores", "expected"),
    [
        ("1", "0-2,8-9", {0, 1, 2, 8, 9}),
        ("1", "5", {5}),
        ("-1", "0-2", set()),  # a host without nodes
        ("0", "0-2", set()),  # no such node
        ("1", "", set()),  # memory only
        ("?", "0-2", set()),
    ],
)
def test_cores_of_a_device(tmp_path: Path, node: str, cores: str, expected: set[int]) -> None:
    system = host(tmp_path, node=node, cores=cores)
    assert node_cores(ADDRESS, system=system) == expected
    assert node_cores("0000:00:00.0", system=system) == set()


def threads() -> list[int]:
    return [int(folder.name) for folder in Path("/proc/self/task").iterdir()]


@pytest.fixture
def two_threads() -> Iterator[int]:
    """Yield the id of a second thread; all threads get their cores back."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    over = threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)
    other.start()
    assert other.native_id is not None
    yield other.native_id
    for thread in threads():
        os.sched_setaffinity(thread, before)
    over.set()
    other.join()


def test_each_thread_keeps_the_cores_of_the_node_that_it_may_use(two_threads: int) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    bind_threads({10_000})  # this host has no such core: nothing changes
    assert {first, second} <= os.sched_getaffinity(two_threads)
    os.sched_setaffinity(two_threads, {second})
    bind_threads({first, 10_000})
    found = {thread: os.sched_getaffinity(thread) for thread in threads()}
    assert found.pop(two_threads) == {second}  # already bound elsewhere
    assert all(cores == {first} for cores in found.values())


@pytest.mark.parametrize("wanted", [True, False])
def test_a_rank_binds_itself_to_the_node_of_its_gpu(
    wanted: bool, two_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    system = host(tmp_path, node="1", cores=str(last))
    parts = {"pci_domain_id": 1, "pci_bus_id": 0xC1, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**parts))
    monkeypatch.setattr(numa, "node_cores", partial(node_cores, system=system))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.delenv("RANK", raising=False)
    comm = job(tmp_path, comm={"numa_binding": wanted}).comm
    start_process_group(
        init_timeout_s=60, expandable_segments=False, numa_binding=comm.numa_binding
    )
    assert os.sched_getaffinity(two_threads) == ({last} if wanted else before)


def test_jobs_bind_unless_they_say_otherwise(tmp_path: Path) -> None:
    assert job(tmp_path).comm.numa_binding
