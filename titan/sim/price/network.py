"""Seconds that collectives take, by a simplified form of NCCL's choice of algorithm and protocol.

A collective costs latency, which grows with the steps of its ring or tree, and volume over its bus
bandwidth. As NCCL does, the cheapest of the algorithms (ring, tree, in-switch) and protocols (LL,
LL128, Simple) is taken. NCCL's own latency constants (src/graph/tuning.cc, as in
torch._inductor.comm_analysis) give the published times of 8 H200 from 4 MiB to 1 GiB within 10%.
Ranks are placed on nodes in order. A group with m ranks on a node uses m network cards: the other
ranks' groups, which run the same collective at the same time, have their own cards. Beyond the
cards the network is flat, unless the profile names blocks of nodes with a narrower uplink
(`network`).

Dispatch and combine of experts' tokens are all-to-alls: each of a token's K copies travels
separately. With a `Dispatch` they are priced as DeepEP sends them: one copy goes over the card to
each distinct node that has one of the token's experts, and from there over NVLink to each distinct
rank. With K distinct experts drawn evenly from E, a node or rank that has u of them gets none with
probability C(E - u, K) / C(E, K). The rates are the profile's, and give DeepEP's published ones
(tests/sim/test_network.py).

This file prices a transfer alone. The replay lets transfers that run at the same time share the
links named here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, comb, log2
from typing import Any, NamedTuple

from titan.sim.record.trace import Group, Transfer

from .measured import BUS, tables
from .profiles import Profile

# Each direction of a link is a separate resource: links are full duplex.
LINKS = ("nvlink out", "nvlink in", "nic out", "nic in")
NVLINK_OUT, NVLINK_IN, NIC_OUT, NIC_IN = range(4)


class TransferPrice(NamedTuple):
    """Price of a transfer.

    Attributes:
        latency_s: time before and between the volume. No other transfer affects it.
        volume_s: time of the volume if no other transfer uses its links.
        links: links that the volume occupies.
    """

    latency_s: float
    volume_s: float
    links: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Time with no other transfer on the links."""
        return self.latency_s + self.volume_s


class Dispatch(NamedTuple):
    """Choice of experts for a token: top_k of num_experts, all in the top_groups best of num_groups groups."""

    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    @classmethod
    def of(cls, model: Any) -> Dispatch | None:
        """Return the choice that a model's config describes, or None for a model without experts."""
        if not model.num_experts:
            return None
        groups = (model.num_groups, model.top_groups) if model.num_groups else (1, 1)
        return cls(model.num_experts, model.top_k, *groups)

    def reach(self, places: int) -> float:
        """Return the probability that a token goes to one of `places` equal parts of the experts."""
        unit, size = self.num_experts // places, self.num_experts // self.num_groups
        drawn_from = self.top_groups * size
        # Groups within the part (at least a part of one), and how many of them the token may go to.
        inside = max(1, unit // size)
        ways = comb(self.num_groups, self.top_groups)
        missed = sum(
            comb(inside, opened)
            * comb(self.num_groups - inside, self.top_groups - opened)
            * comb(drawn_from - opened * min(unit, size), self.top_k)
            for opened in range(min(inside, self.top_groups) + 1)
        )
        return 1 - missed / (ways * comb(drawn_from, self.top_k))


class _Protocol(NamedTuple):
    """NCCL's protocol: microseconds to start, for each hop within a node and between nodes, and share of the bandwidth."""

    ring: tuple[float, float, float]
    tree: tuple[float, float, float]
    share: float


# Latencies: baseLat and hwLat. Shares: LL carries 4 bytes of data in 8 and waits for flags; LL128
# carries 120 in 128.
_PROTOCOLS = (
    # LL: for small messages; a flag for every 4 bytes.
    _Protocol(ring=(6.6, 0.6, 2.7), tree=(6.8, 0.6, 5.0), share=0.25),
    # LL128: a flag in every 128 bytes.
    _Protocol(ring=(14.0, 1.9, 4.0), tree=(14.0, 1.25, 8.5), share=0.92),
    # Simple: for large messages; ranks synchronise once for each chunk.
    _Protocol(ring=(8.4, 3.4, 14.0), tree=(8.4, 4.0, 14.0), share=1.0),
)
_TREE_SHARE = 0.85
"""Bandwidth of trees against rings between nodes (treeCorrectionFactor for large messages)."""


def price_transfer(
    transfer: Transfer,
    group: Group,
    profile: Profile,
    *,
    rank: int,
    dispatch: Dispatch | None = None,
) -> TransferPrice:
    """Return the price of a transfer.

    Args:
        transfer: the transfer.
        group: its process group.
        profile: the hardware.
        rank: rank that takes part in it.
        dispatch: choice of experts, if DeepEP dispatches the tokens.

    Returns:
        Latency and volume in seconds, and the links that the volume occupies.
    """
    if transfer.kind in ("send", "recv", "read"):
        return _price_p2p(transfer, rank, profile)
    size, ranks = transfer.size_bytes, len(group.ranks)
    if ranks == 1:
        # NCCL copies within the device, if it does anything at all: read once and write once, as
        # the largest kernels do.
        bytes_per_s = profile.memory_share[-1][1] * profile.memory_tb_per_s * 1e12
        return TransferPrice(profile.kernel_min_us * 1e-6, 2 * size / bytes_per_s, ())
    nodes = len({rank // profile.gpus_per_node for rank in group.ranks})
    # The counts that precede the tokens are integers.
    sends_tokens = "ep" in group.axes and "int" not in transfer.dtype
    dispatch = dispatch if sends_tokens else None
    if nodes == 1 and not dispatch:
        price = _measured(transfer, ranks, profile)
        if price is not None:
            return price
    if transfer.kind == "all_to_all":
        return _price_all_to_all(size, group.ranks, nodes, profile, dispatch)
    card, delay = _card(group.ranks, profile)
    bus = _bus(ranks, nodes, profile, card)
    # A ring passes each of the other ranks' parts along once. An all-reduce is a reduce-scatter and
    # an all-gather in one.
    turns = 2 if transfer.kind == "all_reduce" else 1
    volume = turns * ((ranks - 1) / ranks) * size
    if transfer.kind == "broadcast":
        volume = size  # every byte passes every rank once
    ways = [*_rings(ranks, nodes, turns, volume, bus, delay)]
    if transfer.kind == "all_reduce" and nodes > 1:
        ways += _trees(ranks, nodes, volume, bus, delay)
    # NCCL compares the total times of all pairs of algorithm and protocol in the same way.
    latency, volume_s = min(ways, key=sum)
    return TransferPrice(latency, volume_s, _links(nodes, ceil(ranks / nodes)))


def _measured(transfer: Transfer, ranks: int, profile: Profile) -> TransferPrice | None:
    """Return the price of a collective within a node by the card's tables; None if they lack it."""
    if not profile.measured:
        return None
    measured = tables(profile.measured)
    found = measured.collective_s(transfer.kind, ranks, transfer.size_bytes)
    if found is None:
        return None
    # A profile may state another bandwidth than its tables: the shape is theirs, the level its own.
    figure = next(
        (name for name, (kind, _) in BUS.items() if kind == transfer.kind), "ring_gb_per_s"
    )
    level = measured.bus_gb_per_s(figure) / getattr(profile, figure)
    return TransferPrice(found[0], found[1] * level, _links(1, ranks))


def _links(nodes: int, members: int) -> tuple[int, ...]:
    """Return the links that a group uses, with `members` ranks on the fullest node."""
    # One node has only NVLink. A group of one rank a node has only its network card.
    if nodes == 1:
        return (NVLINK_OUT, NVLINK_IN)
    across = (NIC_OUT, NIC_IN)
    return across if members == 1 else (*across, NVLINK_OUT, NVLINK_IN)


def _card(ranks: Sequence[int], profile: Profile) -> tuple[float, float]:
    """Return the bandwidth of a card in a ring or tree over these ranks, and the delay of a hop between blocks of nodes.

    The bandwidth is in bytes per second. The delay is the mean over hops between nodes, in
    microseconds. One flow in every n of a ring leaves a block, if the group has n nodes in the
    block, and so do the rings of the block's other ranks: oversubscription costs nothing up to n.
    """
    nodes = {rank // profile.gpus_per_node for rank in ranks}
    slowest, delay = 1.0, 0.0
    for tier in profile.network:
        blocks = len({node // tier.nodes for node in nodes})
        if blocks > 1:
            slowest = min(slowest, len(nodes) / blocks * tier.share)
            delay += blocks / len(nodes) * tier.latency_us
    return slowest * profile.card_bytes_per_s, delay


def _bus(ranks: int, nodes: int, profile: Profile, card: float) -> float:
    """Return the bytes per second past each rank of a ring: cards in parallel, but not faster than within the node."""
    within = profile.ring_gb_per_s * 1e9
    if nodes == 1:
        return within
    cards = ceil(ranks / nodes) * card
    # A ring that enters and leaves a node over the cards still passes NVLink between its members.
    return cards if ranks == nodes else min(within, cards)


def _rings(
    ranks: int, nodes: int, turns: int, volume: float, bus: float, delay: float
) -> Iterator[tuple[float, float]]:
    """Yield latency and volume of a ring in each protocol."""
    steps = turns * (ranks - 1)
    # `nodes` of the `ranks` hops of one turn around the ring cross to the next node.
    between = 0 if nodes == 1 else nodes * steps // ranks
    for protocol in _PROTOCOLS:
        start, hop, far_hop = protocol.ring
        latency = start + (steps - between) * hop + between * (far_hop + delay)
        yield latency * 1e-6, volume / (protocol.share * bus)


def _trees(
    ranks: int, nodes: int, volume: float, bus: float, delay: float
) -> Iterator[tuple[float, float]]:
    """Yield latency and volume of a double binary tree over several nodes, with chains in them."""
    # Up the tree and down again. NCCL charges the chain within a node for each of its hops.
    for protocol in _PROTOCOLS:
        start, hop, far_hop = protocol.tree
        latency = start + 2 * ((ranks / nodes - 1) * hop + log2(nodes) * (far_hop + delay))
        yield latency * 1e-6, volume / (protocol.share * _TREE_SHARE * bus)


def _price_all_to_all(
    size: float, group: Sequence[int], nodes: int, profile: Profile, dispatch: Dispatch | None
) -> TransferPrice:
    """Price an all-to-all, in which every rank sends 1/ranks of its tensor to every rank.

    Bytes that leave the node pass the rank's own card. Bytes that leave a block of nodes pass its
    uplink.
    """
    ranks = len(group)
    # NCCL builds all-to-all from sends and receives, which use the Simple protocol only.
    start, hop, far_hop = _PROTOCOLS[-1].ring
    members = ceil(ranks / nodes)
    # Bytes to members of the same node go over NVLink, all others over the card, at the same time.
    near, far = size * (members - 1) / ranks, size
    if dispatch:
        # One copy for each rank, but none for the rank that a node's copy arrives at; and one copy
        # for each node.
        copies = size / dispatch.top_k
        near = copies * (ranks - nodes) * dispatch.reach(ranks)
        far = copies * nodes * dispatch.reach(nodes)
    within = near / (profile.all_to_all_gb_per_s * 1e9)
    card = profile.card_bytes_per_s
    across = far * (1 - members / ranks) / card
    for tier in profile.network:
        blocks = len({rank // (profile.gpus_per_node * tier.nodes) for rank in group})
        across = max(across, far * (1 - 1 / blocks) / (card * tier.share))
        far_hop += tier.latency_us * (blocks > 1)
    latency = start + hop + (far_hop if nodes > 1 else 0.0)
    return TransferPrice(latency * 1e-6, max(within, across), _links(nodes, members))


def _price_p2p(transfer: Transfer, rank: int, profile: Profile) -> TransferPrice:
    """Price one side of a send and receive, or a read."""
    # Sends and receives use the Simple protocol.
    start, hop, far_hop = _PROTOCOLS[-1].ring
    near = rank // profile.gpus_per_node == transfer.peer // profile.gpus_per_node
    sends = transfer.kind == "send"
    if near:
        latency, bandwidth = start + hop, profile.p2p_gb_per_s * 1e9
        link = NVLINK_OUT if sends else NVLINK_IN
    else:
        latency, bandwidth = start + far_hop, profile.card_bytes_per_s
        size = profile.gpus_per_node
        for tier in profile.network:
            block = size * tier.nodes
            beside = tier.rails and rank % size != transfer.peer % size
            if beside or rank // block != transfer.peer // block:
                bandwidth = min(bandwidth, tier.share * profile.card_bytes_per_s)
                latency += tier.latency_us
        link = NIC_OUT if sends else NIC_IN
    return TransferPrice(latency * 1e-6, transfer.size_bytes / bandwidth, (link,))


def card_bytes(
    transfer: Transfer, group: Group, profile: Profile, *, dispatch: Dispatch | None, rank: int
) -> float:
    """Return the bytes of a transfer that a rank's own network card sends: 0 within a node."""
    size, ranks, on_node = transfer.size_bytes, len(group.ranks), profile.gpus_per_node
    if transfer.kind in ("send", "recv", "read"):
        return size * (transfer.kind == "send" and rank // on_node != transfer.peer // on_node)
    nodes = len({rank // on_node for rank in group.ranks})
    if nodes == 1:
        return 0.0
    members = ceil(ranks / nodes)
    if transfer.kind == "all_to_all":
        if dispatch and "ep" in group.axes and "int" not in transfer.dtype:
            size = size / dispatch.top_k * nodes * dispatch.reach(nodes)
        return size * (1 - members / ranks)
    # A ring enters and leaves each node once. Its members' cards share what leaves.
    turns = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    return size * turns.get(transfer.kind, (ranks - 1) / ranks) / members
