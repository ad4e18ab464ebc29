"""Replay: pipelines against theory, overlap and contention against arithmetic, and bounds that hold for any trace."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from tests.support.synthetic import FixedCost, kernel, launch, pipeline, trace, transfer
from titan.parallel.schedules import build_schedule
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import (
    AwaitEvent,
    AwaitStream,
    AwaitWork,
    Event,
    Group,
    Kernel,
    Launch,
    RecordEvent,
    Scope,
    Synchronize,
    Trace,
    Transfer,
)
from titan.sim.replay.queues import ReplayError, replay
from titan.sim.replay.timeline import Timeline

DP = Group("dp", ("dp_shard",), tuple(range(8)))
TP = Group("tp", ("tp",), tuple(range(8)))
FAR = Group("far", ("dp_replicate",), tuple(range(0, 64, 8)))
WORLD = Group("world", ("pp", "dp"), (0, 8))


def play(events: list[Event], *, steps: int = 1, host_us: float = 0.0) -> Timeline:
    return replay({0: trace(events, DP, TP, FAR)}, FixedCost(host_us=host_us), steps=steps)


def us(seconds: float) -> Any:
    """Microseconds, to be compared."""
    return pytest.approx(seconds * 1e6, abs=1e-3)


def check_sums(timeline: Timeline) -> None:
    """Every moment of every rank's step is accounted for, once."""
    for rank in timeline.ranks.values():
        parts = rank.compute_s + rank.peers_s + rank.copies_s + rank.host_s
        assert parts + sum(rank.exposed_s.values()) == pytest.approx(timeline.step_s)
        assert sum(rank.by_kind_s.values()) == pytest.approx(rank.compute_s)
        assert sum(rank.by_phase_s.values()) == pytest.approx(rank.compute_s)


# ------------------------------------------------------------------------------------------------------- pipelines


PLAIN = product(("GPipe", "1F1B"), (2, 4, 8), (1,), (1, 2, 3))
LOOPED = product(("Interleaved1F1B", "LoopedBFS"), (4,), (2, 3), (2,))


@pytest.mark.parametrize(("name", "p", "loops", "rounds"), [*PLAIN, *LOOPED])
def test_bubble(name: str, p: int, loops: int, rounds: int) -> None:
    m = p * rounds
    schedule = build_schedule(name, num_ranks=p, num_stages=p * loops, num_microbatches=m)
    timeline = replay(pipeline(schedule), FixedCost())
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (loops * m + p - 1))
    assert timeline.step_s == pytest.approx((loops * m + p - 1) * 3e-3)
    check_sums(timeline)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_bubble_of_zero_bubble_schedules(name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_stages=8, num_microbatches=8)
    timeline = replay(pipeline(schedule), FixedCost(), steps=1)
    assert timeline.bubble_fraction == pytest.approx(schedule.bubble_fraction())
    assert timeline.bubble_fraction < 3 / (2 * 8 + 3)  # interleaved 1F1B's
    check_sums(timeline)


def test_zero_bubble_is_zero_where_steps_run_into_each_other() -> None:
    """Without a barrier such as the norm of all gradients, ranks fill ZBV's last gap with the next step."""
    schedule = build_schedule("ZBVZeroBubble", num_ranks=4, num_stages=8, num_microbatches=8)
    assert replay(pipeline(schedule), FixedCost(), steps=2).bubble_fraction == pytest.approx(0)


def test_sends_cost_time() -> None:
    """Two stages, one microbatch: forward, send, forward, backward, send, backward."""
    schedule = build_schedule("GPipe", num_ranks=2, num_stages=2, num_microbatches=1)
    timeline = replay(pipeline(schedule, send_us=500), FixedCost())
    assert timeline.step_s == pytest.approx((1 + 0.5 + 1 + 2 + 0.5 + 2) * 1e-3)
    exposed = timeline.mean_by("exposed_s")
    # Groups of one rank each.
    assert exposed["pp+pp 0-1"] == exposed["pp+pp 1-0"] == pytest.approx(0.25e-3)
    check_sums(timeline)


def test_ranks_of_a_pipeline_meet_in_a_collective() -> None:
    def events(compute_us: int) -> list[Event]:
        norm = transfer(50, group="world", work=1, kind="all_reduce")
        return [launch(compute_us), norm, AwaitWork(0, 1), launch(10)]

    traces = {
        rank: trace(events(length), WORLD, rank=rank, world_size=16)
        for rank, length in ((0, 100), (8, 300))
    }
    timeline = replay(traces, FixedCost(), steps=1)
    assert us(timeline.step_s) == 360
    assert us(timeline.ranks[0].peers_s) == 200
    assert us(timeline.ranks[0].exposed_s["pp+dp"]) == 50
    assert us(timeline.ranks[8].peers_s) == 0
    check_sums(timeline)


def test_deadlock_names_what_each_rank_waits_for() -> None:
    pair = Group("pp", ("pp",), (0, 8))

    def receiving(rank: int) -> Trace:
        scope = Scope("forward", action=f"{rank // 8}F0")
        first = transfer(1, group="pp", work=1, kind="recv", peer=8 - rank, scope=scope)
        return trace([first, AwaitWork(0, 1)], pair, rank=rank, world_size=16)

    with pytest.raises(ReplayError) as error:
        replay({0: receiving(0), 8: receiving(8)}, FixedCost())
    assert str(error.value) == (
        "the step cannot end: rank 0 waits for a receive from rank 8 in group pp (0F0); "
        "rank 8 waits for a receive from rank 0 in group pp (1F0)"
    )
    with pytest.raises(
        ReplayError, match=r"a receive from rank 8 .* of which there is no trace"
    ):
        replay({0: receiving(0)}, FixedCost())


# ---------------------------------------------------------------------------------------------------------- overlap


def test_transfer_hides_behind_compute() -> None:
    timeline = play(
        [transfer(100, group="dp", work=1), launch(80), AwaitWork(0, 1), launch(20)]
    )
    assert us(timeline.step_s) == 120
    rank = timeline.ranks[0]
    assert us(rank.compute_s) == 100
    assert us(rank.exposed_s["dp_shard"]) == 20
    assert us(rank.overlapped_s["dp_shard"]) == 80
    check_sums(timeline)


def test_transfer_on_the_compute_stream_is_exposed() -> None:
    events: list[Event] = [
        launch(10),
        transfer(30, group="tp", work=1, detached=False),
        launch(10),
    ]
    rank = play(events).ranks[0]
    assert us(rank.exposed_s["tp"]) == 30
    assert us(rank.overlapped_s["tp"]) == 0


def test_idle_time_is_charged_to_the_end_of_the_chain() -> None:
    """FSDP's way: copy-in on stream 1, gather on stream 2, the compute stream waits for an event of stream 2."""
    events: list[Event] = [
        launch(30, stream=1),
        AwaitStream(2, 1),
        transfer(50, group="dp", work=1, stream=2, detached=False),
        RecordEvent(2, 7),
        AwaitEvent(0, 7),
        launch(100),
    ]
    timeline = play(events)
    rank = timeline.ranks[0]
    assert us(timeline.step_s) == 180
    assert us(rank.copies_s) == 30
    assert us(rank.exposed_s["dp_shard"]) == 50
    check_sums(timeline)
    lanes = [(i.lane, round(i.start * 1e6), round(i.end * 1e6)) for i in rank.intervals]
    assert lanes == [("stream 1", 0, 30), ("stream 2", 30, 80), ("compute", 80, 180)]


def test_events_are_those_last_recorded() -> None:
    events: list[Event] = [
        launch(50, stream=1),
        RecordEvent(1, 7),
        AwaitEvent(0, 7),
        launch(50, stream=1),
        RecordEvent(1, 7),
        launch(10),
        AwaitEvent(0, 9),  # never recorded: done
        launch(10),
    ]
    rank = play(events).ranks[0]
    kernels = [i for i in rank.intervals if i.lane == "compute"]
    # From 50 us on it shares the device with the second kernel of stream 1.
    assert [us(i.end) for i in kernels] == [70, 90]


def test_transfers_of_one_group_queue_and_those_of_one_work_do_not() -> None:
    queued = play([transfer(40, group="dp", work=1), transfer(40, group="dp", work=2), AwaitWork(0, 2)])  # fmt: skip
    assert us(queued.step_s) == 80
    together = play([
        transfer(40, group="dp", work=1), transfer(10, group="dp", work=1), AwaitWork(0, 1),
    ])  # fmt: skip
    # On the same links each has half the rate until the short one is through.
    assert us(together.step_s) == 50


def test_messages_of_one_work_pair_in_order() -> None:
    """Two sends to one peer pair with its receives in order."""
    traces = {}
    for rank, kind, peer in ((0, "send", 8), (8, "recv", 0)):
        sides = [transfer(n, group="pp", work=1, kind=kind, peer=peer) for n in (10, 30)]
        group = Group("pp", ("pp",), (0, 8))
        traces[rank] = trace([*sides, AwaitWork(0, 1)], group, rank=rank, world_size=16)
    # On one link each has half the rate: the short one ends at 20 us.
    assert us(replay(traces, FixedCost(), steps=1).step_s) == 40


@pytest.mark.parametrize(("group", "step_us"), [("dp", 150), ("far", 100)])
def test_transfers_share_links(group: str, step_us: int) -> None:
    """NVLink with those of another group, and not the network cards."""
    both: list[Event] = [transfer(100, group=group, work=1), transfer(50, group="tp", work=2)]
    timeline = play([*both, AwaitWork(0, 1), AwaitWork(0, 2)])
    assert us(timeline.step_s) == step_us


def test_kernels_share_the_device_and_host_copies_do_not() -> None:
    two = play([launch(60), launch(20, stream=1), AwaitStream(0, 1)])
    assert us(two.step_s) == 80
    copy = kernel(20)
    copy = Launch(type(copy)("copy", "host_copy", read_bytes=20), 1, Scope("forward"))
    beside = play([launch(60), copy, AwaitStream(0, 1)])
    assert us(beside.step_s) == 60


def test_the_slowest_device_copies_as_fast_as_the_others() -> None:
    profile = load_profile("h100-sxm").model_copy(update={"speed_deviation": 0.1})
    for kind, is_slower in (("pointwise", True), ("host_copy", False)):
        event = Launch(Kernel("work", kind, read_bytes=20), 0, Scope("forward"))
        timeline = replay({0: trace([event], world_size=512)}, FixedCost(profile), steps=1)
        assert (timeline.step_s > 21e-6) == is_slower


def slowing(*, compute: float = 1.0, transfer: float = 1.0, host_us: float = 0.0) -> FixedCost:
    """Return costs of a device whose compute and transfers have a share of their rates beside each other."""
    shares = {
        "compute_share_beside_transfer": compute,
        "transfer_share_beside_compute": transfer,
    }
    update = shares | {"speed_deviation": 0.0}
    profile = load_profile("h100-sxm").model_copy(update=update)
    return FixedCost(profile, host_us=host_us)


def test_compute_slows_down_beside_a_transfer() -> None:
    recorded = trace([transfer(40, group="dp", work=1), launch(100), AwaitWork(0, 1)], DP)
    timeline = replay({0: recorded}, slowing(compute=0.5), steps=1)
    assert us(timeline.step_s) == 120  # 40 at half the rate, 80 at the full one


def test_a_transfer_slows_down_beside_compute() -> None:
    """80 us of NVLink at half the rate for 100 us; the rest, 30 us, at the full one. A read needs no SMs."""
    cost = slowing(transfer=0.5)

    def step_us(sent: Transfer) -> float:
        recorded = trace([sent, launch(100), AwaitWork(0, 1)], DP, FAR)
        return replay({0: recorded}, cost, steps=1).step_s * 1e6

    assert step_us(transfer(80, group="dp", work=1)) == pytest.approx(130)
    assert step_us(transfer(80, group="far", work=1)) == pytest.approx(130)
    assert step_us(transfer(80, group="dp", work=1, kind="read", peer=3)) == pytest.approx(100)
    # While the compute stream itself runs a transfer, no kernel holds SMs.
    alone = trace([transfer(80, group="tp", work=1, detached=False)], TP)
    assert replay({0: alone}, cost, steps=1).step_s * 1e6 == pytest.approx(80)
    # Nor while it waits for the host, from 45 to 60: 80 us from 20 on, and 5 more for 10 at half the rate.
    late = trace([transfer(80, group="dp", work=1), launch(5), launch(5), AwaitWork(0, 1)], DP)
    cost = slowing(transfer=0.5, host_us=20)
    assert replay({0: late}, cost, steps=1).step_s * 1e6 == pytest.approx(105)


def test_an_average_rank_waits_for_the_slowest_and_the_busiest() -> None:
    """Kernels of 1,000 us on the slowest of 1,024 devices; its experts and its exchange have twice the mean of rows."""
    profile = load_profile("h100-sxm").model_copy(update={"compute_share_beside_transfer": 1.0})
    ep = Group("ep", ("ep",), tuple(range(8)))
    experts = Scope("forward", "layers.0.moe.experts")
    work = [launch(1000), transfer(100, group="dp", work=1), AwaitWork(0, 1)]
    work += [launch(1000, scope=experts), transfer(600, group="ep", kind="all_to_all", work=2)]
    events = [*work, AwaitWork(0, 2), launch(1000)]
    rank = replay(
        {0: trace(events, DP, ep, world_size=1024)}, FixedCost(profile), steps=1, busiest=2.0
    ).ranks[0]
    took, slowest = 1000 * profile.straggler(1024), 1 + profile.lag(1024)
    ahead = took - took / slowest
    # The last kernel is waited for at the first transfer of the next step.
    assert us(rank.waiting_s["all_gather"]) == 2 * ahead
    assert us(rank.waiting_s["all_to_all"]) == took - took / slowest / 2 + 300


# -------------------------------------------------------------------------------------------------------------- host


def test_the_host_keeps_its_lead_into_the_next_step() -> None:
    """Long kernels first, short ones last: the host falls behind only in the first step."""
    events: list[Event] = [*(launch(2) for _ in range(10)), *(launch(100) for _ in range(10))]
    first, later = (play(events, steps=n, host_us=5) for n in (1, 2))
    assert first.ranks[0].host_s > 20e-6
    assert us(later.step_s) == 1020
    assert us(later.ranks[0].host_s) == 0


def test_the_host_is_ahead_by_no_more_than_the_queue_holds() -> None:
    """2,000 kernels of 10 us, then 2,000 of 1: of the second kind, the host at 5 us hides about 1,024 behind the first."""
    long, short = (launch(10) for _ in range(2000)), (launch(1) for _ in range(2000))
    timeline = play([*long, *short], host_us=5)
    hidden = 2000 - timeline.ranks[0].host_s * 1e6 / 4
    assert timeline.step_s * 1e6 == pytest.approx(20_000 + 5 * (2000 - 1024), rel=0.02)
    assert 1000 < hidden < 1400


def test_reading_a_value_stops_the_host() -> None:
    events: list[Event] = [launch(100), Synchronize(0, "item"), launch(10)]
    timeline = play(events, host_us=5)
    assert us(timeline.step_s) == 5 + 100 + 5 + 10
    assert us(timeline.ranks[0].host_s) == 10
    for wait in (AwaitWork(0, 1, host=True), AwaitEvent(-1, 3), Synchronize(-1)):
        recorded: list[Event] = [transfer(100, group="dp", work=1), AwaitStream(1, 0), AwaitWork(1, 1), RecordEvent(1, 3)]  # fmt: skip
        assert us(play([*recorded, wait, launch(10)], host_us=5).step_s) == 5 + 100 + 5 + 10


# ------------------------------------------------------------------------------------------------------------ bounds


def random_trace(seed: int) -> list[Event]:
    """Kernels and transfers on several streams, with events, waits and stops of the host."""
    draw = random.Random(seed)
    events: list[Event] = []
    for number in range(200):
        stream = draw.choice([0, 0, 0, 1, 2])
        choice = draw.random()
        if choice < 0.6:
            events.append(launch(draw.randint(1, 50), stream=stream))
        elif choice < 0.8:
            group = draw.choice(["dp", "tp", "far"])
            size, detached = draw.randint(1, 80), draw.random() < 0.7
            events.append(transfer(size, group=group, work=number, stream=stream, detached=detached))  # fmt: skip
        elif choice < 0.85:
            events.append(RecordEvent(stream, draw.randint(0, 5)))
        elif choice < 0.9:
            events.append(AwaitEvent(stream, draw.randint(0, 5)))
        elif choice < 0.97:
            events.append(AwaitWork(stream, draw.randint(0, number), host=draw.random() < 0.1))
        else:
            events.append(AwaitStream(0, draw.choice([1, 2])))
    return [*events, Synchronize(-1)]


@pytest.mark.parametrize("seed", range(20))
def test_bounds(seed: int) -> None:
    events = random_trace(seed)
    timeline = play(events, host_us=3)
    check_sums(timeline)
    rank = timeline.ranks[0]
    work_us = [e.kernel.read_bytes for e in events if isinstance(e, Launch)]
    transfers = [e for e in events if isinstance(e, Transfer)]
    # The device does all kernels, the host issues everything, each lane does one thing after the other.
    assert timeline.step_s >= sum(work_us) * 1e-6 - 1e-9
    assert timeline.step_s >= (len(work_us) + len(transfers)) * 3e-6 - 1e-9
    assert len(rank.intervals) == len(work_us) + len(transfers)
    lanes: dict[str, float] = {}
    for interval in rank.intervals:
        assert interval.start >= lanes.get(interval.lane, 0.0) - 1e-12
        lanes[interval.lane] = interval.end
        event = interval.event
        size = event.kernel.read_bytes if isinstance(event, Launch) else event.size_bytes
        assert interval.end - interval.start >= size * 1e-6 - 1e-9
    total = sum(i.end - i.start for i in rank.intervals if isinstance(i.event, Transfer))
    result = sum(rank.exposed_s.values()) + sum(rank.overlapped_s.values())
    assert result == pytest.approx(total)
