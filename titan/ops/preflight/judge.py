"""Problems in the facts of all ranks, and the table of the facts.

A rank is an outlier if it is more than 10 % below the median of all ranks. On a CPU, whose cores
ranks share, the limit is a third of the median. On an accelerator, the median itself must reach 80
% of the hardware profile. A CPU's profile is only an order of magnitude, and is shown without a
check. The expected rates of collectives between hosts are the simulator's prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from titan.sim.price.network import price_transfer
from titan.sim.price.profiles import Profile, on_curve
from titan.sim.record.trace import Group, Scope, Transfer

from .measure import COPY, LINK, MATMUL, MESSAGE_BYTES, RankFacts

# A smaller share of the profile's figure means a fault, not noise.
_OF_PROFILE = 0.8
_NETWORK = "; NCCL_DEBUG=INFO prints which network NCCL takes (NET/IB, NET/Socket)"
# Clocks of one network agree far better than this.
_CLOCK_S = 1.0
# Bytes that measure.py's copy moves on an accelerator: 1 GiB, read and written.
_COPY_BYTES = 2**31


def figure(value: float) -> str:
    """Format a number with three digits, and without an exponent if it is large."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def expectation(what: str, facts: Sequence[RankFacts], profile: Profile | None) -> float | None:
    """Return the rate that the profile predicts; None without a prediction.

    Args:
        what: name of the rate.
        facts: facts of all ranks.
        profile: profile of the hardware.
    """
    if profile is None:
        return None
    if what.startswith(MATMUL):
        dtype = what.removeprefix(MATMUL)
        if (
            profile.name == "cpu" or dtype not in profile.peak_tflops
        ):  # ranks share a CPU's peak
            return None
        share = profile.matmul_share.get(dtype, profile.matmul_share["bfloat16"])
        return profile.peak_tflops[dtype] * share
    if what == COPY:
        return profile.memory_tb_per_s * 1e3 * on_curve(profile.memory_share, _COPY_BYTES)
    if what == LINK:
        return None
    if len({f.host for f in facts}) > 1:
        return _between_hosts(what, facts, profile)
    return profile.all_reduce_gb_per_s if what.endswith("all-reduce") else profile.ring_gb_per_s


def _between_hosts(what: str, facts: Sequence[RankFacts], profile: Profile) -> float | None:
    """Return the bus bandwidth that the simulator expects of a collective whose group may span hosts."""
    if profile.name == "cpu":
        return None
    axis, _, kind = what.rpartition(" ")
    by_host: dict[str, list[int]] = {}
    for f in facts:
        by_host.setdefault(f.host, []).append(f.rank)
    # Without the ranks of the axis, take one rank of each host.
    group = facts[0].groups.get(axis) or [ranks[0] for ranks in by_host.values()]
    per_node, of_host = profile.gpus_per_node, enumerate(by_host.values())
    places = {r: n * per_node + i for n, ranks in of_host for i, r in enumerate(ranks)}
    ranks = tuple(map(places.__getitem__, group))
    size, is_sum = MESSAGE_BYTES["other"], kind == "all-reduce"
    kind, scope = ("all_reduce" if is_sum else "all_gather"), Scope(phase="forward")
    transfer = Transfer(kind, axis, size, "float32", 0, False, 0, scope)
    price = price_transfer(transfer, Group(axis, (axis,), ranks), profile, rank=ranks[0])
    return (1 + is_sum) * size * (len(ranks) - 1) / len(ranks) / price.seconds / 1e9


def problems(
    facts: Sequence[RankFacts], profile: Profile | None, *, checkpoint_gib: float, num_kept: int
) -> list[str]:
    """Return problems, each as a line that names rank and host.

    Args:
        facts: facts of all ranks.
        profile: profile of the hardware.
        checkpoint_gib: size of a checkpoint.
        num_kept: checkpoints on the disk at once.
    """
    at = {f.rank: f"rank {f.rank} on {f.host}" for f in facts}
    is_cpu = facts[0].device == "CPU"
    least = 1 / 3 if is_cpu else 0.9
    # In the order of the report: differences, clocks, rates, disks.
    lines = list(_unequal(facts, at))
    lines += [
        f"{at[f.rank]}: its clock is {f.clock_s:+.1f} s off rank 0's; run locks and logs need clocks that agree (NTP)"
        for f in facts
        if abs(f.clock_s) > _CLOCK_S
    ]
    for what in facts[0].rates:
        unit, middle = _unit(what), median(f.rates[what] for f in facts)
        lines += [
            f"{at[f.rank]}: {what} {figure(f.rates[what])} {unit}, {1 - f.rates[what] / middle:.0%} below the median "
            f"{figure(middle)}{_clocks(f)}"
            for f in facts
            if f.rates[what] < least * middle
        ]
        # All ranks may be slow alike: a power limit, or links that fell back.
        expected = expectation(what, facts, profile)
        if not is_cpu and expected and middle < _OF_PROFILE * expected:
            is_between = len({f.host for f in facts}) > 1 and not what.startswith(
                (MATMUL, COPY)
            )
            hint = _NETWORK if is_between else ""
            lines.append(
                f"all ranks: {what} {figure(middle)} {unit}, where the hardware profile expects {figure(expected)}{hint}"
            )
    return lines + list(_disk(facts, at, checkpoint_gib, num_kept))


def _unit(what: str) -> str:
    return "TFLOP/s" if what.startswith(MATMUL) else "GB/s"


def _unequal(facts: Sequence[RankFacts], at: dict[int, str]) -> Iterable[str]:
    described = {f.rank: f.versions | {"device": f.device} for f in facts}
    for f in facts:
        if "driver_version" in f.gpu:
            described[f.rank]["driver"] = f.gpu["driver_version"]
    for what in sorted({key for versions in described.values() for key in versions}):
        by_rank = {rank: versions.get(what, "none") for rank, versions in described.items()}
        # The most frequent version counts as the right one.
        usual, _ = Counter(by_rank.values()).most_common(1)[0]
        for rank, value in by_rank.items():
            if value != usual:
                yield f"{at[rank]}: {what} is {value}, on most ranks {usual}"


def _clocks(facts: RankFacts) -> str:
    gpu = facts.gpu
    if "clocks.sm" not in gpu:
        return ""
    return f" (at {gpu['clocks.sm']} of {gpu['clocks.max.sm']} MHz, {gpu['temperature.gpu']} C)"


def _disk(
    facts: Sequence[RankFacts], at: dict[int, str], checkpoint_gib: float, num_kept: int
) -> Iterable[str]:
    needed_gib = checkpoint_gib * num_kept
    for f in facts:
        if f.disk is None:
            continue
        if f.disk.error:
            yield f"{at[f.rank]}: {f.disk.folder} cannot be written: {f.disk.error}"
        if f.disk.free_gib < needed_gib:
            yield (
                f"{at[f.rank]}: {f.disk.folder} has {figure(f.disk.free_gib)} GiB free; {num_kept} checkpoints of "
                f"{figure(checkpoint_gib)} GiB need {figure(needed_gib)}"
            )


def render(
    facts: Sequence[RankFacts], profile: Profile | None, *, checkpoint_gib: float
) -> str:
    """Format the table for a terminal.

    Args:
        facts: facts of all ranks.
        profile: profile of the hardware.
        checkpoint_gib: size of a checkpoint.
    """
    hosts = list(dict.fromkeys(f.host for f in facts))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    known = facts[0].versions | facts[0].gpu
    # Names with a dot are sensors, such as clocks.sm.
    versions = ", ".join(
        f"{name} {version}" for name, version in known.items() if "." not in name
    )
    rows = [
        f"{len(facts)} rank{'s'[: len(facts) > 1]} on {where}, {facts[0].device}; {versions}",
        "",
        f"{'':<30}{'worst':>10}{'':>10}{'median':>10}{'expected':>10}",
    ]
    for what in facts[0].rates:
        worst = min(facts, key=lambda f: f.rates[what])
        middle, expected = (
            median(f.rates[what] for f in facts),
            expectation(what, facts, profile),
        )
        rows.append(
            f"{what:<30}{figure(worst.rates[what]):>10}{f'rank {worst.rank}':>10}{figure(middle):>10}"
            f"{figure(expected) if expected else '-':>10}  {_unit(what)}"
        )
    clock = max(facts, key=lambda f: abs(f.clock_s))
    rows.append(
        f"{'clock, off rank 0':<30}{clock.clock_s:>10.3f}{f'rank {clock.rank}':>10}{'':>20}  s"
    )
    rows += [
        f"disk of {f.host}: {f.disk.free_gib:,.1f} GiB free for checkpoints of {figure(checkpoint_gib)} GiB, "
        f"{f.disk.write_gb_per_s:.2f} GB/s written"
        for f in facts
        if f.disk is not None and not f.disk.error
    ]
    return "\n".join(rows)
