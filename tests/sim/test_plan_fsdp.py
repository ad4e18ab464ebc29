"""`titan plan --only fsdp`: the choice against all others at every limit, what it tries, the command and its overlay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import Shell
from tests.support.jobs import ROOT
from titan.checks.rules import check_to_run
from titan.config.load import load_from_argv
from titan.sim.price.profiles import load_profile
from titan.sim.search.fsdp import PREFETCH, UNITS, choose, settings
from titan.sim.search.variants import Variant, simulate_variants
from titan.sim.simulate import simulate

BLOCKS, WORLD = 4, 16
H100 = load_profile("h100-sxm")
JOB = f"{ROOT}/train_configs/llama3_1b.toml --model.overrides.n_layers={BLOCKS} --training.seq_len=1024 --training.local_batch_size=1 --compile.enable=false".split()


def every_choice() -> Iterator[dict[str, str]]:
    for unit in UNITS:
        for prefetch in PREFETCH:
            for units in range(1, -(-BLOCKS // unit) + 1 if unit <= BLOCKS else 1):
                yield settings(unit=unit, prefetch=prefetch, kept=min(units * unit, BLOCKS))


@pytest.fixture(scope="module")
def variants() -> list[Variant]:
    """The job as it is, then with every choice."""
    every = [{}, *every_choice()]
    found = simulate_variants(JOB, every, world_size=WORLD, profiles=[H100])
    assert all(variant.facts for variant in found)
    return found


def test_no_other_choice_is_faster(variants: list[Variant]) -> None:
    """At limits between the memory of any two choices. What need not be tried is not."""
    now, *choices = variants
    known = {str(variant.settings): variant for variant in choices}
    gib = sorted({variant.needed_gib for variant in variants})
    assert len(choices) == 18 and len(gib) >= 6
    chosen, tried = set(), []
    for limit in (gib[0] - 0.01, *gib):
        asked: list[str] = []

        def simulate_all(
            wanted: list[dict[str, str]], asked: list[str] = asked
        ) -> list[Variant]:
            asked += map(str, wanted)
            return [known[str(one)] for one in wanted]

        best = choose(simulate_all, now=now, num_blocks=BLOCKS, limit_gib=limit)
        fitting = [v.speed for v in variants if v.needed_gib <= limit]
        if not fitting:
            assert best is None
            continue
        assert best is not None and best.needed_gib <= limit
        assert best.speed == max(fitting)
        chosen.add(str(best.settings))
        tried.append(len(set(asked)))
    assert len(chosen) > 2
    assert tried[-1] == 2 * len([u for u in UNITS if u <= BLOCKS])  # all fits: the bounds alone


def test_a_slower_job_that_fits_stays_as_it_is() -> None:
    now = Variant({}, "h100")
    now.facts = {
        "tokens_per_s_per_gpu": 2.0,
        "memory": {"needed_gib": 1.0},
    }
    refused = replace(now, facts={}, problem="refused")
    best = choose(lambda some: [refused] * len(some), now=now, num_blocks=2, limit_gib=1.0)
    assert best is now


def test_the_overlay_is_the_job_that_was_simulated(
    variants: list[Variant], tmp_path: Path, shell: Shell
) -> None:
    now, *choices = variants
    most = max(v.needed_gib for v in choices)
    limit = (min(v.needed_gib for v in choices) + most) / 2
    found, overlay = tmp_path / "found.json", tmp_path / "fsdp.toml"
    where = [f"--world-size={WORLD}", "--hardware=h100-sxm", f"--memory={limit}"]
    where += ["--only=fsdp", f"--json={found}", f"--output={overlay}"]
    page = shell("plan", *JOB, *where).out
    claim = json.loads(found.read_text())["results"]["fsdp"]
    config = load_from_argv([*JOB, str(overlay)])
    check_to_run(config, world_size=1)  # also where nothing is shared
    check_to_run(config, world_size=WORLD)
    simulation = simulate(config, world_size=WORLD, profile=H100)
    fullest = simulation.fullest
    assert simulation.timeline.step_s == claim["step_time_s"] < now.facts["step_time_s"]
    assert fullest.peak_reserved_bytes / 2**30 == claim["memory"]["peak_reserved_gib"]
    assert (fullest.peak_reserved_bytes + fullest.outside_bytes) / 2**30 <= limit < most
    assert "as it is" in page and f"wrote {overlay}" in page


def test_a_limit_that_nothing_meets(shell: Shell) -> None:
    where = [f"--world-size={WORLD}", "--hardware=h100-sxm"]
    said = shell("plan", *JOB, "--only=fsdp", *where, "--memory=2", code=1).err
    assert "no choice fits in 2.0 of 2 GiB; it needs" in said
