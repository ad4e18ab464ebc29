"""Replay of traces on a clock: which kernel or transfer runs when, and why a compute stream is ever idle.

All traced ranks run in one discrete-event simulation. A host issues work as its trace says, ahead
of the device, and stops only where the trace stops it (host.py). Each stream is a queue
(streams.py). The kernel or transfer at the head of a queue runs at a rate that depends on what runs
beside it, and is retimed whenever that changes:

    kernels     of one rank share the device equally. While a transfer runs, they lose the SMs and bandwidth that it holds
    transfers   of one rank share links equally. Latency is not shared

Detached transfers of a group queue on the group's own stream, as NCCL's do. Transfers that share a
work run together. A transfer between traced ranks begins when all of them have reached it
(rendezvous.py).

Example: the trace of one step launches kernels a and b, issues an all-gather between them, waits
for it and launches kernel c. The host takes 10 us to issue each of the four. A kernel takes 90 us
alone, and 90 / 0.9 = 100 us beside a transfer. The all-gather takes 20 us of latency and 120 us of
volume:

    us          host         compute stream                     stream of group "dp"
    0 to 10     issues a     waits for the host
    10 to 20    issues the   runs a, 90 us                      waits for the compute stream: the all-gather
    20 to 30    all-gather,                                     may read the result of a
    30 to 40    b and c
    100                      runs b, 100 us                     runs the all-gather, 140 us
    200                      waits for the stream of "dp"
    240                      runs c, 90 us
    330         the step ends: 10 us waiting for the host + 280 us of kernels + 40 us of exposed communication over "dp"

The step is replayed twice, and the second replay counts: by then the host is ahead of the device,
and pipeline stages wait for each other as they did in the step before. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan.sim.price.cost import Cost
from titan.sim.record.trace import COMPUTE_STREAM, Trace, no_garbage_collection

from .clock import Clock, ReplayError
from .host import Host
from .rendezvous import Rendezvous
from .streams import Device
from .timeline import Timeline, summarise, waiting

__all__ = ["ReplayError", "replay"]


@no_garbage_collection()
def replay(
    traces: Mapping[int, Trace], cost: Cost, *, steps: int = 2, busiest: float = 1.0
) -> Timeline:
    """Replay consecutive steps of the traced ranks, and return the last step.

    With a single step, hosts and devices start together, and the step ends when the last stream is
    done.

    Args:
        traces: traces by global rank: one rank of each pipeline stage.
        cost: prices of kernels and transfers.
        steps: number of steps to replay.
        busiest: tokens of the traced ranks' experts, as a multiple of the mean over ranks.

    Returns:
        The last step of each traced rank.

    Raises:
        ReplayError: ranks wait for each other forever, or for a rank without a trace.
    """
    return _timeline(_run(traces, cost, steps), steps, busiest)


@no_garbage_collection()
def step_seconds(traces: Mapping[int, Trace], cost: Cost) -> float:
    """Return the duration of the step of `replay`, without its parts."""
    return _duration(_run(traces, cost, steps=2), steps=2)


def _run(traces: Mapping[int, Trace], cost: Cost, steps: int) -> list[Host]:
    """Replay steps to their end, and return the hosts with their devices."""
    assert steps >= 1
    clock = Clock()
    rendezvous = Rendezvous(clock, cost, traces.keys())
    profile = cost.profile
    hosts = []
    for rank, trace in traces.items():
        assert rank == trace.rank
        hosts.append(
            Host(
                trace,
                Device(
                    rank,
                    clock,
                    trace.groups,
                    num_steps=steps,
                    speed_beside_transfer=profile.compute_share_beside_transfer,
                    speed_beside_compute=profile.transfer_share_beside_compute,
                    arrive=rendezvous.arrive,
                ),
                cost,
            )
        )
    clock.ready.extend(hosts)
    clock.run()
    # Nothing can happen any more. A rank that is not done waits for something that never comes.
    stuck = [host for host in hosts if host.waits_for or not host.device.is_done]
    if stuck:
        waits = (f"rank {host.device.rank} waits for {host.describe_wait()}" for host in stuck)
        raise ReplayError(f"the step cannot end: {'; '.join(waits)}")
    return hosts


def _timeline(hosts: Sequence[Host], steps: int, busiest: float) -> Timeline:
    """Return the last step of all ranks."""
    step_s = _duration(hosts, steps)
    # Charts count from the earliest beginning of a compute stream.
    origin = min(host.device.streams[COMPUTE_STREAM].cuts[-2][0] for host in hosts)
    ranks = {}
    for host in hosts:
        device, groups = host.device, host.trace.groups
        lanes = [*device.streams.values()]
        ranks[device.rank] = rank = summarise(
            device.rank,
            lanes,
            device.transfers,
            host.lane,
            groups,
            step_s=step_s,
            origin=origin,
        )
        slowest = 1 + host.cost.profile.lag(host.trace.world_size)
        rank.waiting_s = waiting(rank, groups, slowest, busiest)
    return Timeline(step_s, ranks)


def _duration(hosts: Sequence[Host], steps: int) -> float:
    """Return the duration of the last step: from the end of the one before to its own end, on the slowest rank each."""
    # Ranks need not begin together.
    begin, end = (max(h.device.end_of(n) for h in hosts) for n in (steps - 2, steps - 1))
    return end - begin
