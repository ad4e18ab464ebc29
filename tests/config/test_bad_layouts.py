"""Layouts against an oracle: what cannot run is refused, with fixes that work; what can run is accepted.

The oracle (`broken_rules`) is plain arithmetic on what the techniques need, and shares nothing with titan.config. Thousands
of layouts are drawn, most of them sound but for one or two settings. All this happens in a process that cannot
import torch, so there can be no process group either.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.drawn_layouts import (
    ALL_KEYS,
    BALANCER,
    BATCH,
    DEGREES,
    FIRST,
    GLOBAL,
    LAST,
    LENGTH,
    MICROBATCH,
    PER_STAGE,
    PP,
    ROTATE,
    SCHEDULE,
    SCHEDULES,
    TP,
    VALIDATION,
    Case,
    draw,
)
from tests.support.golden_errors import NUM_LAYOUTS
from tests.support.ranks import Pool
from tests.support.tables import table
from titan.checks.layout_rules import resolve_layout
from titan.config.errors import Problem

# ---- the oracle ------------------------------------------------------------------------------------


def broken_rules(case: Case) -> set[str]:
    """Names of the rules that a layout breaks; none: it can run."""
    world = _world_rules(case)
    if world:
        return world
    return {
        *_batch_rules(case),
        *_tensor_rules(case),
        *_context_rules(case),
        *_pipeline_rules(case),
    }


def _world_rules(case: Case) -> set[str]:
    degrees = {axis: case.get(key, 1) for axis, key in DEGREES.items()}
    degrees["dp_shard"] = case.get(DEGREES["dp_shard"], -1)
    used = 1
    for degree in degrees.values():
        used *= degree if degree > 0 else 1
    sound = case.world % used == 0 if degrees["dp_shard"] == -1 else case.world == used
    return set() if sound else {"world"}


def _batch_rules(case: Case) -> set[str]:
    total = case.get(GLOBAL, -1)
    data_ranks = case.world // (case.get(PP, 1) * case.get(DEGREES["cp"], 1) * case.get(TP, 1))
    return (
        {"global batch"} if total > 0 and total % (case.get(BATCH, 8) * data_ranks) else set()
    )


def _tensor_rules(case: Case) -> set[str]:
    tp, heads, kv_heads = case.get(TP, 1), case.model["n_heads"], case.model["n_kv_heads"]
    broken = set()
    whole_heads = heads % tp == 0
    if not whole_heads:
        broken.add("heads")
    # Each rank has whole key/value heads, or one of them that it shares with other ranks.
    elif not (kv_heads % tp == 0 or tp % kv_heads == 0):
        broken.add("kv heads")
    if case.model["ffn_dim"] % tp:
        broken.add("ffn")
    rows = [0] * tp
    size = (case.model["vocab_size"] + tp - 1) // tp
    for word in range(case.model["vocab_size"]):
        rows[word // size] += 1
    if 0 in rows:  # torch cannot look up in nothing
        broken.add("vocabulary")
    return broken


def _context_rules(case: Case) -> set[str]:
    cp, tp = case.get(DEGREES["cp"], 1), case.get(TP, 1)
    method, broken = case.get(ROTATE, "allgather"), set()
    balancer = case.get(BALANCER, "headtail")
    # One chunk, or two with head-tail balance, for each cp rank, and each chunk is split over tp.
    unit = tp * cp * (2 if cp > 1 and method != "ulysses" and balancer == "headtail" else 1)
    if case.get(LENGTH, 2048) % unit:
        broken.add("length")
    if case.get("validation.enable", False) and case.get(VALIDATION, unit) % unit:
        broken.add("validation length")
    if cp > 1 and balancer == "ptrr":
        broken.add("balancer")
    heads = case.model["n_heads"]
    if cp > 1 and method == "ulysses" and heads % tp == 0 and heads // tp % cp:
        broken.add("ulysses")
    return broken


def _pipeline_rules(case: Case) -> set[str]:
    pp, size = case.get(PP, 1), case.get(MICROBATCH, 1)
    if pp == 1:
        return set()
    own, fills, rounds, _ = SCHEDULES[case.get(SCHEDULE, "1F1B")]
    broken = set()
    if case.get(BATCH, 8) % size:
        return broken | {"microbatch size"}
    if case.model.get("tied_embeddings"):
        broken.add("tied")
    microbatches = case.get(BATCH, 8) // size
    first, last = case.get(FIRST, 1), case.get(LAST, 1)
    weight = case.model["n_layers"] + first + last
    stages = (own or 2) * pp
    if per_stage := case.get(PER_STAGE, 0):
        stages = (weight + per_stage - 1) // per_stage
    if stages % pp or (own and stages != own * pp):
        return broken | {"stages"}
    if fills and microbatches < stages:
        return broken | {"microbatches"}
    if rounds and microbatches > pp and microbatches % (microbatches // pp):
        return broken | {"microbatches"}
    # Spread evenly, a stage that has the embedding or the output must have room for what it counts. What is left over
    # goes to the middle first.
    each, left = weight // stages, weight % stages
    room_first = each + (left > stages - 2 if stages > 1 else left)
    if each == 0 or first > room_first or last > each:
        broken.add("stages")
    return broken


# ---- what titan reports, by rule --------------------------------------------------------------------

MESSAGES = table(__file__, "messages")


def rule_of(problem: Problem) -> str:
    (rule,) = [name for name, words in MESSAGES.items() if re.search(words, problem.message)]
    return "validation length" if rule == "length" and problem.key == VALIDATION else rule


def fixes_in(problem: Problem) -> list[tuple[str, Any]]:
    """Key and value of each change that a message proposes; "ranks" for the number of them."""
    proposal = problem.message.rpartition("; ")[2]
    assert re.search(r"use |set ", proposal), problem
    fixes: list[tuple[str, Any]] = []
    for part in re.split(r", (?:or )?", proposal):
        name = re.search(r"(?:\w+\.)*(\w+) = ", part)
        if ranks := re.match(r"(?:use )?([\d or]+?) ranks?\b", part):
            fixes += [("ranks", int(n)) for n in re.findall(r"\d+", ranks[1])]
            continue
        key = problem.key
        if name:
            full = name[0].removesuffix(" = ")
            key = full if "." in full else next(k for k in ALL_KEYS if k.endswith(f".{full}"))
            part = part[name.end() :]
        values = re.findall(r'"(\w+)"|\b(\d+)\b|\b(true|false)\b', part)
        fixes += [(key, s or (int(n) if n else b == "true")) for s, n, b in values]
    assert fixes, problem
    return fixes


def changed(case: Case, key: str, value: Any) -> Case:
    if key == "ranks":
        return Case(value, case.settings, case.model)
    if key.startswith("model.overrides."):
        return Case(case.world, case.settings, case.model | {key.rpartition(".")[2]: value})
    return Case(case.world, case.settings | {key: value}, case.model)


# ---- the checks, in a process without torch ---------------------------------------------------------


def compare() -> Counter[str]:
    """Draw and compare; how often each rule was broken, and how many layouts were accepted and refused."""
    seen: Counter[str] = Counter()
    source = random.Random(0)
    for _ in range(NUM_LAYOUTS):
        case = draw(source)
        expected, problems = broken_rules(case), case.problems()
        broken = {rule_of(problem) for problem in problems}
        if expected == {"world"}:  # titan also reports rules that do not need the world
            broken &= {"world"}
        assert broken == expected, f"{case}: {expected} expected, titan reports {problems}"
        seen["refused" if expected else "accepted"] += 1
        seen.update(expected)
        if not expected:
            layout = resolve_layout(case.config(), case.world)
            assert layout.world_size == case.world
        for problem in problems:
            assert problem.key in ALL_KEYS and problem.message.count("\n") == 0
            for key, value in fixes_in(problem):
                after = {rule_of(p) for p in changed(case, key, value).problems()}
                assert rule_of(problem) not in after, (
                    f"{case}: {problem}: {key} = {value} does not"
                )
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, int]:
    """What `compare` returns in a process where torch cannot be imported."""
    script = (
        "import json, sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from tests.config.test_bad_layouts import compare; print(json.dumps(compare()))"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parents[2])]
    result = finished(command, timeout=120)
    return json.loads(result.stdout)


def test_refuses_what_the_oracle_refuses_and_nothing_else(seen: dict[str, int]) -> None:
    assert seen["refused"] >= 60 and seen["accepted"] >= 300
    assert seen["refused"] + seen["accepted"] == NUM_LAYOUTS


@pytest.mark.parametrize("rule", [*MESSAGES, "validation length"])
def test_every_rule_was_broken_several_times(rule: str, seen: dict[str, int]) -> None:
    assert seen[rule] >= 5


# ---- what is accepted runs -------------------------------------------------------------------------


def run_a_step(case: Case) -> list[float]:
    """Loss and gradient norm of a step, and a validation loss, on one rank of the pool."""
    import torch

    from tests.support.steps import build_step
    from titan.parallel import build_mesh

    config = case.config()
    layout = resolve_layout(config, case.world)
    mesh = build_mesh("cpu", **layout.degrees)
    program = build_step(config, mesh)

    def batch(length: int) -> Any:
        rows = torch.randint(
            case.model["vocab_size"], (config.training.local_batch_size, length + 1)
        )
        ids = (torch.arange(length) >= length // 2).long().expand(len(rows), -1)
        return SimpleNamespace(
            tokens_BS=rows[:, :-1],
            labels_BS=rows[:, 1:],
            positions_BS=None,
            document_ids_BS=ids if config.data.document_mask else None,
        )

    batches = [batch(config.training.seq_len) for _ in range(layout.accumulation)]
    report = program.train(batches, step=1)
    length = config.validation.seq_len or config.training.seq_len
    loss, num_valid = program.evaluate([batch(length)])
    return [report.loss.item(), report.grad_norm.item(), (loss / num_valid).item()]


def accepted(count: int) -> list[Case]:
    """Layouts of few ranks that the oracle accepts; the first has pipeline stages without attention, under CP."""
    odd = {DEGREES["cp"]: 2, PP: 2, SCHEDULE: "InterleavedZeroBubble", LENGTH: 8}
    small = {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 96,
        "vocab_size": 258,
    }
    cases, source = (
        [Case(4, odd | {"training.mixed_precision_param": "float32"}, small)],
        random.Random(7),
    )
    while len(cases) < count:
        case = draw(source)
        if 1 < case.world <= 4 and case.model["n_layers"] <= 8 and not broken_rules(case):
            cases.append(case)
    return cases


@pytest.mark.parametrize("count", [6, pytest.param(80, marks=pytest.mark.slow)])
def test_what_is_accepted_runs(count: int, pool: Pool) -> None:
    for case in accepted(count):
        assert not case.problems()
        for numbers in pool.run(case.world, run_a_step, case):
            assert all(0 < number < 100 for number in numbers), case
