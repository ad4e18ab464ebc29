"""Traces of simulated steps, as Holistic Trace Analysis reads them: its rules are those of hta/common at f4d0062 (trace_file.py,
trace_parser.py, trace.py, types.py), written here again with what they ask of each column."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from titan.cli import main
from titan.sim.price.profiles import load_profile

JOB = [
    "train_configs/debug_model.toml",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
]
# types.py: what is communication, what moves memory, and what is no computation.
COMMUNICATION = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
MEMORY = re.compile(r"(^(hip)?Memcpy)|(^(hip)?Memset)|(^dma)")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], dict[str, Any]]:
    """Return the text of each rank's file, and the simulation's facts."""
    folder = tmp_path_factory.mktemp("traces")
    options = ["--world-size=4", "--hardware=h100-sxm", f"--trace={folder}"]
    out = folder.parent / "facts.json"
    parallel = ["--parallelism.pipeline_parallel_degree=2", "--training.enable_cpu_offload"]
    assert main(["sim", *JOB, *parallel, *options, f"--json={out}"]) == 0
    texts = {
        int(re.findall(r"\d+", file.name)[0]): file.read_text() for file in folder.iterdir()
    }
    assert {*texts} == {0, 2}
    return texts, json.loads(out.read_text())


def rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of HTA's table: events with a duration and a category, and the arguments that it keeps."""
    table = []
    for number, event in enumerate(json.loads(text)["traceEvents"]):
        if event.get("dur") is None or event.get("cat") in (None, "Trace"):
            continue
        row = {key: event[key] for key in ("ts", "dur", "name", "cat", "pid", "tid")}
        # The row's number stands for it in other rows, where 0 stands for none.
        row |= {"index": number, "stream": -1, "correlation": -1} | event["args"]
        table.append(row)
    assert all(row["index"] > 0 for row in table)
    return table


def test_files_name_their_ranks(written: tuple[dict[int, str], dict[str, Any]]) -> None:
    for rank, text in written[0].items():
        found = re.search(r'"rank":\s+(\d+)', text)  # the first one in the file counts
        assert found and int(found[1]) == rank
        info = json.loads(text)["distributedInfo"]
        assert info == {"backend": "nccl", "rank": rank, "world_size": 4}


def test_kernels_and_their_launches(written: tuple[dict[int, str], dict[str, Any]]) -> None:
    for text in written[0].values():
        table = rows(text)
        device = [r for r in table if r["stream"] >= 0 and r["correlation"] >= 0]
        launches = {r["correlation"]: r for r in table if r["stream"] < 0 <= r["correlation"]}
        # Streams are above 0, or kernels would belong to no iteration.
        assert device and all(r["stream"] == r["tid"] > 0 for r in device)
        assert {r["cat"] for r in device} == {"kernel", "gpu_memcpy"}
        assert {r["name"] for r in launches.values()} == {"cudaLaunchKernel"}
        # Each kernel has one launch, and each launch one kernel, which does not begin before it.
        assert {*launches} == {r["correlation"] for r in device} and len(launches) == len(
            device
        )
        assert all(launches[r["correlation"]]["ts"] <= r["ts"] for r in device)
        # The operation that launches it lies around the launch and has the same external id.
        operations = {r["External id"]: r for r in table if r["cat"] == "cpu_op"}
        for row in device:
            inner, outer = launches[row["correlation"]], operations[row["External id"]]
            assert (inner["ts"], inner["dur"], inner["tid"]) == (
                outer["ts"],
                outer["dur"],
                outer["tid"],
            )
        # One step, by which the host's rows get their iteration.
        [step] = [r for r in table if re.match(r"ProfilerStep\s*#\s*(\d+)", r["name"])]
        assert all(step["ts"] <= r["ts"] <= step["ts"] + step["dur"] for r in launches.values())
        assert [
            r["name"] for r in table if r["cat"] == "cuda_runtime" and r["correlation"] < 0
        ]  # waits


def test_kinds_of_kernels(written: tuple[dict[int, str], dict[str, Any]]) -> None:
    texts, facts = written
    for rank, text in texts.items():
        device = [r for r in rows(text) if r["stream"] >= 0]
        names = {
            re.sub(r"\(.*", "", r["name"]) for r in device if COMMUNICATION.match(r["name"])
        }
        expected = {"AllGather", "ReduceScatter", "AllReduce", "SendRecv"}
        assert names == {f"ncclDevKernel_{kind}" for kind in expected}
        copies = [r for r in device if MEMORY.match(r["name"])]
        assert copies and copies == [r for r in device if r["cat"] == "gpu_memcpy"]
        # The rest of its stream computes, for as long as the simulation says.
        own = [r for r in device if r["stream"] == 7 and not COMMUNICATION.match(r["name"])]
        own_us = sum(r["dur"] for r in own)
        [compute_s] = [r["compute_s"] for r in facts["per_rank"] if r["rank"] == rank]
        assert own_us == pytest.approx(
            compute_s * 1e6, abs=1e-3 * len(own)
        )  # written to the ns


def test_arrows_lead_from_launches_to_kernels(
    written: tuple[dict[int, str], dict[str, Any]],
) -> None:
    events = json.loads(written[0][0])["traceEvents"]
    begins = {e["id"]: (e["tid"], e["ts"]) for e in events if e["ph"] == "s"}
    ends = {e["id"]: (e["tid"], e["ts"]) for e in events if e["ph"] == "f"}
    spans = [e for e in events if e["ph"] == "X" and "correlation" in e["args"]]
    launches = {
        e["args"]["correlation"]: (e["tid"], e["ts"])
        for e in spans
        if e["cat"] == "cuda_runtime"
    }
    kernels = {
        e["args"]["correlation"]: (e["tid"], e["ts"])
        for e in spans
        if e["cat"] != "cuda_runtime"
    }
    assert begins == launches and ends == kernels and begins


def test_the_host_issues_for_as_long_as_the_profile_says(
    written: tuple[dict[int, str], dict[str, Any]],
) -> None:
    profile = load_profile("h100-sxm")
    took = [r["dur"] for r in rows(written[0][0]) if r["name"] == "cudaLaunchKernel"]
    # Python, autograd and hooks come on top of the launch itself.
    assert min(took) > profile.launch_us
    assert max(took) > profile.launch_transfer_us
