"""Groups agree or part: keys of the job, facts about a step, and what the lighthouse's page says about a sum that waits."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch

from tests.support.jobs import job
from tests.support.tables import tabled
from titan.config.render import to_toml
from titan.contrib.elastic import process_group
from titan.contrib.elastic.agreement import GroupLeaves, differences, require_same_samples
from titan.contrib.elastic.process_group import SumGivenUp, why_given_up

# What may differ from group to group, and no more.
HARMLESS_SECTIONS = {
    "job",
    "metrics",
    "profiling",
    "hardware",
    "simulator",
    "simulator.run",
    "training.dataloader",
}
HARMLESS = {
    "training.gc_freq",
    "training.expandable_segments",
    "data.cache_folder",
    "compile.cache_folder",
    "comm.trace_buf_size",
    "comm.save_traces_folder",
    "comm.save_traces_file_prefix",
    "fault_tolerance.replica_id",
    "fault_tolerance.lighthouse",
}


def test_every_key_that_is_not_harmless_is_compared() -> None:
    """With another value, and where one group does not set it."""
    ours = to_toml(job(fault_tolerance={"enable": True}))
    lines, section, seen = ours.splitlines(), "", set()
    for number, line in enumerate(lines):
        if line.startswith("["):
            section = line.strip("[]")
        key, equals, value = line.partition(" = ")
        if not equals:
            continue
        name = f"{section}.{key}"
        harmless = name in HARMLESS or section in HARMLESS_SECTIONS
        for changed, text in ((f'{key} = "other"', '"other"'), ("", "not set")):
            theirs = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
            assert differences(theirs, ours) == [f"{name}: {text} -> {value}"] * (not harmless)
        seen.add(name)
    assert len(seen) > 190 and seen >= HARMLESS
    assert "training.local_batch_size" in seen and "optimizer.implementation" in seen


@tabled("told, leaves")
def test_a_group_at_other_samples_leaves(told: list[list[int]], leaves: list[int]) -> None:
    names = [f"group-{number}" for number in range(len(told))]

    def leave(rank: int) -> str:
        try:
            require_same_samples(names, told, own=rank, facts=["step", "first_sample"])
        except GroupLeaves as error:
            return str(error)
        return ""

    texts = {rank: text for rank in range(len(told)) if (text := leave(rank))}
    assert [*texts] == leaves
    if told[-1] == [5, 9, 0]:
        assert texts[1].startswith(
            "group-1 would train other samples than group-0: first_sample 9, not 8."
        )


PAGE = "Current quorum_id: 3 <br>"
for line in ("group-0:a", "old group-1:b", "group-2:c"):
    old, _, member = line.rpartition(" ")
    PAGE += f'\n  <li class="heartbeat\n    {old}\n  ">\n    {member}: seen 1.5s ago\n  </li>'


@tabled("own, members, quorum, why")
def test_what_the_page_says(own: str, members: list[str], quorum: int, why: str) -> None:
    assert why_given_up(PAGE, members, own=own, quorum=quorum) == why
    assert why_given_up("", members, own=own, quorum=quorum) == ""


@pytest.mark.parametrize("is_done", [True, False])
def test_kernels_of_a_sum_that_lost_a_group_are_aborted(
    monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """By torchft's group for NCCL, over a stand-in for torch's."""
    pytest.importorskip("torchft")
    event, of_torch = Mock(**{"query.return_value": is_done}), Mock(spec=["abort"])
    stream = Mock(**{"record_event.return_value": event})
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27))
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "9")  # torchft would set it for good
    monkeypatch.setattr(process_group, "read_page", lambda _: PAGE)
    device, limit = torch.device("cuda"), timedelta(seconds=9)
    group = process_group.connect_groups(device, limit, host="", lighthouse=str)
    group.member, group.members = "group-0:a", ["group-0:a", "group-1:b"]
    group.quorum, group._pg = 3, of_torch
    with nullcontext() if is_done else pytest.raises(SumGivenUp, match="group-1 fell silent"):
        group.await_device()
    assert of_torch.abort.call_count == (not is_done)
