"""What a trace says is sent is what really is sent: kinds, groups, numbers and bytes, on every rank, of gloo runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.ranks import Pool
from tests.support.tables import table
from tests.support.traces import (
    bytes_of,
    count_real_operations,
    count_real_transfers,
    counts_of,
    events_of,
    in_turn,
    job,
    trace_of,
    trace_ranks,
)
from titan.config.schema import JobConfig
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Launch, Trace, Transfer
from titan.sim.replay.queues import replay

REPLICAS, SHARDS, TP, CP, PP = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
)
KEEP, REDUCE = "fsdp_reshard_after_forward", "fsdp_reduce_gradients"
ROTATE, SCHEDULE = "context_parallel_rotate_method", "pipeline_parallel_schedule"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = table(__file__, "layouts")


@pytest.mark.parametrize(
    "name",
    in_turn(
        LAYOUTS,
        slow=[
            "FSDP2, ZeRO-2",
            "HSDP",
            "DDP",
            "TP",
            "CP allgather",
            "PP 1F1B",
            "PP interleaved",
            "FSDP2 x TP x PP",
        ],
    ),
)
def test_trace_sends_what_is_really_sent(name: str, pool: Pool) -> None:
    world, settings = LAYOUTS[name]
    # The last pipeline stage has a block less: every rank must have one of its own to compare.
    require_equal(job(parallelism=settings), world, pool)


def require_equal(config: JobConfig, world: int, pool: Pool) -> dict[int, Trace]:
    real = pool.run(world, count_real_transfers, config)
    traces = trace_ranks(config, world_size=world, ranks=range(world), processes=2)
    for rank, (counts, sizes) in enumerate(real):
        assert counts_of(traces[rank]) == counts, rank
        assert bytes_of(traces[rank]) == sizes, rank
        assert sum(counts.values()) > 5
    replay(traces, Cost(load_profile("h100-sxm")))  # what they send each other fits together
    return traces


def test_embeddings_of_further_targets_go_through_a_pipeline(pool: Pool) -> None:
    """Beside the activations, as large, and their gradients come back."""
    sent = []
    for modules in (0, 1):
        overrides = {"n_layers": 4, "num_mtp_modules": modules}
        config = job(parallelism={PP: 2}, model={"overrides": overrides})
        traces = require_equal(config, 2, pool).values()
        transfers = [t for trace in traces for t in events_of(trace.step, Transfer)]
        sent.append(sum(t.size_bytes for t in transfers if t.kind == "send"))
    assert sent[1] == 2 * sent[0] > 0


def test_what_waits_for_the_last_micro_batch(pool: Pool) -> None:
    """Replicas add up their sums once a step, and weights that stay are gathered once a step. Gradients are reduced once if asked."""

    def transfers(world: int, kind: str, **settings: Any) -> list[int]:
        found = []
        for accumulation in (1, 3):
            training = {"global_batch_size": world * 4 * accumulation}
            config = job(parallelism=settings, training=training)
            counts, _ = pool.run(world, count_real_transfers, config)[0]
            # Of the loss and the norm, all ranks add up.
            found.append(sum(n for (k, at), n in counts.items() if k == kind and len(at) == 2))
        return found

    once, three = transfers(4, "all_reduce", **{REPLICAS: 2})
    assert once == three > 4
    once, three = transfers(2, "all_gather", **{KEEP: "never"})
    assert once == three > 4
    once, three = transfers(2, "all_gather", **{KEEP: "always"})
    assert three == 3 * once
    for keep in ("always", "never"):
        once, three = transfers(2, "reduce_scatter", **{KEEP: keep})
        assert three == 3 * once > 12
        once, three = transfers(2, "reduce_scatter", **{KEEP: keep, REDUCE: "step"})
        assert once == three > 4


def test_bytes_of_a_step_with_weights_that_stay() -> None:
    """With 4 micro-batches: all weights in 16 bits once, and their gradients in 32 bits once if asked, else 4 times."""
    for reduce, times in (("step", 1), ("microbatch", 4)):
        settings = {KEEP: "never", REDUCE: reduce}
        config = job(parallelism=settings, training={"global_batch_size": 2 * 4 * 4})
        trace = trace_of(config, world=2)
        sent: Counter[tuple[str, str]] = Counter()
        for transfer in events_of(trace.step, Transfer):
            sent[transfer.kind, transfer.dtype] += transfer.size_bytes
        # The tiny Llama's parameters: embedding and output layer, four blocks, the last norm. In 16 bits.
        block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
        weights = 2 * (2 * 2048 * 64 + 4 * block + 64)
        assert sent["all_gather", "bfloat16"] == weights
        assert sent["reduce_scatter", "float32"] == times * 2 * weights
        assert sent["all_gather", "float32"] == 0


@pytest.mark.parametrize(
    ("world", "settings"),
    [(2, {}), (2, {KEEP: "never"}), (4, {REPLICAS: 2}), (4, {PP: 2, SCHEDULE: "1F1B"})],
    ids=str,
)
def test_sums_of_a_step_queue_behind_no_transfer(world: int, settings: dict[str, Any]) -> None:
    """The count of tokens comes before all transfers, and norm and loss after them. The trainer's flags follow those."""
    config = job(parallelism=settings, training={"global_batch_size": 8 * world})
    traces = trace_ranks(config, world_size=world)
    for rank in replay(traces, Cost(load_profile("h100-sxm"))).ranks.values():
        transfers = [(i, i.event) for i in rank.intervals if isinstance(i.event, Transfer)]
        large = [i for i, event in transfers if event.size_bytes > 1024]
        sums = [i for i, event in transfers if event.kind == "all_reduce" and i not in large]
        first, *last = sums
        assert len(large) > 5 and len(last) >= 2
        assert first.end <= min(i.start for i in large)
        assert max(i.end for i in large) <= min(i.start for i in last)


def test_one_rank_does_nothing_for_others(pool: Pool) -> None:
    """It casts weights once, and divides no gradient by the one rank that there is."""
    training = {"mixed_precision_param": "bfloat16"}
    counts = {
        policy: pool.run(
            1, count_real_operations, job(training=training, parallelism={KEEP: policy})
        )[0]
        for policy in ("default", "always")
    }
    assert not any(of["aten.div.Tensor"] for of in counts.values())
    # Of three blocks, one cast of all weights each: the last block stays in any case.
    more = counts["always"] - counts["default"]
    assert more == {"aten._foreach_copy_.default": 3}
    # The same in the simulator, whose tensors have no addresses that tell shared gradients.
    launches = events_of(trace_ranks(job(training=training), world_size=1)[0].step, Launch)
    assert not [e.kernel.name for e in launches if e.kernel.name == "aten::clone"]


SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS")  # fmt: skip


@pytest.mark.parametrize("schedule", in_turn(SCHEDULES, slow=SCHEDULES[1:]))
def test_schedules_run_to_their_end(schedule: str) -> None:
    """On two pipeline ranks each waits for the other all the time: sends and receives that torch issues together are one work."""
    config = job(batch=4, layers=8, parallelism={PP: 2, SCHEDULE: schedule})
    traces = trace_ranks(config, world_size=4, processes=2)
    transfers = [events_of(trace.step, Transfer) for trace in traces.values()]
    sent, received = ([t for t in side if t.peer >= 0] for side in transfers)
    assert [t.size_bytes for t in sent if t.kind == "send"] == [t.size_bytes for t in received if t.kind == "recv"]  # fmt: skip
    timeline = replay(traces, Cost(load_profile("h100-sxm")))
    assert 0 < timeline.bubble_fraction < 1


def test_alone_they_go_through_a_communicator_of_their_two_ranks() -> None:
    """As NCCL's do: what waits for one neighbour does not hold up what goes to the other."""
    config = job(batch=4, layers=8, parallelism={PP: 4, SCHEDULE: "Interleaved1F1B"})
    trace = trace_ranks(config, world_size=4, ranks=[1])[1]
    pairs = {
        t.peer: trace.groups[t.group] for t in events_of(trace.step, Transfer) if t.peer >= 0
    }
    # torch 2.11 issues even one message as a batch, which goes through the communicator of all stages.
    whole = torch.__version__.startswith("2.11.")
    expected = dict.fromkeys((0, 2), (0, 1, 2, 3)) if whole else {0: (0, 1), 2: (1, 2)}
    assert {peer: group.ranks for peer, group in pairs.items()} == expected
    assert {group.axes for group in pairs.values()} == {("pp",)}


def test_issued_together_is_one_work() -> None:
    """1F1B sends an activation and receives a gradient at once: each of the two ranks waits for the other's."""
    trace = trace_ranks(job(parallelism={PP: 2}), world_size=2, ranks=[0])[0]
    kinds: dict[int, list[str]] = {}
    for transfer in events_of(trace.step, Transfer):
        if transfer.peer >= 0:
            kinds.setdefault(transfer.work, []).append(transfer.kind)
    assert ["send", "recv"] in kinds.values()


def test_groups_have_their_axes() -> None:
    config = job(parallelism={TP: 2, PP: 2, CP: 2})
    trace = trace_ranks(config, world_size=16, ranks=[0])[0]
    axes = {group.axes: group.ranks for group in trace.groups.values() if len(group.ranks) > 1}
    assert axes["tp",] == (0, 1)
    assert axes["cp",] == (0, 2)
    assert axes["dp_shard", "cp"] == (0, 2, 4, 6)
    assert axes["pp",] == (0, 8)
