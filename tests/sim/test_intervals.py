"""Intervals of predicted speeds: the shares of a step by class, the fit of the classes' errors, and what the commands print."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell
from tests.support.jobs import ROOT
from tests.support.tables import table
from tests.support.traces import job
from titan.sim.price.profiles import load_profile, profile_names
from titan.sim.record.trace import Launch
from titan.sim.report import intervals
from titan.sim.report.text import speed_range
from titan.sim.simulate import Simulation, facts, simulate, step_facts

sys.path.insert(0, str(ROOT / "scripts"))
import sim_intervals

KNOWN = table(__file__, "known")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "errors", lambda: KNOWN)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    degrees = ("tensor_parallel_degree", "data_parallel_shard_degree", "data_parallel_replicate_degree")  # fmt: skip
    config = job(parallelism=dict(zip(degrees, (2, 2, 4), strict=True)))
    return simulate(config, world_size=16, profile=load_profile("h100-sxm"))


def test_shares_are_the_step_by_class(simulation: Simulation) -> None:
    """Summed from the intervals of the timeline, as its charts show them."""
    shares, [rank] = (
        step_facts(simulation)["interval"]["shares"],
        simulation.timeline.ranks.values(),
    )
    # Tensor parallelism is a class of the whole step.
    assert shares.pop(intervals.TENSOR) == 1
    assert sum(shares.values()) == pytest.approx(1)
    compute: Any = [
        i for i in rank.intervals if i.lane == "compute" and isinstance(i.event, Launch)
    ]

    def share(*kinds: str) -> float:
        seconds = sum(i.end - i.start for i in compute if i.event.kernel.kind in kinds)
        return seconds / simulation.timeline.step_s

    assert shares["matmuls"] == pytest.approx(share("matmul"), rel=1e-6)
    assert shares["attention"] == pytest.approx(
        share("attention", "attention_backward"), rel=1e-6
    )
    # TP 2 stays in a node of 8. The replicas of FSDP 2 x TP 2 on 16 ranks are on two nodes.
    near = rank.exposed_s["tp"] + rank.exposed_s["dp_shard"]
    far = sum(s for axis, s in rank.exposed_s.items() if "dp_replicate" in axis)
    step_s = simulation.timeline.step_s
    assert shares.get("transfers within a node", 0) == pytest.approx(near / step_s, rel=1e-6)
    assert shares.get("transfers between nodes", 0) == pytest.approx(far / step_s, rel=1e-6)


def test_classes_of_kernels() -> None:
    def of(
        kind: str, host: str = "eager", dtype: str = "bfloat16", module: str = "norm", cp=False
    ):
        return intervals._class_of((kind, host, dtype, module), is_split=cp)

    assert (
        of("matmul") == "matmuls" and of("matmul", dtype="float8_e4m3fn") == "matmuls in 8 bits"
    )
    assert of("attention_backward") == "attention"
    assert of("attention", cp=True) == "attention across ranks"
    assert of("pointwise") == "eager kernels" and of("copy", "compiled") == "compiled kernels"
    assert of("gather", module="layers.*.moe") == "experts' dispatch"
    assert of("matmul", module="layers.*.moe.experts") == "matmuls"


def test_the_example_of_the_module(known: None) -> None:
    mix = {"matmuls": 0.6, "transfers within a node": 0.2}
    low, high, level, reason = intervals.of_speed(5720, mix)
    assert (low, high) == (pytest.approx(5720 * exp(-0.112)), pytest.approx(5720 * exp(0.112)))
    assert (
        level == 0.9 and reason == "transfers within a node (20% of the step, seen in 12 runs)"
    )
    found = {"tokens_per_s_per_gpu": 5720.4, "interval": {"low": 5388.1, "high": 6013.2}}
    assert speed_range(found) == "5,720 tokens/s/GPU (5,400 to 6,000)"
    found = {"tokens_per_s_per_gpu": 16.2, "interval": {"low": 14.93, "high": 17.61}}
    assert speed_range(found) == "16 tokens/s/GPU (14.9 to 17.6)"


def test_variants_share_their_error(known: None) -> None:
    """Slow matmuls slow both. Only what differs can make one of them faster than predicted."""

    def variant(speed: float, **shares: float) -> dict[str, Any]:
        mix = {"matmuls": shares["matmuls"], "transfers within a node": shares["tp"]}
        return {"tokens_per_s_per_gpu": speed, "interval": {"shares": mix}}

    job, near = variant(1000, matmuls=0.8, tp=0.2), variant(1015, matmuls=0.79, tp=0.21)
    # The same work, except for the floor: a difference of 1.6% is visible.
    assert intervals.cannot_tell_apart(job, near)
    assert not intervals.cannot_tell_apart(job, near | {"tokens_per_s_per_gpu": 1020})
    # A fifth of the step less in transfers: 0.2 x 0.3 and 0.2 x 0.05, with the floor, times the factor.
    other = variant(1100, matmuls=1.0, tp=0.0)
    width = 1.6 * (0.01**2 + (0.2 * 0.3) ** 2 + (0.2 * 0.05) ** 2) ** 0.5
    assert intervals.ratio_width(job, other) == pytest.approx(width)
    assert intervals.cannot_tell_apart(job, other) and log(1.1) < width < log(1.11)
    # The interval of one of them is much wider than that of the difference of the matmuls.
    assert log(intervals.of_speed(1, other["interval"]["shares"]).high) > 0.05


def runs_with(sigma: dict[str, float], *, number: int, seed: int) -> list[sim_intervals.Known]:
    """Return runs whose classes are off by normal errors of these deviations."""
    draw, runs = random.Random(seed), []
    for n in range(number):
        off = {name: draw.gauss(0, s) for name, s in sigma.items()}
        parts = [draw.random() ** 2 for _ in sigma]
        mix = {name: part / sum(parts) for name, part in zip(sigma, parts, strict=True)}
        error = sum(mix[name] * off[name] for name in mix) + draw.gauss(0, 0.01)
        about = (f"run {n}", f"source {n % 20}", "job", "device")
        runs.append(sim_intervals.Known(*about, mix, error))
    return runs


def test_the_fit_finds_the_errors_of_classes() -> None:
    true = {"matmuls": 0.1, "attention": 0.2, "transfers within a node": 0.4}
    fit = sim_intervals.fit(runs_with(true, number=600, seed=1))
    for name, sigma in true.items():
        # Student's t reads normal errors somewhat differently, for which the factor makes up.
        assert 0.7 < fit.sigma[name] / sigma < 1.4, name
    # A class that no run has keeps the prior.
    assert fit.sigma["experts' dispatch"] == pytest.approx(sim_intervals.PRIOR, rel=0.01)
    fresh = runs_with(true, number=1000, seed=2)
    widths = fit.factor * sim_intervals.deviations(fresh, fit.sigma)
    inside = sum(abs(run.error) <= w for run, w in zip(fresh, widths, strict=True))
    assert 0.87 < inside / len(fresh) < 0.93


def test_a_few_strange_runs_do_not_widen_the_others() -> None:
    true = {"matmuls": 0.03, "attention": 0.1, "transfers within a node": 0.4}
    runs = runs_with(true, number=100, seed=3)
    plain = sim_intervals.fit(runs).sigma["matmuls"]
    strange = [run._replace(error=1.0) if n < 4 else run for n, run in enumerate(runs)]
    assert sim_intervals.fit(strange).sigma["matmuls"] < 2 * plain


def test_measurements_that_a_fit_has_not_seen_are_inside() -> None:
    """At least 34 of 40, with each publication left out of the fit in turn; and errors.toml is the fit of the saved predictions."""
    rows = sim_intervals.cross_validated(sim_intervals.known_runs())
    assert len(rows) >= 40 and len({run.source for run, _, _ in rows}) >= 8
    assert sum(inside for _, _, inside in rows) >= 34 / 40 * len(rows)
    assert sim_intervals.document() == intervals.ERRORS.read_text(encoding="utf-8")
    assert {*intervals.errors()["sigma"]} == {
        *sim_intervals.CLASSES,
        intervals.TENSOR,
        intervals.HARDWARE,
    }


def test_commands_print_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    given = f"{ROOT}/train_configs/debug_model.toml --world-size=2"
    printed, found = (
        shell(f"sim {given} --hardware=h100-sxm --json=h100.json").out,
        json.loads((tmp_path / "h100.json").read_text()),
    )
    interval, speed = found["interval"], found["tokens_per_s_per_gpu"]
    assert interval["low"] < speed < interval["high"] and interval["level"] == 0.9
    assert interval["low"] * interval["high"] == pytest.approx(speed**2)
    assert (
        sum(interval["shares"].values()) == pytest.approx(1) and found["hardware_lacks"] == ""
    )
    large = [
        "--model.overrides={dim = 4096, n_layers = 2}",
        "--training.seq_len=8192",
        "--training.local_batch_size=4",
    ]
    # Little is known of it, so that the range comes before the speed.
    ends = r"  speed     [\d,.]+ to [\d,.]+ tokens/s/GPU: little is known of waiting for the host \(.*\); 90% of measured speeds"
    assert re.search(
        ends
        + rf" should be in the range, by {intervals.errors()['devices']['h100-sxm']} public runs .*\n(.*\n){{2}}  speed     [\d,]+ tokens/s/GPU, ",
        printed,
    )
    printed = shell(f"sim {given} --hardware=h100-sxm", *large, "--json=large.json").out
    reason = json.loads((tmp_path / "large.json").read_text())["interval"]["reason"]
    assert re.search(r"  speed     [\d,]+ tokens/s/GPU \([\d,.]+ to [\d,.]+\), ", printed)
    assert f"this card and others; most of its width is from {reason}" in printed
    # A profile without runs: said first, and wider.
    assert shell(f"sim {given} --hardware=mi300x --json=mi300x.json").out.startswith(
        "UNSUPPORTED PROFILE mi300x: its main figures have no sources"
    )
    other = json.loads((tmp_path / "mi300x.json").read_text())["interval"]
    assert other["high"] / other["low"] > interval["high"] / interval["low"]
    lines = shell(f"check {given} --hardware=mi300x").out.splitlines()
    assert lines[0].startswith("UNSUPPORTED PROFILE mi300x")
    assert any(re.match(r"time .* tokens/s/GPU \([\d,.]+ to [\d,.]+\), simulated on", x) for x in lines)  # fmt: skip


def test_each_profile_is_supported_or_says_why() -> None:
    lacking = {name for name in profile_names() if intervals.lacks_runs(load_profile(name))}
    assert {"mi300x", "mi355x", "cpu"} <= lacking
    assert not lacking & {"h100-sxm", "h200-sxm", "h100-96g-500w", "a100-80g"}


def test_a_card_without_runs_errs_as_the_profiles_of_other_cards_do(
    simulation: Simulation,
) -> None:
    def run(device: str, error: float, profile: str = "", mix: Any = None) -> Any:
        return sim_intervals.Known("", "", "", device, mix or {}, error, profile)

    # Cards off by 0.1 and 0.2 in the median; the prior, 0.25, counts as half a card.
    runs = [run("a", 0.1), run("a", 0.08), run("a", 0.9), run("b", -0.2)]
    sigma = ((0.5 * 0.25**2 + 0.1**2 + 0.2**2) / 2.5) ** 0.5
    assert sim_intervals.card_deviation(runs) == pytest.approx(sigma)
    # Rows that set a profile, and cards whose figures have no source, say nothing of it.
    others = [run("a", 3.0, "h100-96g-500w"), run("c", 3.0, mix={intervals.HARDWARE: 1.0})]
    assert sim_intervals.card_deviation(runs + others) == pytest.approx(sigma)

    known = intervals.errors()
    whole = known["sigma"][intervals.HARDWARE]
    for name, deviation in (
        ("h100-sxm", 0.0),
        ("b300", known["untested_card"]),
        ("mi300x", whole),
    ):
        mix = step_facts(replace(simulation, profile=load_profile(name)))["interval"]["shares"]
        assert mix.get(intervals.HARDWARE, 0.0) * whole == pytest.approx(deviation), name


def test_phases_have_an_interval_of_the_whole(simulation: Simulation) -> None:
    from titan.config.phases import phases_of
    from titan.sim.report.phases import combine_phases

    [phase] = phases_of(simulation.config, world_size=simulation.layout.world_size)
    one = facts(simulation)
    slow = one | {"step_time_s": 3 * one["step_time_s"]}
    found = combine_phases([(phase, one), (phase, slow)])
    assert found["tokens_per_s_per_gpu"] == pytest.approx(one["tokens_per_s_per_gpu"] / 2)
    low, high = (found["interval"][end] / one["interval"][end] for end in ("low", "high"))
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))
