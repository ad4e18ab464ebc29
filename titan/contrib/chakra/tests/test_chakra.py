"""`titan sim --chakra`: Chakra's own package (mlc-chakra) reads the files, and they hold what the trace does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.traces import job
from titan.contrib.chakra.chakra import write_chakra
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import HOST, Launch, Transfer
from titan.sim.simulate import StepSimulation, simulate

# scripts/requirements-dev.lock has it, without the analysis tools that it asks for and its reader does not import.
pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs mlc-chakra")
from chakra.schema.protobuf import et_def_pb2 as schema
from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd


@pytest.fixture(scope="module")
def simulation() -> StepSimulation:
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    config = job(parallelism=degrees | {"pipeline_parallel_schedule": "1F1B"})
    return simulate(config, world_size=8, profile=load_profile("h100-sxm"))


def decoded(path: Path) -> tuple[Any, list[Any]]:
    """Read a file as Chakra's tools do. Nothing may be left that the schema does not know."""
    metadata, nodes, size = schema.GlobalMetadata(), [], 0
    with openFileRd(path) as file:
        decodeMessage(file, metadata)
        while decodeMessage(file, node := schema.Node()):
            size = node.ByteSize()
            node.DiscardUnknownFields()
            assert node.ByteSize() == size
            nodes.append(node)
    return metadata, nodes


def test_the_jsonizer_of_chakra_reads_the_files(
    simulation: StepSimulation, tmp_path: Path
) -> None:
    write_chakra(simulation, tmp_path)
    for rank, trace in simulation.traces.items():
        source, target = tmp_path / f"rank.{rank}.et", tmp_path / f"rank.{rank}.json"
        command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer"]
        subprocess.run([*command, f"--input_filename={source}", f"--output_filename={target}"], check=True)  # fmt: skip
        text, at, found = target.read_text(), 0, []
        while at < len(text):
            message, at = json.JSONDecoder().raw_decode(text, at)
            found.append(message)
        metadata, *nodes = found
        events = [e for e in trace.step if isinstance(e, Launch | Transfer)]
        assert metadata == {"version": "0.0.4"} and len(nodes) == len(events)
        for node, event in zip(nodes, events, strict=True):
            attributes = {a.pop("name"): a for a in node["attr"]}
            if isinstance(event, Launch):
                assert node["type"] == "COMP_NODE" and node["name"] == event.kernel.name
                assert attributes["num_ops"] == {"int64Val": str(event.kernel.flops)}
            elif event.peer < 0:
                assert node["type"] == "COMM_COLL_NODE"
                number = int(attributes["comm_type"]["int64Val"])
                assert schema.CollectiveCommType.Name(number) == event.kind.upper()
                assert attributes["comm_size"] == {"int64Val": str(event.size_bytes)}
            else:
                assert node["type"] == f"COMM_{event.kind.upper()}_NODE"
        assert {node["type"] for node in nodes} > {"COMP_NODE", "COMM_COLL_NODE"}


def test_attributes_have_the_types_of_the_generator_of_chakra(
    simulation: StepSimulation, tmp_path: Path
) -> None:
    """A reader takes an attribute's value from the field that Chakra's own generator writes."""
    command = [sys.executable, "-m", "chakra.src.generator.generator", "--num_npus=1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    theirs: dict[str, set[str]] = {}
    for path in tmp_path.glob("*.et"):
        collect(decoded(path)[1], theirs)
    write_chakra(simulation, tmp_path / "ours")
    ours: dict[str, set[str]] = {}
    for path in (tmp_path / "ours").glob("*.et"):
        collect(decoded(path)[1], ours)
    shared = {"is_cpu_op", "tensor_size", "comm_type", "comm_size"}
    assert shared <= {*ours} & {*theirs}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def collect(nodes: list[Any], types: dict[str, set[str]]) -> None:
    for attribute in (attribute for node in nodes for attribute in node.attr):
        types.setdefault(attribute.name, set()).add(str(attribute.WhichOneof("value")))


def value(node: Any, name: str) -> Any:
    [attribute] = [a for a in node.attr if a.name == name]
    [(_, found)] = [(f, v) for f, v in attribute.ListFields() if f.name != "name"] or [
        (None, 0)
    ]
    return found


def test_files_hold_the_trace(simulation: StepSimulation, tmp_path: Path) -> None:
    write_chakra(simulation, tmp_path)
    groups = json.loads((tmp_path / "groups.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank.0.et",
        "rank.4.et",
        "groups.json",
    }
    for rank, trace in simulation.traces.items():
        metadata, nodes = decoded(tmp_path / f"rank.{rank}.et")
        assert metadata.version == "0.0.4"
        launches = [e for e in trace.step if isinstance(e, Launch)]
        transfers = [e for e in trace.step if isinstance(e, Transfer)]
        compute = [node for node in nodes if node.type == 4]
        assert len(compute) == len(launches) and len(nodes) == len(launches) + len(transfers)
        assert [value(n, "num_ops") for n in compute] == [e.kernel.flops for e in launches]
        assert [value(n, "tensor_size") for n in compute] == [e.kernel.read_bytes + e.kernel.write_bytes for e in launches]  # fmt: skip
        sent = [node for node in nodes if node.type != 4]
        assert [value(n, "comm_size") for n in sent] == [e.size_bytes for e in transfers]
        names = {0: "all_reduce", 2: "all_gather", 6: "all_to_all", 7: "reduce_scatter"}
        collectives = Counter(
            (names[value(n, "comm_type")], tuple(groups[value(n, "pg_name")])) for n in sent if n.type == 7
        )  # fmt: skip
        assert collectives == Counter(
            (e.kind, trace.groups[e.group].ranks) for e in transfers if e.peer < 0
        )
        ends = [(value(n, "comm_src"), value(n, "comm_dst")) for n in sent if n.type in (5, 6)]
        assert ends == [(rank, e.peer) if e.kind == "send" else (e.peer, rank) for e in transfers if e.peer >= 0]  # fmt: skip
        # Nothing starts before what it depends on has ended (to the microsecond of the schema), and all but the first depend on something.
        by_id = {node.id: node for node in nodes}
        assert len(by_id) == len(nodes)
        for node in nodes:
            for parent in (by_id[number] for number in node.data_deps):
                assert (
                    parent.start_time_micros + parent.duration_micros
                    <= node.start_time_micros + 2
                )
        assert sum(not node.data_deps for node in nodes) <= 4
        busy = sum(value(n, "duration_nanos") for n, e in zip(compute, launches, strict=True) if e.stream != HOST)  # fmt: skip
        assert busy / 1e9 == pytest.approx(simulation.timeline.ranks[rank].compute_s, rel=0.05)
