"""AutoSAC: the trace of a choice against that of the program, the choice against all others, bytes against a real run, the command."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell
from tests.support.ranks import Pool
from tests.support.tables import table
from tests.support.traces import (
    in_turn,
    job,
    on_cpu,
    real_peak,
    trace_of,
    trace_ranks,
    traced_peak,
)
from titan.config.load import load_from_argv
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import (
    Allocate,
    AwaitEvent,
    AwaitWork,
    Event,
    Free,
    Launch,
    RecordEvent,
    Trace,
    Transfer,
)
from titan.sim.replay.memory import memory_report
from titan.sim.replay.queues import replay
from titan.sim.search.autosac import to_lines
from titan.sim.search.command import settings_overlay
from titan.sim.search.knapsack import Kept
from titan.sim.search.recomputation import (
    Block,
    choose,
    find_blocks,
    keep,
    measure,
    samples,
    solve,
)
from titan.sim.simulate import simulate

H100 = load_profile("h100-sxm")
BF16 = {"mixed_precision_param": "bfloat16"}


def by_op(lines: list[str], **sections: Any) -> Any:
    section = {"mode": "selective", "op_keep": [], "op_keep_by_block": lines}
    return job(
        training=BF16 | sections.pop("training", {}), activation_checkpoint=section, **sections
    )


def comparable(events: list[Event]) -> list[Any]:
    """Events with numbers by their first appearance, and without what differs where a block keeps everything: the names of calls."""
    numbers: dict[Any, int] = {}
    found = []
    for event in events:
        if isinstance(event, Allocate | Launch | Transfer):
            event = replace(event, scope=replace(event.scope, call=""))
        match event:
            case Allocate() | Free():
                event = replace(
                    event, block=numbers.setdefault(("block", event.block), len(numbers))
                )
            case RecordEvent() | AwaitEvent():
                event = replace(
                    event, event=numbers.setdefault(("event", event.event), len(numbers))
                )
            case Transfer() | AwaitWork():
                event = replace(
                    event, work=numbers.setdefault(("work", event.work), len(numbers))
                )
            case _:
                pass
        found.append(event)
    # Neighbouring ends of memory come in any order.
    runs = ((isinstance(event, Free), event) for event in found)
    return [
        one
        for is_free, run in itertools.groupby(runs, key=lambda pair: pair[0])
        for one in (
            sorted((e for _, e in run), key=lambda e: e.block)
            if is_free
            else (e for _, e in run)
        )
    ]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = table(__file__, "layouts")


@pytest.mark.parametrize("name", in_turn(LAYOUTS, slow=["FSDP2, TP", "Interleaved1F1B", "CP"]))
def test_the_trace_of_a_choice_is_that_of_the_program(name: str) -> None:
    world, sections = LAYOUTS[name]
    base = trace_of(by_op(["0:"], **sections), world=world)
    blocks = find_blocks(base, Cost(H100))
    draw = random.Random(name)
    kept: dict[int, Kept] = {
        layer: None
        if layer == 1
        else frozenset(draw.sample(sorted(block.sizes), len(block.sizes) // (layer + 2)))
        for layer, block in blocks.items()
    }
    lines = to_lines(kept)
    made, real = keep(base, blocks, kept), trace_of(by_op(lines, **sections), world=world)
    reports = [memory_report(trace, H100) for trace in (made, real)]
    # Of experts, counts of rows (a block of 512 bytes) end earlier where a block keeps everything.
    within = 512 if name == "experts" else 0
    assert reports[0].peak_active_bytes == pytest.approx(
        reports[1].peak_active_bytes, abs=within
    )
    assert reports[0].peak_reserved_bytes == reports[1].peak_reserved_bytes
    if name == "experts":
        return
    steps = [comparable(trace.step) for trace in (made, real)]
    for one, other in zip(*steps, strict=False):
        assert one == other
    assert len(steps[0]) == len(steps[1])


def test_no_other_choice_saves_more() -> None:
    """Every choice of small blocks, for drawn sizes and seconds."""
    draw = random.Random(0)
    for _ in range(30):
        calls = [f"aten.mm@{n}" for n in range(draw.randint(1, 3))]
        sizes = {call: draw.randint(1, 9) for call in calls}
        seconds = {call: draw.randint(0, 9) * 0.5 for call in calls}
        whole = (draw.randint(1, sum(sizes.values())), sum(seconds.values()) + 0.25)
        other = Block({}, {"aten.bmm@0": draw.randint(1, 9)}, {"aten.bmm@0": 2.0}, (3, 2.0))
        blocks = {0: other} | {
            n: Block({}, sizes, seconds, whole) for n in range(1, draw.randint(2, 4))
        }
        flying = dict.fromkeys(blocks, 1) | {0: draw.randint(1, 3)}
        capacity = draw.randint(0, 40)
        subsets = {
            layer: [None, *(frozenset(s) for n in range(len(b.sizes) + 1) for s in itertools.combinations(b.sizes, n))]
            for layer, b in blocks.items()
        }  # fmt: skip

        def value(
            choice: dict[int, Kept], blocks: Any = blocks, flying: Any = flying
        ) -> tuple[int, float]:
            costs = [
                (flying[n] * size, saved)
                for n, (size, saved) in ((n, blocks[n].cost(c)) for n, c in choice.items())
            ]
            return sum(size for size, _ in costs), sum(saved for _, saved in costs)

        every = (
            value(dict(zip(subsets, each, strict=True)))
            for each in itertools.product(*subsets.values())
        )
        best = max(saved for size, saved in every if size <= capacity)
        size, saved = value(solve(blocks, flying, {max(blocks): capacity}))
        assert size <= capacity
        assert saved == best


def test_no_other_choice_of_a_real_job_is_faster() -> None:
    """All that one block of two may keep of attention and two products, and everything, simulated."""
    config = by_op(["0:"], layers=2, batch=8, training={"seq_len": 512})
    base = trace_of(config)
    cost = Cost(H100)
    blocks = find_blocks(base, cost)
    few = [
        "aten.mm@0",
        "aten.mm@4",
        next(call for call in blocks[0].sizes if "attention" in call),
    ]
    for block in blocks.values():
        block.runs = {call: block.runs[call] for call in few}
        block.sizes = {call: block.sizes[call] for call in few}
        block.whole = (10**12, 0.0)
    subsets: list[Kept] = [
        frozenset(s) for n in range(4) for s in itertools.combinations(few, n)
    ]

    def simulated(kept: dict[int, Kept]) -> tuple[int, float]:
        made = keep(base, blocks, kept)
        return memory_report(made, H100).peak_active_bytes, replay({0: made}, cost).ranks[
            0
        ].compute_s

    results = {
        pair: simulated(dict(enumerate(pair))) for pair in itertools.product(subsets, subsets)
    }
    least = results[subsets[0], subsets[0]][0]
    most = max(peak for peak, _ in results.values())
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        limit = int(least + share * (most - least))
        chosen = choose(base, blocks, limit - least)
        peak, seconds = results[chosen[0], chosen[1]]
        assert peak <= limit
        assert seconds == pytest.approx(
            min(s for p, s in results.values() if p <= limit), rel=1e-9
        )


def _held(trace: Trace) -> int:
    """Return the bytes of the two middle blocks that are in use when the first backward pass of a block begins."""
    alive: dict[int, int] = {}
    for event in trace.step:
        scope = getattr(event, "scope", None)
        module = scope.module if scope is not None else ""
        if scope is not None and scope.phase != "forward" and "layers." in module:
            break
        if isinstance(event, Allocate) and module.startswith(("layers.2", "layers.3")):
            alive[event.block] = event.size_bytes
        if isinstance(event, Free):
            alive.pop(event.block, None)
    return sum(alive.values())


@pytest.mark.slow
def test_measured_choices_of_compiled_blocks_add_up() -> None:
    """What one job measured of a choice is what a whole job of it saves, and what its middle blocks hold, to the byte."""
    compile = {"enable": True, "components": ["model"]}
    sections = {"layers": 6, "batch": 8, "training": {"seq_len": 512}}
    cost = Cost(H100)
    blocks = find_blocks(trace_of(by_op(["0:"], **sections)), cost)
    chosen = samples(blocks)
    sampled = trace_of(by_op(to_lines(chosen), compile=compile, **sections), steps=1)
    measure(blocks, [sampled], chosen, cost)
    nothing = trace_of(by_op(["0:"], compile=compile, **sections), steps=1)
    assert len(blocks[0].measured) == 4
    for kept, (size, seconds) in blocks[0].measured.items():
        if not kept:
            continue
        [line] = to_lines(dict.fromkeys(blocks, kept))
        whole = trace_of(by_op([line], compile=compile, **sections), steps=1)
        held, busy = (
            [f(trace) for trace in (whole, nothing)]
            for f in (_held, lambda trace: replay({0: trace}, cost).ranks[0].compute_s)
        )
        assert held[0] - held[1] == 2 * size
        assert busy[1] - busy[0] == pytest.approx(6 * seconds, rel=0.02)


@pytest.mark.parametrize("name", in_turn(["one rank", "FSDP2, TP"], slow=["FSDP2, TP"]))
def test_a_run_needs_the_bytes_of_the_choice(name: str, pool: Pool) -> None:
    world, sections = LAYOUTS[name]
    call = "aten._scaled_dot_product_flash_attention_for_cpu@0"
    lines = ["0-1: aten.mm@1,4", f"2-2: {call} aten.mm@0,4,5", "3-3: all"]
    config = by_op(lines, batch=8, **sections)
    real = pool.run(world, real_peak, config)[0]
    base = trace_ranks(
        by_op(["0:"], batch=8, **sections), world_size=world, ranks=[0], prepare=on_cpu
    )[0]
    blocks = find_blocks(base, Cost(H100))
    kept: dict[int, Kept] = {
        0: frozenset(["aten.mm@1", "aten.mm@4"]),
        2: frozenset([call, "aten.mm@0", "aten.mm@4", "aten.mm@5"]),
        3: None,
    }
    kept[1] = kept[0]
    assert to_lines(kept) == lines
    assert traced_peak(keep(base, blocks, kept)) == pytest.approx(real, rel=0.01)


JOB = [
    "train_configs/debug_model.toml",
    "--model.flavor=debugmodel",
    "--training.seq_len=512",
    "--training.local_batch_size=16",
]


@pytest.mark.parametrize("waits_for", ["device", "host"])
def test_the_command_writes_the_fastest_overlay_that_fits(
    waits_for: str, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Where the job waits for its device, a choice by operation is. Where it waits for its host, every such operation costs."""
    # So far apart that no measurement of the host decides.
    profile = H100.model_copy(update={"host_tiny_us": 0.001 if waits_for == "device" else 20.0})
    if waits_for == "device":
        profile = profile.model_copy(update={"launch_us": 0.0, "launch_transfer_us": 0.0})
    monkeypatch.setattr("titan.sim.search.command.load_profile", lambda _: profile)
    found, overlay = tmp_path / "found.json", tmp_path / "sac.toml"
    where = ["--world-size=2", "--hardware=h100-sxm", "--memory=1.6"]
    where += ["--only=sac", f"--json={found}", f"--output={overlay}"]
    printed, results = shell("plan", *JOB, *where), json.loads(found.read_text())["results"]
    steps = {name: r["step_time_s"] for name, r in results.items() if r["fits"]}
    fastest = min(steps, key=lambda name: steps[name])
    assert "sac" in steps and not results["none"]["fits"]
    if waits_for == "device":
        assert fastest == "sac" and steps[fastest] < steps["full"]
    else:
        assert fastest in ("full", "every 2nd block")
        assert f'"{fastest}" is faster than a choice by operation' in printed.err
    assert "sac" in printed.out
    # The overlay is the job that was simulated.
    config = load_from_argv([*JOB, str(overlay)])
    simulation = simulate(config, world_size=2, profile=profile)
    assert simulation.timeline.step_s == pytest.approx(steps[fastest], rel=1e-3)
    reserved = simulation.fullest.peak_reserved_bytes / 2**30
    assert reserved == pytest.approx(results[fastest]["memory"]["peak_reserved_gib"], rel=1e-3)


def test_an_overlay_has_the_numbers_of_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "overlay.toml"
    budget = {"mode": "memory_budget", "memory_budget": "0.25"}
    file.write_text(
        settings_overlay({f"activation_checkpoint.{k}": v for k, v in budget.items()})
    )
    section = load_from_argv([*JOB, str(file)]).activation_checkpoint
    assert (section.mode, section.memory_budget) == ("memory_budget", 0.25)
