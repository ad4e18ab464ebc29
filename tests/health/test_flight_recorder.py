"""titan/ops/flight_recorder.py: what a rank writes down when something goes wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import Pool
from titan.base.errors import Failure
from titan.config.schema import CommSection
from titan.ops import flight_recorder
from titan.ops.activity import dump_stacks
from titan.ops.flight_recorder import FlightRecorder

BECAUSE = Failure("because", step=7)


def _dumped(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    recorder = FlightRecorder(CommSection(), Path(folder), rank, world_size=4)
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
    flight_recorder.dump(BECAUSE)
    return json.loads(recorder.path.read_text())


def test_a_dump_names_groups_operations_and_pairs(pool: Pool, tmp_path: Path) -> None:
    dumps = pool.run(4, _dumped, str(tmp_path))
    for rank, dump in enumerate(dumps):
        assert (dump["rank"], dump["step"], dump["failure"]["reason"]) == (rank, 7, "because")
        by_axis = {group["axis"]: group for group in dump["groups"].values()}
        assert by_axis["all ranks"] == {"axis": "all ranks", "ranks": [0, 1, 2, 3]} | {
            "begun": {"gloo": 3}
        }
        assert by_axis["tp"]["ranks"] == ([0, 1] if rank < 2 else [2, 3])
        assert by_axis["tp"]["begun"] == {"gloo": 1}
        last = dump["entries"][-1]
        assert (last["seq"], last["operation"], last["called"]) == (
            3,
            "all_reduce",
            "all_reduce",
        )
        assert (last["input_sizes"], last["input_dtypes"]) == ([[4, 3]], ["Double"])
        assert (last["output_sizes"], last["output_dtypes"]) == ([[4, 3]], ["Double"])
        assert last["peers"] == [0, 1, 2, 3] and last["timeout_ms"] > 0
        assert (last["started_unix_s"], last["ended_unix_s"]) == (
            None,
            None,
        )  # torch has them of NCCL only
        assert dump["unix_s"] - 60 < last["enqueued_unix_s"] <= dump["unix_s"]
        peer = (rank + 2) % 4
        pairs = [(row["peer"], row["sends"], row["seq"], row["size"]) for row in dump["p2p"]]
        assert pairs == [(peer, rank < 2, 1, [4, 3]), (peer, rank < 2, 2, [4, 3])]
        stacks = (tmp_path / "logs" / f"rank-{rank}.stacks.txt").read_text()
        assert "because" in stacks and "in _dumped" in stacks


def test_times_and_the_pair_of_a_send_over_nccl() -> None:
    entry: dict[str, Any] = {
        "process_group": ("3", "mesh_pp"),
        "profiling_name": "nccl:send 0->1",
        "p2p_seq_id": 2,
        "collective_seq_id": 0,
        "is_p2p": True,
        "state": "completed",
        "timeout_ms": 600_000,
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
        "duration_ms": 0.25,
        "output_sizes": [[2]],
        "output_dtypes": ["Float"],
        "time_created_ns": 10**18,
        "time_discovered_started_ns": 10**18 + 5_000,
        "time_discovered_completed_ns": 10**18 + 255_000,
    }
    found = flight_recorder.readable_entry(entry, [4, 12])
    assert found["peers"] == [4, 12] and found["p2p_seq"] == 2
    assert (found["started_unix_s"], found["ended_unix_s"]) == (1e9 + 5e-6, 1e9 + 2.55e-4)
    assert found["duration_ms"] == 0.25
    assert flight_recorder.readable_entry(
        entry | {"profiling_name": "nccl:recv 1<-0"}, [4, 12]
    )["peers"] == [12, 4]


def test_a_buffer_of_nothing_writes_nothing(tmp_path: Path) -> None:
    section = CommSection(trace_buf_size=0)
    recorder = FlightRecorder(section, tmp_path, rank=0, world_size=1)
    before = flight_recorder.installed
    try:
        flight_recorder.install(recorder)
        flight_recorder.dump(BECAUSE)
    finally:
        flight_recorder.installed = before
    assert not recorder.path.exists()
    assert "because" in (tmp_path / "logs" / "rank-0.stacks.txt").read_text()


def test_stacks_show_where_an_error_was_raised(tmp_path: Path) -> None:
    """Another thread may write them after the main one has unwound to the function that reports the error."""

    def fail() -> None:
        raise KeyError("lost")

    path = tmp_path / "logs" / "rank-0.stacks.txt"
    try:
        fail()
    except KeyError:
        thread = threading.Thread(target=dump_stacks, args=(path, "because"))
        thread.start()
        thread.join()
    assert ", in fail\n" in path.read_text() and "KeyError: 'lost'" in path.read_text()
    dump_stacks(path.with_name("rank-1.stacks.txt"), "because")  # no error
    assert "handles" not in path.with_name("rank-1.stacks.txt").read_text()
