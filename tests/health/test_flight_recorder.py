"""titan/health/flight_recorder.py and heartbeat.py: what a rank writes down, and what ranks agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import Pool
from titan.config.schema import CommSection
from titan.health import flight_recorder
from titan.health.errors import describe_error
from titan.health.flight_recorder import FlightRecorder
from titan.health.monitor import Failure, Heartbeat, describe_silence


def _dumped(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    at = {"run_dir": Path(folder), "rank": rank, "world_size": 4, "step": lambda: 7}
    recorder = FlightRecorder(CommSection(), **at)
    flight_recorder.install(recorder)
    flight_recorder.begin()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    flight_recorder.name_axes(mesh)
    x = torch.ones(4, 3)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    for _ in range(3):
        dist.all_reduce(x.to(torch.float64))
    group, place = mesh.get_group("dp_shard"), mesh.get_local_rank("dp_shard")
    peer = dist.get_global_rank(group, 1 - place)
    for _ in range(2):
        operation = dist.isend if place == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, x, peer, group=group)]):
            work.wait()
    flight_recorder.dump("because")
    return json.loads(recorder.path.read_text())


def test_a_dump_names_groups_operations_and_pairs(pool: Pool, tmp_path: Path) -> None:
    dumps = pool.run(4, _dumped, str(tmp_path))
    for rank, dump in enumerate(dumps):
        assert (dump["rank"], dump["step"], dump["reason"]) == (rank, 7, "because")
        by_axis = {group["axis"]: group for group in dump["groups"].values()}
        assert by_axis["all ranks"] == {"axis": "all ranks", "ranks": [0, 1, 2, 3]} | {
            "begun": {"gloo": 3}
        }
        assert by_axis["tp"]["ranks"] == ([0, 1] if rank < 2 else [2, 3])
        assert by_axis["tp"]["begun"] == {"gloo": 1}
        last = dump["entries"][-1]
        assert (last["seq"], last["operation"], last["called"]) == (3, "all_reduce", "all_reduce")
        assert (last["input_sizes"], last["input_dtypes"]) == ([[4, 3]], ["Double"])
        assert dump["unix_s"] - 60 < last["enqueued_unix_s"] <= dump["unix_s"]
        peer = (rank + 2) % 4
        pairs = [(row["peer"], row["sends"], row["seq"], row["size"]) for row in dump["p2p"]]
        assert pairs == [(peer, rank < 2, 1, [4, 3]), (peer, rank < 2, 2, [4, 3])]
        stacks = (tmp_path / "logs" / f"rank-{rank}.stacks.txt").read_text()
        assert "because" in stacks and "in _dumped" in stacks


def test_a_buffer_of_nothing_writes_nothing(tmp_path: Path) -> None:
    section = CommSection(trace_buf_size=0)
    recorder = FlightRecorder(section, run_dir=tmp_path, rank=0, world_size=1, step=lambda: 0)
    before = flight_recorder._recorder
    try:
        flight_recorder.install(recorder)
        flight_recorder.dump("because")
    finally:
        flight_recorder._recorder = before
    assert not recorder.path.exists()
    assert "because" in (tmp_path / "logs" / "rank-0.stacks.txt").read_text()


def test_an_unexpected_error_is_told_with_its_kind_and_line(tmp_path: Path) -> None:
    try:
        raise KeyError("no_such\nfield")
    except KeyError as error:
        text = describe_error(error, rank=3, step=9)
    assert text.startswith("rank 3 failed in step 9: KeyError: ") and "\n" not in text


# ---- heartbeat -------------------------------------------------------------------------------------


def _first_verdict(folder: str) -> tuple[int, str]:
    rank = dist.get_rank()
    heartbeat = Heartbeat(60, run_dir=Path(folder), rank=rank, world_size=3, step=lambda: 5)
    store = dist.TCPStore("127.0.0.1", int(Path(folder, "port").read_text()), is_master=False)
    heartbeat._store = dist.PrefixStore("titan/0", store)
    if rank == 1:
        heartbeat.tell(Failure("rank 1 is broken", step=4, rank=1, silent=(2,)))
    dist.barrier()
    if rank != 1:
        heartbeat.tell(Failure(f"rank {rank} has lost its connection", step=5, rank=rank))
    run = heartbeat.tell(Failure("too late"))
    heartbeat.linger()
    return run.rank, f"{run.reason} in step {run.step}, silent {run.silent}"


def test_the_first_verdict_is_everybodys(pool: Pool, tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    said = pool.run(3, _first_verdict, str(tmp_path))
    assert said == [(1, "rank 1 is broken in step 4, silent (2,)")] * 3


def test_a_rank_alone_has_no_heartbeat(tmp_path: Path) -> None:
    heartbeat = Heartbeat(30, run_dir=tmp_path, rank=0, world_size=1, step=lambda: 0)
    heartbeat.start()
    mine = Failure("my own")
    assert heartbeat.tell(mine) is mine
    heartbeat.linger()
    heartbeat.close()


def _beat(host: str, machine: str = "elsewhere") -> str:
    owner = {"host": host, "pid": 1, "started": "1", "machine": machine, "job": "", "attempt": ""}
    return json.dumps({"n": 3, "step": 8, "does": "all_reduce (a.py:3, in f)", "owner": owner})


def test_a_silent_host_is_told_from_a_silent_rank() -> None:
    beats = {rank: _beat(f"node{rank // 2}") for rank in range(4)}
    text = describe_silence(beats, [2, 3], limit_s=30)
    assert text == (
        "ranks 2, 3 on node1 have not been heard of for 30 s: node1 is lost, or cut off; rank 2 was in "
        "all_reduce (a.py:3, in f), step 8"
    )
    text = describe_silence(beats, [3], limit_s=30)
    assert text.startswith("rank 3 on node1 has not been heard of for 30 s: it is stopped, or its")
    assert "lost" not in text
