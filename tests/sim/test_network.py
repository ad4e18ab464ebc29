"""Prices of transfers: published measurements, placement on nodes, sizes and kinds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean
from typing import Any

import pytest

from tests.support.tables import tabled
from titan.config.load import load_from_argv
from titan.parallel.traits import add_defaults
from titan.sim.price.network import (
    NIC_IN,
    NIC_OUT,
    NVLINK_IN,
    NVLINK_OUT,
    Dispatch,
    price_transfer,
)
from titan.sim.price.profiles import Profile, Tier, load_profile
from titan.sim.record.trace import CollectiveKind, Group, Scope, Transfer

H200, H100 = load_profile("h200-sxm"), load_profile("h100-sxm")
MIB = 2**20


def transfer_of(kind: CollectiveKind, size: int, *, peer: int = -1) -> Transfer:
    return Transfer(kind, "g", size, "bfloat16", 0, True, 0, Scope("forward"), peer)


def price(
    transfer: Transfer, ranks: Any, profile: Profile = H100, *, rank: int = 0, **how: Any
) -> Any:
    """Return the price of a transfer with no other on its links."""
    group = ranks if isinstance(ranks, Group) else Group("g", ("dp_shard",), tuple(ranks))
    return price_transfer(transfer, group, profile, rank=rank, **how)


def transfer_s(transfer: Transfer, ranks: Any, profile: Profile = H100) -> float:
    return price(transfer, ranks, profile).seconds


@tabled("mib, bus_gb_per_s")
def test_published_all_reduce(mib: int, bus_gb_per_s: float) -> None:
    """8 H200, NCCL 2.27 (ml-engineering), another measurement than the table's; below 16 MiB NCCL 2.29 is a third faster."""
    seconds = transfer_s(transfer_of("all_reduce", mib * MIB), range(8), H200)
    assert 1.75 * mib * MIB / seconds / 1e9 == pytest.approx(bus_gb_per_s, rel=0.13)


def test_fewer_ranks_have_less_of_nvlink() -> None:
    """Two H100 gather at 258 GB/s, four at 318, eight at 335; three lie between."""
    gather, rates = transfer_of("all_gather", 1 << 29), []
    for ranks in (2, 3, 4, 8):
        seconds = transfer_s(gather, range(ranks))
        rates.append((ranks - 1) / ranks * 2**29 / seconds / 1e9)
    assert rates[::3] == pytest.approx([258, 335], rel=0.01) and rates[2] == pytest.approx(
        318, rel=0.01
    )
    assert rates == sorted(rates)
    back = transfer_s(transfer_of("reduce_scatter", 1 << 29), range(8))
    assert back == pytest.approx(seconds, rel=0.01)


def test_a_profile_may_state_another_level_than_its_tables() -> None:
    slow = H100.model_copy(update={"ring_gb_per_s": H100.ring_gb_per_s / 2})
    for size in (MIB, 1 << 30):
        gather = transfer_of("all_gather", size)
        table, stated = (price(gather, range(8), p) for p in (H100, slow))
        assert stated.volume_s == pytest.approx(2 * table.volume_s)
        assert stated.latency_s == table.latency_s


def test_a_block_may_be_far_away() -> None:
    """A ring of two goes there and back, and so does a tree; a send only there."""
    link = Tier(nodes=2, latency_us=30_000)
    far = H100.model_copy(update={"network": (link,)})
    for between, times in (((0, 16), 2), ((0, 8), 0)):
        tensor = transfer_of("all_reduce", MIB)
        near_s, far_s = (transfer_s(tensor, Group("g", (), between), p) for p in (H100, far))
        assert far_s - near_s == pytest.approx(times * 0.03)
    for tensor in (transfer_of("send", MIB, peer=16), transfer_of("all_to_all", MIB)):
        both = Group("g", (), (0, 16))
        assert transfer_s(tensor, both, far) - transfer_s(tensor, both) == pytest.approx(0.03)


def test_placement_decides_which_links() -> None:
    gather = transfer_of("all_gather", 1 << 30)
    within = price(gather, range(8, 16), rank=8)
    strided = price(gather, range(0, 64, 8))
    filling = price(gather, range(64))
    assert within.links == (NVLINK_OUT, NVLINK_IN)
    assert strided.links == (NIC_OUT, NIC_IN)
    assert set(filling.links) == {NVLINK_OUT, NVLINK_IN, NIC_OUT, NIC_IN}
    # One card a group of eight on one node; eight cards together, of which 90% of 50 GB/s is left.
    assert strided.volume_s == pytest.approx(7 / 8 * 2**30 / 45e9)
    # Eight cards carry more than NVLink within the node.
    assert filling.volume_s == pytest.approx(63 / 64 * 2**30 / (H100.ring_gb_per_s * 1e9))
    # Two ranks of each node: two cards.
    pairs = Group("g", ("dp",), tuple(r for r in range(64) if r % 8 < 2))
    assert price(gather, pairs).volume_s == pytest.approx(15 / 16 * 2**30 / 90e9)


def test_small_messages_cost_latency_that_grows_with_the_ring() -> None:
    tiny = transfer_of("all_gather", 1024)
    seconds = [transfer_s(tiny, range(n)) for n in (2, 8, 64, 512)]
    assert seconds == sorted(seconds)
    assert seconds[:2] == pytest.approx([5.24e-6, 10.6e-6], rel=0.05)  # measured
    ring_s = (6.6 + 56 * 0.6 + 7 * 2.7) * 1e-6  # LL: a start, and hops within and between nodes
    assert seconds[2] == pytest.approx(ring_s, rel=0.05)


def test_trees_reduce_small_messages_across_nodes() -> None:
    seconds = transfer_s(transfer_of("all_reduce", 8), range(512))
    ring_s = (6.6 + 2 * (448 * 0.6 + 63 * 2.7)) * 1e-6
    assert seconds < ring_s / 5
    assert seconds == pytest.approx((6.8 + 2 * (7 * 0.6 + 6 * 5.0)) * 1e-6, rel=0.01)


def test_send_and_receive_use_one_direction() -> None:
    near = price(transfer_of("send", 1 << 30, peer=3), range(8))
    far = price(transfer_of("recv", 1 << 30, peer=0), range(16), rank=8)
    assert near.links == (NVLINK_OUT,)
    assert near.volume_s == pytest.approx(2**30 / (H100.p2p_gb_per_s * 1e9))
    assert far.links == (NIC_IN,)
    assert far.volume_s == pytest.approx(2**30 / 45e9)


def test_a_group_of_one_copies_within_the_device() -> None:
    alone = price(transfer_of("all_gather", 1 << 30), range(1))
    assert alone.links == () and alone.seconds < 1e-3


KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")  # fmt: skip
GROUPS = (range(64), range(0, 64, 8), range(8), range(0, 128, 16), range(256))


@pytest.mark.parametrize("kind", KINDS)
def test_tiers_without_oversubscription_are_flat(kind: CollectiveKind) -> None:
    tiers = H100.model_copy(update={"network": (Tier(nodes=2), Tier(nodes=8, rails=True))})
    for ranks in GROUPS:
        for size in (4096, 1 << 30):
            transfer = transfer_of(kind, size)
            flat = price(transfer, ranks)
            assert price(transfer, ranks, tiers) == flat
    for peer in (3, 9, 40, 200):
        send = transfer_of("send", 1 << 30, peer=peer)
        flat = price(send, range(256))
        assert price(send, range(256), tiers) == flat


def narrow(**settings: Any) -> Profile:
    return H100.model_copy(update={"network": (Tier(nodes=4, **settings),)})


@pytest.mark.parametrize("settings", [{"oversubscription": 8.0}, {"oversubscription": 2.0, "left": 0.25}])  # fmt: skip
def test_what_leaves_a_block_shares_its_way_out(settings: dict[str, Any]) -> None:
    """An eighth of the bandwidth of 32 cards is left: 4 cards'."""

    def slower(transfer: Transfer, ranks: range, rank: int = 0) -> float:
        thin = price(transfer, ranks, narrow(**settings), rank=rank)
        return thin.volume_s / price(transfer, ranks, rank=rank).volume_s

    gather = transfer_of("all_gather", 1 << 30)
    assert slower(gather, range(32)) == 1.0  # within the block
    # A ring over all nodes leaves a block once, where four nodes could: 8 x 4 cards' flows on 4 cards, of which one in four leaves.
    # Eight cards together carry a little more than NVLink.
    assert slower(gather, range(64)) == pytest.approx(2.0 * H100.ring_gb_per_s / 360)
    assert slower(gather, range(0, 64, 8)) == pytest.approx(2.0)
    # A group with one node in each block leaves it with all it sends.
    assert slower(gather, range(0, 128, 32)) == pytest.approx(8.0)
    assert slower(transfer_of("send", 1 << 30, peer=32), range(64)) == pytest.approx(8.0)
    assert slower(transfer_of("send", 1 << 30, peer=24), range(64)) == 1.0
    # Half of the rows leave the block, of those 7/8 that leave the node.
    assert slower(transfer_of("all_to_all", 1 << 30), range(64)) == pytest.approx(8 * 4 / 7)


def test_rails_meet_above_their_block() -> None:
    """Cards of one place share a switch; to another place within the block the way leads out."""
    rails = narrow(oversubscription=2.0, rails=True)
    along, beside = (transfer_of("send", 1 << 30, peer=peer) for peer in (8, 9))
    prices = [price(s, range(32), rails).volume_s for s in (along, beside)]
    assert prices[1] == pytest.approx(2 * prices[0])


# ---- DeepEP --------------------------------------------------------------------------------------

V3 = Dispatch(num_experts=256, top_k=8, num_groups=8, top_groups=4)


@pytest.mark.parametrize("dispatch", [Dispatch(8, 3), Dispatch(8, 1), Dispatch(8, 3, 4, 2), Dispatch(8, 2, 2, 1), Dispatch(12, 4, 4, 3)])  # fmt: skip
@pytest.mark.parametrize("places", [1, 2, 4])
def test_reach_is_what_counting_all_choices_gives(dispatch: Dispatch, places: int) -> None:
    experts, top_k, groups, top_groups = dispatch
    size = experts // groups
    reached = [
        any(expert * places // experts == place for expert in chosen)
        for kept in combinations(range(groups), top_groups)
        for chosen in combinations([g * size + n for g in kept for n in range(size)], top_k)
        for place in range(places)
    ]
    assert dispatch.reach(places) == pytest.approx(mean(reached))


def rows(size: int, ranks: int, **changes: Any) -> tuple[Transfer, Group]:
    transfer = replace(transfer_of("all_to_all", size), **changes)
    return transfer, Group("g", ("ep",), tuple(range(ranks)))


@pytest.mark.parametrize(
    ("ranks", "published"),
    [(16, 90), (32, 61), (32, 58), (64, 51)],  # its README (V2: EP 8 x 2, 8 x 4), docs/legacy.md (V1: EP 32, 64)
)  # fmt: skip
def test_published_rates_of_deepep(ranks: int, published: float) -> None:
    """Its authors count one copy to each node, also to the token's. No figure here was set with theirs (H800, ConnectX-7)."""
    size, nodes = 2**30, ranks // 8
    transfer, ep = rows(size, ranks)
    volume_s = price(transfer, ep, dispatch=V3).volume_s
    logical = size / 8 * nodes * V3.reach(nodes)
    assert logical / volume_s / 1e9 == pytest.approx(published, rel=0.04)


def test_one_copy_for_each_node_and_rank() -> None:
    """8 of 256 experts on four nodes: each node gets nearly every token once, in place of two copies."""
    transfer, ep = rows(2**30, 32)
    plain = price(transfer, ep)
    even = price(transfer, ep, dispatch=Dispatch(256, 8))
    assert even.links == plain.links and even.latency_s == plain.latency_s
    assert even.volume_s / plain.volume_s == pytest.approx(4 / 8 * Dispatch(256, 8).reach(4))
    # One expert a token: nothing is sent twice. One node: NVLink alone, and no second copy to a rank.
    one = price(transfer, ep, dispatch=Dispatch(256, 1))
    assert one == plain
    transfer, ep = rows(2**30, 8)
    within = price(transfer, ep, dispatch=Dispatch(256, 8)).volume_s
    rate = H100.all_to_all_gb_per_s * 1e9
    assert within == pytest.approx(7 * Dispatch(256, 8).reach(8) / 8 * 2**30 / rate)


def test_only_rows_of_experts_travel_by_deepep() -> None:
    counts, ep = rows(512, 32, dtype="int64")
    heads = transfer_of("all_to_all", 2**30)
    for transfer, of in ((counts, ep), (heads, range(32))):
        prices = [price(transfer, of, dispatch=d) for d in (None, V3)]
        assert prices[0] == prices[1]


def test_the_choice_is_the_models() -> None:
    def of(name: str, flavor: str) -> Dispatch | None:
        job = [
            "train_configs/llama3_8b.toml",
            f"--model.name={name}",
            f"--model.flavor={flavor}",
        ]
        return Dispatch.of(load_from_argv(job).model.sizes)

    assert of("deepseek_v3", "671B") == V3
    assert of("deepseek_v3", "16B") == Dispatch(64, 6)
    assert of("llama3", "8B") is None


def test_a_rack_of_nvlink_is_one_node() -> None:
    """64 experts' ranks of a GB200 NVL72 exchange over NVLink, those of eight nodes over their cards."""
    rack, nodes = load_profile("gb200"), load_profile("b200")
    exchange = transfer_of("all_to_all", 2**28)
    within, across = (transfer_s(exchange, range(64), p) for p in (rack, nodes))
    assert within == pytest.approx(2**28 * 63 / 64 / (rack.all_to_all_gb_per_s * 1e9), rel=0.45)
    assert across > 6 * within
    # The second rack is reached by cards.
    assert transfer_s(exchange, range(72, 136), rack) == pytest.approx(within)
    assert transfer_s(exchange, range(64, 128), rack) > 2 * within


def test_a_family_of_experts_without_groups_has_one() -> None:
    """Its sizes get the names that they lack, as `titan.config.model.family` adds them."""

    @dataclass(frozen=True)
    class Sizes:
        num_experts: int = 8
        top_k: int = 2

    add_defaults(sizes := Sizes())
    assert Dispatch.of(sizes) == Dispatch(8, 2)
