"""titan/ops/monitor.py and heartbeats.py: what ranks agree on; tests/health/test_survival.py lets real ones hang."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.commands import finished
from tests.support.ranks import Pool
from tests.support.tables import tabled
from titan.base.errors import Failure, kind_of
from titan.ops import peers
from titan.ops.heartbeats import FolderStore, Heartbeat, describe_hang, describe_silence
from titan.ops.monitor import Monitor
from titan.ops.run_lock import ProcessId

ALONE = """
import sys, time
from pathlib import Path
from titan.ops.monitor import Monitor
monitor = Monitor(Path(sys.argv[1]), step_limit_s=0.5)
monitor.start()
def busy(seconds):
    time.sleep(seconds)
monitor.begin(1)
busy(0.1)
monitor.end()
busy(1)  # between two steps there is no limit
monitor.begin(2)
busy(60)
"""


def beat(host: str = "node0", *, waits: bool = True, machine: str = "elsewhere") -> Heartbeat:
    process = ProcessId(host, pid=1, started="1", machine=machine, job="", attempt="")
    activity = "all_reduce (a.py:3, in f)" if waits else "read (b.py:4, in g)"
    return Heartbeat(3, step=8, activity=activity, waits=waits, process=process)


# ---- a step that takes too long --------------------------------------------------------------------


@tabled("waits, silent, text")
def test_the_rank_to_look_at(waits: list[bool], silent: list[int], text: str) -> None:
    assert describe_hang({rank: beat(waits=w) for rank, w in enumerate(waits)}, silent) == text


def test_a_step_over_its_time_ends_the_process(tmp_path: Path) -> None:
    process = finished([sys.executable, "-c", ALONE, str(tmp_path)], timeout=30, code=1)
    status = json.loads((tmp_path / "status.json").read_text())
    found = [status[key] for key in ("state", "kind", "exit_code", "step", "rank")]
    assert found == ["hung", "hang", 1, 2, 0]
    assert "longer than 0.5 s; rank 0 is in busy" in status["reason"]
    assert status["reason"] in process.stderr


def test_nothing_is_left_of_a_run_that_ends_well(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, step_limit_s=50)
    monitor.start()
    monitor.begin(1)
    monitor.close()
    assert not list((tmp_path / "logs").iterdir())


# ---- one failure for all ---------------------------------------------------------------------------


def _first_failure(folder: str) -> tuple[int, str]:
    rank = dist.get_rank()
    monitor = Monitor(Path(folder), rank=rank, world_size=3, heartbeat_s=60)
    store = dist.TCPStore("127.0.0.1", int(Path(folder, "port").read_text()), is_master=False)
    monitor.peers.store = dist.PrefixStore("titan/0", store)
    if rank == 1:
        monitor.report_failure(Failure("rank 1 is broken", step=4, rank=1, silent=(2,)))
    dist.barrier()
    if rank != 1:
        monitor.report_failure(
            Failure(f"rank {rank} has lost its connection", step=5, rank=rank)
        )
    run = monitor.report_failure(Failure("too late"))
    monitor.peers.wait()
    return run.rank, f"{run.reason} in step {run.step}, silent {run.silent}"


def test_the_first_failure_is_that_of_all(pool: Pool, tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    results = pool.run(3, _first_failure, str(tmp_path))
    assert results == [(1, "rank 1 is broken in step 4, silent (2,)")] * 3


def test_rank_0_waits_for_the_living_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waited for the dead would wait for hours here."""
    monkeypatch.setattr(peers, "LINGER_S", 1e4)
    waiting = Monitor(tmp_path, world_size=4, heartbeat_s=30).peers
    waiting.beat_s, waiting.store = 1e4, FolderStore(tmp_path / "store")
    alive = Monitor(tmp_path, rank=2, world_size=4).peers
    alive.store = waiting.store
    dead = replace(beat(), process=replace(waiting.me, started="1"))
    for rank, text in enumerate(
        [waiting.heartbeat_text(), json.dumps(asdict(dead)), alive.heartbeat_text(), "gone"]
    ):
        waiting.store.set(f"beat/{rank}", text)
    signs_off = threading.Event()
    threading.Timer(0.5, lambda: (signs_off.set(), alive.wait())).start()
    waiting.wait()
    assert signs_off.is_set()


def test_a_rank_alone_agrees_with_itself(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, heartbeat_s=30)
    monitor.connect()
    mine = Failure("my own")
    assert monitor.report_failure(mine) is mine
    monitor.peers.wait()
    monitor.close()


def test_a_store_is_lost_only_if_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time before the ranks meet, in which torch is imported, is no silence."""
    ends: list[Failure] = []
    monitor = Monitor(tmp_path, rank=1, world_size=2, heartbeat_s=2)
    monkeypatch.setattr(monitor, "_exit_on", lambda failure, alone: ends.append(failure))
    monitor.start()
    time.sleep(3.5)
    monitor.peers.store = FolderStore(tmp_path / "store")
    time.sleep(0.5)  # the first beat
    while monitor.peers.rounds < 10:
        time.sleep(0.05)
        monitor.peers.rounds += 1
    assert not ends
    while not ends:  # nobody counts any more
        time.sleep(0.05)
    monitor.close()
    assert ends[0].kind == "rank_silent"


def test_a_silent_host_is_distinguished_from_a_silent_rank() -> None:
    beats = {rank: beat(f"node{rank // 2}") for rank in range(4)}
    text, host_is_lost = describe_silence(beats, [2, 3], limit_s=30)
    assert host_is_lost
    assert text == (
        "ranks 2, 3 on node1 have not been heard of for 30 s: node1 is lost, or cut off; rank 2 was in "
        "all_reduce (a.py:3, in f), step 8"
    )
    text, host_is_lost = describe_silence(beats, [3], limit_s=30)
    assert text.startswith(
        "rank 3 on node1 has not been heard of for 30 s: it is stopped, or its"
    )
    assert not host_is_lost


# ---- kinds of failure ------------------------------------------------------------------------------


def wrapped(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device"), "disk_full"),
        (OSError(5, "Input/output error"), "disk_lost"),
        (wrapped(RuntimeError("saving failed"), OSError(122, "quota")), "disk_full"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), "out_of_device_memory"),
        (RuntimeError("[gloo/tcp.cc:1] Connection closed by peer"), "connection_lost"),
        (RuntimeError("[gloo/tcp.cc:1] Timed out waiting 6000ms"), "collective_timeout"),
        (
            wrapped(KeyError("stage 1"), RuntimeError("Connection reset by peer")),
            "connection_lost",
        ),
        (KeyError("a file timed out"), "error"),
    ],
)
def test_the_kind_of_an_error_comes_from_its_type_and_cause(
    error: Exception, kind: str
) -> None:
    assert kind_of(error) == kind


def test_an_unexpected_error_is_reported_with_its_type_in_one_line() -> None:
    try:
        raise KeyError("no_such\nfield")
    except KeyError as error:
        failure = Failure.of(error, rank=3, step=9)
    assert failure.reason.startswith("rank 3 failed in step 9: KeyError: ")
    assert "\n" not in failure.reason and failure.kind == "error"
