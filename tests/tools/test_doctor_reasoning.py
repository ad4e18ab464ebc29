"""titan/ops/doctor/: what is concluded from flight recorders, statuses and logs, without any run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell
from tests.support.tables import tabled
from titan.base.errors import Failure
from titan.ops.doctor.diagnosis import _ADVICE, Diagnosis, diagnose
from titan.ops.doctor.evidence import Evidence
from titan.ops.run_lock import LOCK_FILE, ProcessId

NOW = 1_700_000_000.0
# Four ranks, of which 0, 1 and 2, 3 share matrices, and 0, 2 and 1, 3 share parameters.
GROUPS = {
    "1": ("dp_shard", [0, 2]),
    "2": ("dp_shard", [1, 3]),
    "3": ("tp", [0, 1]),
    "4": ("tp", [2, 3]),
}


class Folder:
    """A run folder, written by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "logs").mkdir()
        (path / "flight_recorder").mkdir()
        self.write("environment.json", {"written_unix_s": NOW - 100, "world_size": 4})
        self.status("failed", "rank 0 failed in step 7: Timed out", kind="collective_timeout")

    def write(self, name: str, content: dict[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(content))

    def status(self, state: str, reason: str = "", *, kind: str = "", rank: int = 0) -> None:
        content = {"state": state, "exit_code": 1, "step": 7, "reason": reason, "unix_s": NOW}
        self.write("status.json", content | {"kind": kind, "rank": rank})

    def dump(
        self,
        rank: int,
        begun: dict[str, int],
        *,
        doing: str = "",
        kind: str = "asked",
        **call: Any,
    ) -> None:
        """begun: in each group; doing: where the main thread is, if it does not wait; call: of the last collectives."""
        groups, entries = {}, []
        for name, (axis, ranks) in GROUPS.items():
            if rank in ranks:
                groups[name] = {"axis": axis, "ranks": ranks, "begun": {"gloo": begun[axis]}}
                for seq in range(begun[axis] + 1):
                    last = call if seq == begun[axis] else {}
                    entries.append(self._entry(name, seq) | last)
        self.write(
            f"flight_recorder/rank-{rank}.json",
            {
                "rank": rank,
                "host": f"node{rank // 2}",
                "failure": asdict(Failure("asked", kind=kind, step=7, rank=rank)),
                "step": 7,
                "unix_s": NOW,
                "main_thread": {
                    "text": doing or "all_reduce (a.py:1, in f)",
                    "waits": not doing,
                },
                "world_size": 4,
                "oom_kills": 0,
                "groups": groups,
                "entries": entries,
                "p2p": [],
            },
        )

    def _entry(self, group: str, seq: int) -> dict[str, Any]:
        return {
            "group": group,
            "backend": "gloo",
            "seq": seq,
            "p2p_seq": 0,
            "operation": "all_reduce",
            "called": "all_reduce",
            "line": "a.py:1, in f",
            "input_sizes": [[4, 2]],
            "input_dtypes": ["Float"],
            "enqueued_unix_s": NOW - 41 + seq / 1e3,
        }

    def diagnosis(self) -> Diagnosis:
        return diagnose(Evidence(self.path))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_waiting_is_followed_to_the_rank_at_its_beginning(folder: Folder) -> None:
    """3 is in data loading; 1 waits for it in dp_shard, 2 in tp, and 0 for 1 in tp."""
    folder.dump(0, {"dp_shard": 5, "tp": 9})
    folder.dump(1, {"dp_shard": 5, "tp": 8})
    folder.dump(2, {"dp_shard": 5, "tp": 9})
    folder.dump(3, {"dp_shard": 4, "tp": 8}, doing="read (titan/data/sources.py:61, in _read)")
    [found] = folder.diagnosis().findings
    assert found.kind == "hang_in_data"
    assert found.cause == (
        "rank 3 on node1 never entered all_reduce of 4 x 2 float #5 of the FSDP group (dp_shard) (a.py:1, in f); "
        "it was in read (titan/data/sources.py:61, in _read) for 41 s; ranks 0, 1, 2 wait"
    )


def test_ranks_that_wait_for_each_other(folder: Folder) -> None:
    for rank, (dp_shard, tp) in enumerate([(6, 8), (5, 9), (5, 9), (6, 8)]):
        folder.dump(rank, {"dp_shard": dp_shard, "tp": tp})
    [found] = folder.diagnosis().findings
    assert found.kind == "deadlock"
    assert (
        "rank 0 never entered all_reduce of 4 x 2 float #9 of the tensor-parallel group (tp)"
        in (found.cause)
    )


@tabled("call, kind, text")
def test_mismatches(call: dict[str, Any], kind: str, text: str, folder: Folder) -> None:
    for rank in range(3):
        folder.dump(rank, {"dp_shard": 5, "tp": 8})
    folder.dump(3, {"dp_shard": 5, "tp": 8}, **call)
    found = folder.diagnosis().findings[0]
    assert (found.kind, text in found.cause) == (kind, True), found


def test_sizes_of_an_all_to_all_may_differ(folder: Folder) -> None:
    for rank in range(4):
        call = {"operation": "all_to_all", "input_sizes": [[rank, 2]]}
        folder.dump(rank, {"dp_shard": 5, "tp": 8}, **call)
    assert [found.kind for found in folder.diagnosis().findings] == ["unknown"]


def test_a_rank_that_left_no_word(folder: Folder) -> None:
    folder.status("failed", "rank 0 failed: Connection closed by peer", kind="connection_lost")
    for rank in (0, 1, 3):
        folder.dump(rank, {"dp_shard": 5, "tp": 8})
    found = folder.diagnosis().findings[0]
    assert found.cause.startswith("rank 2 left no report: killed") and "SIGKILL" in found.advice
    launch = {"ranks": {"2": {"pid": 1, "exit_code": -9, "unix_s": NOW}}, "oom_kills": 1}
    folder.write("logs/launch-node1.json", launch)
    assert folder.diagnosis().findings[0].cause.startswith("rank 2 was killed by the kernel")


def test_the_stack_of_a_silent_rank_is_newer_than_its_last_beat(folder: Folder) -> None:
    silence = "rank 2 on node1 has not been heard of for 30 s; rank 2 was in all_reduce, step 6"
    folder.status("hung", silence, kind="rank_silent")
    for rank in (0, 1, 3):
        folder.dump(rank, {"dp_shard": 5, "tp": 8})
    [found] = folder.diagnosis().findings
    assert (found.kind, found.cause) == ("rank_silent", silence)
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/models/llama3/model.py", line 90 in forward\n'
    (folder.path / "logs" / "rank-2.stacks.txt").write_text(
        f"Fatal Python error: Aborted\n\n{stack}"
    )
    [found] = folder.diagnosis().findings
    assert found.cause.endswith("it was in models/llama3/model.py:90, in forward")


def test_the_report_of_a_rank_counts_more_than_that_of_those_who_lost_it(
    folder: Folder,
) -> None:
    folder.dump(0, {"dp_shard": 5, "tp": 8}, kind="connection_lost")
    folder.dump(2, {"dp_shard": 5, "tp": 8}, kind="disk_full")
    found = folder.diagnosis().findings[0]
    assert found.kind == "disk_full"
    assert found.cause.startswith("the disk is full (rank 2): ")


def test_dumps_of_a_larger_run_before_are_left_out(folder: Folder) -> None:
    folder.dump(3, {"dp_shard": 5, "tp": 8})
    path = folder.path / "flight_recorder" / "rank-3.json"
    older = json.loads(path.read_text()) | {"rank": 6, "unix_s": NOW - 1000, "world_size": 8}
    path.with_name("rank-6.json").write_text(json.dumps(older))
    assert list(Evidence(folder.path).dumps) == [3]


def test_a_slow_rank(folder: Folder) -> None:
    folder.status("done")
    for rank in range(4):
        rows = [
            {"step": step, "step_s": 1.0, "own_s": 0.9 if rank == 2 else 0.3, "data_wait_s": 0.0, "unix_s": NOW}
            for step in range(1, 6)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder.path / "logs" / f"rank-{rank}.times.jsonl").write_text(text)
    [found] = folder.diagnosis().findings
    assert (
        found.cause == "rank 2 is slow: 0.90 s of work per step, against 0.30 s on the others"
    )


def test_a_run_that_ended_without_last_words(folder: Folder) -> None:
    folder.status("running")
    assert [found.kind for found in folder.diagnosis().findings] == ["vanished"]
    folder.write(
        "metrics.jsonl", {"step": 9, "step_s": 1.0}
    )  # status.json is written less often
    assert "step 9" in folder.diagnosis().summary
    folder.write(LOCK_FILE, asdict(ProcessId.this()))
    folder.write("metrics.jsonl", {"step": 7, "step_s": 1.0})
    assert [found.kind for found in folder.diagnosis().findings] == ["no_progress"]


def test_the_command_reads_replica_groups(folder: Folder, shell: Shell) -> None:
    for number, state in ((10, "done"), (2, "failed")):
        folder.status(state)
        (folder.path / f"group-{number}").mkdir()
        (folder.path / "status.json").rename(folder.path / f"group-{number}" / "status.json")
    first, second = shell(f"doctor {folder.path}", code=1).out.split("\n\n" + str(folder.path))
    assert "group-2: failed" in first and second.startswith("/group-10: ")
    assert [
        Path(page["run"]).name
        for page in json.loads(shell(f"doctor {folder.path} --json", code=1).out)
    ] == [
        "group-2",
        "group-10",
    ]


def test_the_command(folder: Folder, shell: Shell) -> None:
    assert "holds no run (no status.json)" in shell.refuse(f"doctor {folder.path}/logs")
    folder.status("done")
    assert shell(f"doctor {folder.path}").out.endswith("are done\nnothing is wrong\n")
    folder.status("failed", "rank 3 of 0, 1", kind="replicas_differ")
    [found] = json.loads(shell(f"doctor {folder.path} --json", code=1).out)["findings"]
    assert found["kind"] == "replicas_differ" and found["advice"]


def test_it_imports_no_torch(folder: Folder) -> None:
    code = (
        "import sys, titan.cli; titan.cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "doctor", str(folder.path)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_fault_in_native_code_outranks_what_its_victims_say(folder: Folder) -> None:
    folder.status("failed", "rank 0 failed in step 7: RuntimeError: stage 1", kind="error")
    stacks = folder.path / "logs" / "rank-3.stacks.txt"
    stacks.write_text(
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/x/titan/parallel/tensor.py", line 60 in gather\n'
    )
    os.utime(stacks, (NOW, NOW))
    first = folder.diagnosis().findings[0]
    assert first.kind == "crashed"
    assert (
        first.cause == "rank 3 was ended by SIGSEGV, in titan/parallel/tensor.py:60, in gather"
    )
    os.utime(stacks, (NOW - 1000, NOW - 1000))  # of an earlier run
    assert folder.diagnosis().findings[0].kind == "error"
    stacks.write_text("Fatal Python error: Aborted\n\nFatal Python error: Segmentation fault\n")
    assert folder.diagnosis().findings[0].kind == "error"  # the monitor ended a silent rank


def test_the_page_lists_every_kind() -> None:
    page = (Path(__file__).parents[2] / "docs/operate.md").read_text()
    assert [kind for kind in _ADVICE if f"`{kind}`" not in page] == []
