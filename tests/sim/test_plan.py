"""`titan plan`: what is searched, in which order, and what the user gets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import Shell
from titan.checks.rules import check_to_run
from titan.cli import main
from titan.config.load import load_config, load_from_argv
from titan.sim.price.network import price_transfer
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Group, Scope, Transfer
from titan.sim.search.candidates import LayoutSearch, Point, _bubble
from titan.sim.search.variants import simulate_variants

JOB = [
    "train_configs/debug_model.toml",
    "--training.seq_len=64",
    "--training.global_batch_size=16",
]
FILE = Path("train_configs/llama3_8b.toml")


def search(*overrides: str, job: Path = FILE, world_size: int = 64) -> LayoutSearch:
    argv = [str(job), *overrides]
    return LayoutSearch(
        argv, load_from_argv(argv), load_profile("h100-sxm"), world_size=world_size
    )


def test_every_point_uses_all_ranks_and_keeps_the_global_batch() -> None:
    finder = search("--training.global_batch_size=256")
    points = finder.points
    assert len(points) > 100
    for p in points:
        assert p.replicate * p.shard * p.tp * p.cp * p.pp == 64
        assert 256 % (p.replicate * p.shard * p.batch) == 0 and p.batch % p.microbatch == 0
        assert p.pp == 1 or p.batch // p.microbatch >= p.pp
        assert p.cp == 1  # 8,192 tokens are not split unless the job does
    assert {p.tp for p in points} == {1, 2, 4, 8}
    assert {p.recompute for p in points} == {"none", "selective", "2", "full"}
    assert {(p.zero, p.schedule, p.stages) for p in points if p.pp > 1} >= {
        (z, s, n)
        for z in (2, 3)
        for s, n in (("1F1B", 1), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
    }
    long = search("--training.seq_len=131072", "--training.global_batch_size=64")
    assert {p.cp for p in long.points} >= {1, 2, 4, 8, 16}


def test_experts_are_split_where_ranks_and_experts_divide() -> None:
    moe = ["--model.name=qwen3", "--model.flavor=tiny_moe", "--training.global_batch_size=64"]
    finder = search(*moe, job=Path("train_configs/debug_model.toml"), world_size=16)
    points = finder.points
    for p in points:
        assert (p.shard * p.cp * p.tp) % p.ep == 0 and 8 % p.ep == 0
    assert {p.ep for p in points} == {1, 2, 4, 8}
    settings = next(p for p in points if p.ep == 4).settings(64, num_layers=4)
    assert settings["parallelism.expert_parallel_degree"] == "4"
    # What FSDP gathers of experts shrinks with the ranks that share them.
    one = Point(replicate=1, shard=16, tp=1, cp=1, pp=1, batch=4, recompute="none", ep=1)
    assert all(finder.legal(replace(one, ep=n)) for n in (1, 2, 4, 8))
    dense = search("--training.global_batch_size=256").points[0].settings(256, num_layers=32)
    assert "parallelism.expert_parallel_degree" not in dense


def test_the_formula_by_hand() -> None:
    """One rank computes, TP adds its gathers, a pipeline its bubble, recomputation a third."""
    finder = search("--training.global_batch_size=256")
    plain = Point(replicate=1, shard=64, tp=1, cp=1, pp=1, batch=4, recompute="none")
    model, length = finder.model, 8192
    flops = 4 * length * model.flops_per_token(length, causal=True)
    compute = flops / (0.67 * 989e12)
    volume = model.num_params * 63 / 64 * 8
    # Eight network cards of a node, of which a ring uses all.
    assert finder.seconds(plain) == pytest.approx(
        compute + max(0, volume / 360e9 - 0.7 * compute)
    )
    assert finder.seconds(replace(plain, recompute="full")) > finder.seconds(plain)
    few = replace(plain, shard=16, pp=4, batch=16, microbatch=4)
    many = replace(few, microbatch=1)
    # In 4 stages, 4 microbatches wait more than 16.
    assert finder.seconds(few) > finder.seconds(many)


@pytest.mark.parametrize(
    ("count", "stride"),
    [(8, 1), (4, 2), (64, 1), (32, 2), (16, 4), (8, 8), (4, 16), (2, 128)],
)
def test_the_formulas_speed_is_that_of_the_simulators_network(count: int, stride: int) -> None:
    """A ring over nodes uses a card for each of its members on a node; what others use is theirs."""
    size, profile = 2**34, load_profile("h100-sxm")
    ranks = tuple(range(0, count * stride, stride))
    gather = Transfer("all_gather", "g", size, "bfloat16", 0, True, 0, Scope("forward"))
    price = price_transfer(gather, Group("g", ("dp_shard",), ranks), profile, rank=0)
    assert price.volume_s == pytest.approx(
        size * (count - 1) / count / (search().speed(count * stride, stride=stride) * 1e9),
        rel=0.1,
    )


def test_the_first_are_of_every_kind_and_neighbours_differ_in_one_setting() -> None:
    finder = search("--training.global_batch_size=256")
    first = finder.first(12)
    assert len(first) == len(set(first)) == 12
    assert len({point.split for point in first}) >= 8
    centre = first[0]
    for near in finder.neighbours([centre], 6):
        assert near not in first
        changed = {k for k in ("replicate", "tp", "cp", "pp", "recompute") if getattr(near, k) != getattr(centre, k)}  # fmt: skip
        assert len(changed) <= 1


def test_zero_2_gathers_once_and_schedules_idle_as_theirs_do() -> None:
    # Sequences so short that computation hides little.
    finder = search(
        "--training.global_batch_size=256", "--training.seq_len=512", world_size=256
    )
    three = Point(replicate=1, shard=256, tp=1, cp=1, pp=1, batch=1)
    two = replace(three, zero=2)
    model = finder.model
    saved = finder.seconds(three) - finder.seconds(two)
    # Eight cards carry more than NVLink does within a node.
    rate = finder.profile.ring_gb_per_s * 1e9
    assert saved == pytest.approx(model.num_params * 255 / 256 * 2 / rate)
    one = Point(replicate=1, shard=32, tp=1, cp=1, pp=8, batch=8, zero=2)
    for names in (
        (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4)),
        (("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)),
    ):
        times = [finder.seconds(replace(one, schedule=name, stages=n)) for name, n in names]
        assert times == sorted(times, reverse=True)
    # Many microbatches: the formula of 1F1B, (p - 1) / (m + p - 1).
    assert _bubble("1F1B", 8, 1, 64) == pytest.approx(7 / 71)


def test_settings_name_every_choice() -> None:
    point = Point(replicate=1, shard=8, tp=1, cp=1, pp=4, batch=8, schedule="Interleaved1F1B", stages=4, recompute="2", zero=3, also=("compile", "async_tp"))  # fmt: skip
    settings = point.settings(64, num_layers=32)
    assert settings["parallelism.pipeline_parallel_layers_per_stage"] == "3"
    assert settings["parallelism.fsdp_reshard_after_forward"] == "always"
    assert settings["activation_checkpoint.mode"] == "selective"
    assert settings["activation_checkpoint.selective_ac_option"] == "2"
    assert (
        settings["compile.enable"]
        == settings["parallelism.enable_async_tensor_parallel"]
        == "true"
    )
    finder = search("--training.global_batch_size=64", "--compile.enable=false", world_size=32)
    zero_bubble = replace(point, schedule="ZBVZeroBubble", stages=2, also=("compile",))
    assert finder.legal(replace(zero_bubble, recompute="selective"))


def test_what_was_asked_for_is_searched_with_and_without() -> None:
    argv = f"{FILE} --training.global_batch_size=256 --compile.enable=false".split()
    finder = LayoutSearch(argv, load_from_argv(argv), load_profile("h100-sxm"), world_size=64, also=["compile", "async_tp"])  # fmt: skip
    assert {p.also for p in finder.points} == {
        (),
        ("compile",),
        ("async_tp",),
        ("compile", "async_tp"),
    }
    plain = finder.points[0]
    with_both = replace(plain, also=("compile", "async_tp"))
    assert finder.seconds(with_both) < finder.seconds(replace(plain, also=()))


def test_too_big_is_left_out() -> None:
    """405B on 64 devices of 80 GB: no layout holds its states."""
    overrides = ["--parallelism.tensor_parallel_degree=8", "--training.global_batch_size=64"]
    assert search(*overrides, job=Path("train_configs/llama3_405b.toml")).points == []


def test_overlays_make_the_ranked_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LayoutSearch, "single_changes", lambda *_: []
    )  # which have a test below
    command = [
        "plan",
        *JOB,
        "--training.local_batch_size=4",
        "--world-size",
        "4",
        "--hardware",
        "h100-sxm",
        "--simulate",
        "3",
    ]
    output, result = tmp_path / "plans", tmp_path / "plan.json"
    assert main([*command, *f"--most 2 --output {output} --json {result}".split()]) == 0
    printed = capsys.readouterr().out
    assert "3 candidates simulated" in printed and "global batch 16 sequences" in printed
    found = json.loads(result.read_text())
    variants = found["candidates"]
    assert found["job"]["settings"] == {} and found["job"]["facts"]["fits"]
    assert "held fixed: llama3 " in printed and "\njob " in printed
    assert re.search(
        r"\nplan 1 rests on .* work: [a-z ]+ \d+\.\d% \((\d+|no) runs\), ", printed
    )
    speeds = [variant["facts"]["tokens_per_s_per_gpu"] for variant in variants]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 3
    # The job has its row, and is a candidate only if nothing is faster.
    assert speeds[0] > found["job"]["facts"]["tokens_per_s_per_gpu"]
    files = sorted(output.iterdir())
    assert [file.name for file in files] == ["plan-1.toml", "plan-2.toml"]
    shown = sorted((v for v in variants if v["row"]), key=lambda v: v["row"])
    assert [v["row"] for v in shown] == [1, 2] and shown[0] == variants[0]
    for file, variant in zip(files, shown, strict=True):
        config = load_config(
            JOB[0], overlays=[file], overrides=[a.lstrip("-") for a in JOB[1:]]
        )
        layout = check_to_run(config, world_size=4)
        assert str(layout) == variant["facts"]["layout"]
        assert config.training.local_batch_size * layout.dp * layout.accumulation == 16
        assert (
            f"{variant['facts']['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU" in file.read_text()
        )


def test_what_is_tight_comes_last_and_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device on which the candidate that needs most runs, without the margin. The log shows progress, and a hint."""
    monkeypatch.setattr("titan.sim.report.text.EVERY_S", 0.0)
    monkeypatch.setattr(LayoutSearch, "single_changes", lambda *_: [])
    bare = {"context_gib": 0.0, "communicator_gib": 0.0, "workspace_mib": 0.0}
    roomy = load_profile("h100-sxm").model_copy(update=bare)
    options = ["plan", *JOB, "--world-size", "2", "--hardware", "h100-sxm", "--simulate", "3"]
    monkeypatch.setattr("titan.sim.search.command.load_profile", lambda _: roomy)
    assert main([*options, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert "3 of 3 candidates simulated, best so far " in printed.err
    found = json.loads(printed.out)
    needed = [one["facts"]["memory"]["needed_gib"] for one in found["candidates"]]
    small = roomy.model_copy(update={"memory_gib": max(needed) / 0.95})
    monkeypatch.setattr("titan.sim.search.command.load_profile", lambda _: small)
    assert main(options) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(r"[123][ =] ", line)]
    assert len(rows) == 3 and rows[-1].endswith(" tight") and not rows[0].endswith(" tight")
    assert "leaves 10% free" in printed and "few candidates: 3 of " in printed


def test_nothing_that_anybody_would_try_first_is_faster(tmp_path: Path, shell: Shell) -> None:
    """One candidate, on two nodes: the plan is at least as fast as each change of recomputation, ZeRO and TP by hand."""
    by_hand = [
        *({"activation_checkpoint.mode": mode} for mode in ("none", "selective", "full")),
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
        *({"parallelism.fsdp_reshard_after_forward": z} for z in ("always", "never")),
        *({"parallelism.tensor_parallel_degree": str(n)} for n in (1, 2, 4)),
    ]
    job = [*JOB, "--training.local_batch_size=1", "--model.overrides.n_layers=2"]
    variants = simulate_variants(
        job, by_hand, world_size=16, profiles=[load_profile("h100-sxm")], processes=2
    )
    assert all(variant.fits for variant in variants)
    result = tmp_path / "plan.json"
    options = ["--world-size", "16", "--hardware", "h100-sxm", "--simulate", "1"]
    shell("plan", *job, *options, "--json", f"{result}")
    found = json.loads(result.read_text())
    first = found["candidates"][0]["facts"]["tokens_per_s_per_gpu"]
    assert first >= max(variant.speed for variant in variants) > found["job"]["facts"]["tokens_per_s_per_gpu"]  # fmt: skip
    # A faster candidate was found, so the job is none of them: it has the row above.
    finder = LayoutSearch(job, load_from_argv(job), load_profile("h100-sxm"), world_size=16)
    own = finder.own()
    assert own is not None
    assert finder.settings(own) not in [one["settings"] for one in found["candidates"]]
