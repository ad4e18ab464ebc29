"""Cost of replica groups for `titan sim`: the bytes that groups send each other, and the time that a step waits (README.md).

The simulated job is one group. Rank r of each group takes part in a ring all-reduce with rank r of the other groups, which
network.py prices like any other: gradients after the backward pass, in buckets, and two numbers.

The same job as HSDP has as many replicas in place of groups, over the same link. The lighthouse's quorum is not priced.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from titan.config.schema import JobConfig
from titan.sim.price.network import price_transfer
from titan.sim.price.profiles import Profile, Tier
from titan.sim.record.trace import Allocate, Group, Scope, Trace, Transfer
from titan.sim.report.whole_run import BYTES
from titan.sim.simulate import Facts, Simulation, simulate

from .section import groups_of, link_of
from .tensor_lists import in_buckets


def group_facts(simulation: Simulation, **how: Any) -> Facts:
    """Return the facts `groups` of a job with replica groups, or {} for another job. docs/simulator.md defines every field.

    Args:
        simulation: the simulation of one group.
        **how: arguments of `simulate`, for the same job as HSDP.
    """
    config, step_s = simulation.config, simulation.timeline.step_s
    section, training, profile = groups_of(config), config.training, linked(simulation)
    if not section.enable:
        return {}
    count = section.replica_groups
    link = profile.network[-1]
    stride = profile.gpus_per_node * link.nodes
    group = Group("groups", ("groups",), tuple(range(0, count * stride, stride)))

    def all_reduce_s(size: int) -> float:
        """Return the seconds of an all-reduce over the groups."""
        return price_transfer(
            Transfer("all_reduce", group.name, size, training.dtype, 0, True, 0, Scope("clip")),
            group,
            profile,
            rank=0,
        ).seconds

    # Pipeline ranks synchronize at the same time, so the rank with most parameters decides.
    sums = max((_sums(trace, config) for trace in simulation.traces.values()), key=sum)
    exposed_s = sum(map(all_reduce_s, sums))
    return {
        "groups": {
            "replica_groups": count,
            "link_gbit_per_s": 8 * profile.nic_gb_per_s / link.oversubscription,
            "link_latency_us": link.latency_us,
            "sent_bytes": round(2 * (count - 1) / count * sum(sums)),
            "exposed_s": exposed_s,
            "step_time_s": step_s + exposed_s,
            "tokens_per_s": count * simulation.tokens_per_step / (step_s + exposed_s),
            "hsdp": _hsdp(simulation, **how | {"profile": profile}),
        }
    }


def linked(simulation: Simulation) -> Profile:
    """Return the hardware of all groups: no two groups share a node, and one link joins each group to the others."""
    section, size, profile = (
        link_of(simulation.config),
        simulation.world_size,
        simulation.profile,
    )
    per_node, card = min(profile.gpus_per_node, size), 8 * profile.nic_gb_per_s
    link = Tier(
        nodes=ceil(size / per_node),
        oversubscription=max(1.0, card / (section.group_link_gbit_per_s or card)),
        latency_us=section.group_link_latency_us,
    )
    network = (*profile.network, link)
    return profile.model_copy(update={"gpus_per_node": per_node, "network": network})


def _sums(trace: Trace, config: JobConfig) -> list[int]:
    """Return the bytes of each sum of a rank in a step."""
    width = BYTES[config.training.dtype]
    # A tensor without a module is a table of positions.
    tensors = (e for e in trace.setup if isinstance(e, Allocate) and e.scope.module)
    buckets = in_buckets((e.size_bytes for e in tensors), lambda size: size // width)
    # Counted tokens, and the loss.
    return [*map(sum, buckets), 4, 4]


def _hsdp(simulation: Simulation, **how: Any) -> Facts | None:
    """Return time and speed of the job with replicas in place of groups. None: replicas would not be on the groups' ranks."""
    config, layout, size = simulation.config, simulation.layout, simulation.world_size
    count, section = groups_of(config).replica_groups, config.parallelism
    # Pipeline stages come before replicas in the order of ranks.
    if layout.pp > 1 or size % how["profile"].gpus_per_node:
        return None
    degree = {"data_parallel_replicate_degree": count * layout.dp_replicate}
    sections = {
        "parallelism": section.model_copy(update=degree),
        "fault_tolerance": groups_of(config).model_copy(update={"enable": False}),
    }
    how["world_size"] = count * size
    hsdp = simulate(config.model_copy(update=sections), **how)
    speed = hsdp.tokens_per_s_per_gpu * hsdp.world_size
    return {"step_time_s": hsdp.timeline.step_s, "tokens_per_s": speed}
