"""`titan sim --chakra`: decoded by protobuf with the fields of Chakra's schema, the files hold what the trace does."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.traces import job
from titan.contrib.chakra.chakra import write_chakra
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import HOST, Launch, Transfer
from titan.sim.simulate import simulate

pytest.importorskip("google.protobuf")
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Fields of schema/protobuf/et_def.proto (mlcommons/chakra, 21585d8): number, name, type, repeated. 3 int64, 4 uint64, 5 int32, 8 bool, 9 string.
_SCHEMA: dict[str, list[tuple[Any, ...]]] = {
    "AttributeProto": [(1, "name", 9), (7, "int32_val", 5), (9, "int64_val", 3), (13, "uint64_val", 4), (27, "bool_val", 8), (29, "string_val", 9)],
    "GlobalMetadata": [(1, "version", 9), (2, "attr", "AttributeProto")],
    "Node": [(1, "id", 4), (2, "name", 9), (3, "type", 5), (5, "data_deps", 4, True), (6, "start_time_micros", 4), (7, "duration_micros", 4), (10, "attr", "AttributeProto")],
}  # fmt: skip


def schema() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et_def", package="ChakraProtoMsg", syntax="proto3")  # fmt: skip
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, field, kind, *repeated in fields:
            is_message = isinstance(kind, str)
            new = message.field.add(name=field, number=number, label=3 if is_message or repeated else 1)  # fmt: skip
            new.type = 11 if is_message else kind  # pyright: ignore
            if is_message:
                new.type_name = f".ChakraProtoMsg.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{n}")) for n in _SCHEMA}  # fmt: skip


def decoded(path: Path) -> tuple[Any, list[Any]]:
    data, at, found = path.read_bytes(), 0, []
    classes = schema()
    while at < len(data):
        size = 0
        for shift in itertools.count(0, 7):
            byte, at = data[at], at + 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        message = classes["Node" if found else "GlobalMetadata"]()
        assert message.ParseFromString(data[at : at + size]) == size
        known = message.ByteSize()
        message.DiscardUnknownFields()
        assert message.ByteSize() == known
        found.append(message)
        at += size
    return found[0], found[1:]


def value(node: Any, name: str) -> Any:
    [attribute] = [a for a in node.attr if a.name == name]
    [(_, found)] = [(f, v) for f, v in attribute.ListFields() if f.name != "name"] or [(None, 0)]
    return found


def test_files_hold_the_trace(tmp_path: Path) -> None:
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    config = job(parallelism=degrees | {"pipeline_parallel_schedule": "1F1B"})
    simulation = simulate(config, world_size=8, profile=load_profile("h100-sxm"))
    write_chakra(simulation, tmp_path)
    groups = json.loads((tmp_path / "groups.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"rank.0.et", "rank.4.et", "groups.json"}
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
                    parent.start_time_micros + parent.duration_micros <= node.start_time_micros + 2
                )
        assert sum(not node.data_deps for node in nodes) <= 4
        busy = sum(value(n, "duration_nanos") for n, e in zip(compute, launches, strict=True) if e.stream != HOST)  # fmt: skip
        assert busy / 1e9 == pytest.approx(simulation.timeline.ranks[rank].compute_s, rel=0.05)
