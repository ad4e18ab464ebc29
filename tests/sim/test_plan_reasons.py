"""`titan plan` says why: bytes over network cards, lost time, kinds of layout, the price of the fixed batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.sim.test_network import transfer_of
from tests.support.jobs import ROOT
from titan.config.load import load_from_argv
from titan.sim.price.network import Dispatch, card_bytes, price_transfer
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import Group
from titan.sim.search.candidates import LayoutSearch, Point
from titan.sim.search.plan import Plan, _remarks, cannot_tell_apart, kinds_first, plan
from titan.sim.search.reasons import lost_to, parts, reason
from titan.sim.search.variants import Variant, simulate_variants
from titan.sim.simulate import Facts

CONFIGS = ROOT / "train_configs"
H100 = load_profile("h100-sxm")
ETHERNET = H100.model_copy(update={"nic_gb_per_s": 1.5625})


@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [
        # 16 ranks on two nodes: 15 of 16 parts leave a node over the cards of its eight ranks.
        ("all_gather", range(16), 15 / 16 / 8),
        ("reduce_scatter", range(16), 15 / 16 / 8),
        ("all_reduce", range(0, 16, 8), 2 * 1 / 2),  # one rank of each node, both ways
        ("all_gather", range(8), 0),  # in one node
        ("all_to_all", range(16), 8 / 16),  # half of the rows go to the other node
        ("broadcast", range(16), 1 / 8),
    ],
)
def test_bytes_of_a_card_by_hand_and_by_the_price(kind: Any, ranks: range, sent: float) -> None:
    size, group = 2**34, Group("g", ("dp_shard",), tuple(ranks))
    found = card_bytes(transfer_of(kind, size), group, ETHERNET, dispatch=None, rank=0)
    assert found == pytest.approx(sent * size)
    if sent and kind != "all_reduce":  # whose tree moves less than its ring
        price = price_transfer(transfer_of(kind, size), group, ETHERNET, rank=0)
        card_s = found / ETHERNET.card_bytes_per_s
        assert price.volume_s == pytest.approx(card_s, rel=1e-6)


def test_bytes_of_a_card_between_stages_and_of_deepep() -> None:
    group = Group("g", ("pp",), (0, 8))
    for kind, peer, sent in (("send", 8, 100), ("recv", 8, 0), ("send", 4, 0)):
        one = transfer_of(kind, 100, peer=peer)
        assert card_bytes(one, group, H100, dispatch=None, rank=0) == sent
    # One of 16 experts for each token: half of them are on the other node, as without DeepEP.
    experts = Group("g", ("ep",), tuple(range(16)))
    for dispatch in (None, Dispatch(16, 1)):
        found = card_bytes(
            transfer_of("all_to_all", 160), experts, H100, dispatch=dispatch, rank=0
        )
        assert found == pytest.approx(80)
    # With two experts for each token, a node gets a single copy: 1 - C(8, 2) / C(16, 2) of them, over two.
    found = card_bytes(
        transfer_of("all_to_all", 160), experts, H100, dispatch=Dispatch(16, 2), rank=0
    )
    assert found == pytest.approx(160 / 2 * (1 - 28 / 120))


SMALL = f"{CONFIGS}/debug_model.toml --model.overrides.n_layers=2 --training.local_batch_size=2 --training.global_batch_size=8".split()
PP = {
    "parallelism.pipeline_parallel_degree": "2",
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.data_parallel_shard_degree": "2",
    "training.local_batch_size": "4",
}


@pytest.fixture(scope="module")
def two_nodes() -> tuple[Variant, Variant]:
    """FSDP 4 and PP 2 x FSDP 2, on two nodes of two devices, with hosts that take next to no time."""
    hosts = {"host_tiny_us": 1e-3, "launch_us": 1e-3, "launch_transfer_us": 1e-3}
    nodes = ETHERNET.model_copy(update={"gpus_per_node": 2, **hosts})
    job, pp = simulate_variants(SMALL, [{}, PP], world_size=4, profiles=[nodes], processes=1)
    return job, pp


def test_the_reason_has_the_bytes_and_the_seconds_of_the_facts(
    two_nodes: tuple[Variant, Variant],
) -> None:
    job, pp = (variant.facts for variant in two_nodes)
    for facts in (job, pp):
        assert sum(parts(facts).values()) == pytest.approx(facts["step_time_s"])
    # All parameters are gathered in bf16, the first of two blocks again, and all gradients reduced in fp32, by rings with
    # two members on a node.
    model = load_from_argv(SMALL).model.sizes
    by_axis = job["comm"]["by_axis"]
    card = by_axis["dp_shard"]["card_bytes"]
    moved = (2 + 4) * model.num_params + 2 * model.num_block_params
    assert card == pytest.approx(moved * 3 / 4 / 2, rel=1e-3)
    # A stage sends activations forward and another their gradients back: 4 sequences in bf16, half of both on average.
    rows = pp["comm"]["by_axis"]
    length = load_from_argv(SMALL).training.seq_len
    sent = rows["pp"]["card_bytes"]
    assert sent == pytest.approx(4 * length * model.dim * 2, abs=16)  # and norms
    assert rows["dp_shard"]["card_bytes"] == 0 < rows["dp_shard"]["bytes"]
    text = reason(pp, job)
    assert text.startswith(
        "PP crosses nodes, FSDP stays inside them: a network card sends "
        f"{sent / 1e3:.3g} kB a step instead of {card / 1e3:.3g} kB; "
    )
    saved = (by_axis["dp_shard"]["exposed_s"] - rows["dp_shard"]["exposed_s"]) * 1e3
    assert f"waits {saved:.1f} ms less for dp_shard" in text
    assert reason(job).startswith("FSDP crosses nodes: a network card sends ")


def fake(**changes: float) -> Facts:
    """Facts of a step of 10 s."""
    axes = {"dp_shard": 2.0, "tp": 0.05, "pp": 0.5} | {
        k: v for k, v in changes.items() if k == "tp"
    }
    rows = {a: {"exposed_s": s, "bytes": 10**9, "card_bytes": 0} for a, s in axes.items()}
    times = {"compute_s": 6.0, "host_s": 0.45, "copies_s": 0.0, "peers_s": 1.0}
    by_phase = {"forward": 2.0, "backward": 3.0, "recompute": 1.0}
    time = times | {key: value for key, value in changes.items() if key in times}
    return {
        "time": time | {"by_phase_s": by_phase},
        "comm": {"by_axis": rows},
        "per_rank": [{}, {}],
        "layout": "pp 2 x dp_replicate 1 x dp_shard 8 x cp 1 x tp 1",
        "sequences_at_once": 1,
    }


def test_what_a_step_loses_time_to() -> None:
    # The pipeline's transfers are a part of its bubble. What is below 1% is left out.
    assert lost_to(fake(), most=9) == "dp_shard 20%, pp bubble 15%, recomputation 10%, host 4%"
    assert lost_to(fake()) == "dp_shard 20%, pp bubble 15%, recomputation 10%"
    slower: Facts = fake(compute_s=6.5, peers_s=0.5, tp=1.05) | {"sequences_at_once": 4}
    slower["comm"]["by_axis"]["tp"]["bytes"] = 4 * 10**9
    assert reason(slower, fake()) == (
        "waits 1.00 s more for tp (4 GB instead of 1 GB), kernels take 500.0 ms more (sequences at a time: 4 instead of 1), "
        "500.0 ms less of pp bubble"
    )


def test_the_page_names_causal_utilization_in_either_convention() -> None:
    one, two = (
        simulate_variants(
            [*SMALL, "--training.seq_len=2048"],
            [{"metrics.mfu_convention": convention}],
            world_size=2,
            profiles=[H100],
            processes=1,
        )[0].facts
        for convention in ("full", "causal")
    )
    assert two["mfu"] == two["mfu_causal"] < one["mfu"]
    assert one["mfu_causal"] == pytest.approx(two["mfu"])


# ---- kinds ---------------------------------------------------------------------------------------


def search(job: str, *overrides: str, world_size: int, profile: Profile = H100) -> LayoutSearch:
    argv = [str(CONFIGS / f"{job}.toml"), *overrides]
    return LayoutSearch(argv, load_from_argv(argv), profile, world_size=world_size)


def test_a_kind_is_the_axes_in_use_and_which_of_them_cross_nodes() -> None:
    finder = search("llama3_8b", world_size=16)
    point = Point(replicate=1, shard=16, tp=1, cp=1, pp=1, batch=1)
    kinds = {
        point: {"dp_shard": True},
        replace(point, shard=8, pp=2): {"dp": False, "pp": True},
        replace(point, shard=2, replicate=4, pp=2): {"dp": False, "pp": True},
        replace(point, shard=4, pp=2, tp=2): {"tp": False, "dp": False, "pp": True},
        replace(point, shard=8, replicate=2): {"dp_replicate": True},
        replace(point, shard=1, replicate=16): {"dp_replicate": True},
        replace(point, shard=2, tp=8): {"tp": False, "dp_shard": True},
        replace(point, ep=8): {"dp_shard": True, "ep": False},
        replace(point, ep=16): {"dp_shard": True, "ep": True},
    }
    for one, expected in kinds.items():
        assert dict(finder.kind(one)) == expected
    assert finder.kind(replace(point, batch=4, recompute="full", zero=2)) == finder.kind(point)


def test_slow_ethernet_explores_pipelines_over_the_nodes() -> None:
    """Also without TP. Each promising kind has its best candidate before any has a second one."""
    slow = load_profile("a100-80g").model_copy(update={"nic_gb_per_s": 1.5625})
    finder = search("llama3_8b", world_size=16, profile=slow)
    first = finder.first(16)
    assert any((p.pp, p.shard, p.tp, p.replicate) == (2, 8, 1, 1) for p in first)
    tried = {finder.kind(point) for point in first}
    # The kinds that were not simulated are slower by the formula than the best of those that were.
    untried = finder.untried()
    assert not tried & {finder.kind(point) for point in untried}
    assert [finder.seconds(p) for p in untried] == sorted(map(finder.seconds, untried))
    assert min(map(finder.seconds, first)) <= finder.seconds(untried[0])


def test_every_degree_of_expert_parallelism_is_tried_first() -> None:
    finder = search("qwen3_30b_a3b", "--compile.enable=false", world_size=32)
    own = finder.own()
    assert own is not None and own.ep == 8
    finder.seen.add(own)
    assert {point.ep for point in finder.single_changes(own)} >= {1, 2, 4, 16, 32}


def test_the_best_of_each_kind_comes_before_variants() -> None:
    finder = search("llama3_8b", world_size=16)
    fsdp = Point(replicate=1, shard=16, tp=1, cp=1, pp=1, batch=1)
    points = [fsdp, replace(fsdp, recompute="full"), replace(fsdp, zero=2), replace(fsdp, shard=8, pp=2)]  # fmt: skip
    points += [replace(fsdp, shard=2, tp=8), replace(fsdp, shard=8, replicate=2)]
    speeds = (100.0, 99.0, 98.0, 70.0, 40.0, 90.0)
    shares = {"interval": {"shares": {"matmuls": 1.0}}}
    facts = [
        {"tokens_per_s_per_gpu": s, "fits": s != 90, "tight": s == 90} | shares for s in speeds
    ]
    ranked = [(p, Variant({}, "h100", f)) for p, f in zip(points, facts, strict=True)]
    order = [variant.speed for _, variant in kinds_first(finder, ranked)]
    assert order == [100, 70, 99, 98, 40, 90]  # slow kinds after variants, tight ones last
    assert cannot_tell_apart(facts[0], facts[1]) and not cannot_tell_apart(facts[0], facts[3])


def test_the_remark_counts_candidates_and_not_the_job() -> None:
    finder = search("llama3_8b", world_size=16)
    own = finder.own()
    assert own is not None
    others = [point for point in finder.points if point != own][:6]
    finder.seen |= {own, *others}
    fits, tight = {"fits": True, "tight": False}, {"fits": False, "tight": True}
    speed = {"tokens_per_s_per_gpu": 100.0}
    # The job runs, three others fit, one is tight, and two do not run.
    ranked = [(own, fits), *((point, fits) for point in others[:3]), (others[3], tight)]
    variants = [(point, Variant({}, "h100-sxm", speed | facts)) for point, facts in ranked]
    for shown in (variants, variants[1:]):  # the job is among them only if nothing is faster
        remark = next(_remarks(finder, Plan(variants[0][1], shown, {}), wall_s=12.0))
        assert "\n6 candidates simulated in 12 s: 3 fit, 1 tight, 2 do not run. " in remark


# ---- the price of the fixed batch ----------------------------------------------------------------


def simulated(job: Any, settings: Iterable[dict[str, str]], **_: Any) -> list[Variant]:
    """A stand-in for the simulator: larger batches are faster, and need 10 GiB for each sequence."""
    found = []
    for one in settings:
        local = int(one.get("training.local_batch_size", 1))
        passes = int(one.get("training.global_batch_size", 32)) / 32 / local
        gib = 20 + 10 * local - 5 * (one.get("activation_checkpoint.mode") == "full") * local
        facts: Facts = fake() | {
            "tokens_per_s_per_gpu": 1000 * (1 + 0.38 * (local > 1)) - passes,
            "memory": {"needed_gib": float(gib)},
            "fits": gib < 71,
            "tight": False,
        }
        found.append(Variant(one, "h100-sxm", facts))
    return found


def test_ctrl_c_leaves_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: Any, progress: Any, **_: Any) -> list[Variant]:
        found = simulated(*given)
        for number, variant in enumerate(found):
            variant.facts = variant.facts | {"layout": "dp_shard 32"} if number < 3 else {}
        progress(3, found)
        raise KeyboardInterrupt

    monkeypatch.setattr("titan.sim.search.variants.simulate_variants", interrupted)
    monkeypatch.setattr("titan.sim.report.text.EVERY_S", 0.0)
    finder = search("qwen3_30b_a3b", "--compile.enable=false", world_size=32)
    finder.stopped = False
    found = plan(finder, budget=6)
    assert finder.stopped and 0 < len(found.ranked) <= len(finder.seen) == 3
    assert " left, best so far 999 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("free", [False, True])
def test_the_price_of_the_fixed_batch(free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    settings_of: list[list[dict[str, str]]] = []

    def counted(job: Any, settings: Iterable[dict[str, str]], **how: Any) -> list[Variant]:
        found = simulated(job, settings, **how)
        counts.append(len(found))
        settings_of.append([one.settings for one in found])
        return found

    monkeypatch.setattr("titan.sim.search.variants.simulate_variants", counted)
    finder = search("qwen3_30b_a3b", "--compile.enable=false", world_size=32)
    found: Plan = plan(finder, budget=6, free_batch=free)
    assert counts[-1] == 1 or free  # a single simulation more
    assert [*found.batches] == (
        [64, 128, 256] if free else [64]
    )  # half a sequence for each rank is none
    for sequences, (point, variant) in found.batches.items():
        assert variant.settings["training.global_batch_size"] == str(sequences)
        assert point.batch * 32 <= sequences and variant.fits
        best = found.ranked[0][0]
        layout = ("replicate", "shard", "tp", "cp", "pp", "ep")
        assert all(getattr(point, name) == getattr(best, name) for name in layout)
    assert found.batches[64][0].batch == 2
    local = {
        s["training.local_batch_size"]
        for s in settings_of[-1]
        if s["training.global_batch_size"] == "128"
    }
    assert local == ({"4", "2", "1"} if free else set())
