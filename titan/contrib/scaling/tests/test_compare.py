"""titan compare: the statistics against drawn runs whose truth is known, the command against metrics.jsonl, and mistakes."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from tests.support.commands import Shell
from tests.support.tables import table, tabled
from titan.base.rows import read_rows
from titan.cli import main as titan
from titan.contrib.scaling import compare, paired
from titan.contrib.scaling.paired import Estimate

from .test_sweep import JOB


def compared(generator: np.random.Generator, efficiency: float) -> tuple[Estimate, Estimate]:
    """Return the gap and the price of three pairs of runs: power laws with the noise of samples that both see, and with a drift of each."""
    tokens, pairs = np.arange(1, 101) * 1000, []
    for _ in range(3):
        samples, pair = generator.normal(size=100) * 0.02, []
        for each in (1.0, efficiency):
            drift = np.cumsum(generator.normal(size=100)) * 1e-4 + generator.normal() * 2e-3
            losses = 1.5 + 20 * (tokens * each) ** -0.3 + samples + drift
            pair.append((tokens.tolist(), losses.tolist()))
        pairs.append(pair)
    gap = paired.mean_of([paired.final(b) - paired.final(a) for a, b in pairs])
    return gap, paired.price(gap, paired.slope_of([curve for pair in pairs for curve in pair]))


def test_equal_recipes_differ_in_a_tenth_of_comparisons() -> None:
    generator = np.random.default_rng(0)
    gaps = [compared(generator, 1.0)[0] for _ in range(1000)]
    assert 0.08 < fmean(gap.low * gap.high > 0 for gap in gaps) < 0.12


@pytest.mark.parametrize("efficiency", [1 / 1.1, 1 / 1.5, 1.2])
def test_the_price_holds_the_truth(efficiency: float) -> None:
    """A recipe that learns as much from 1.1 tokens as another from one needs 10% more of them."""
    generator, truth = np.random.default_rng(1), -math.log(efficiency)
    prices = [compared(generator, efficiency)[1] for _ in range(200)]
    assert fmean(price.low < truth < price.high for price in prices) > 0.88
    assert fmean(price.value for price in prices) == pytest.approx(truth, rel=0.15)


def test_the_sentence() -> None:
    gap, time = Estimate(0.004, 0.001, 0.007), Estimate(*map(math.log, (0.69, 0.66, 0.73)))
    tokens = paired.price(gap, Estimate(0.13, 0.13, 0.13))
    cost = Estimate(*map(sum, zip(time, tokens, strict=True)))
    changes = {"time a token": time, "tokens": tokens, "time": cost}
    assert compare.sentence(gap, "nats", changes) == (
        "B takes 31% less time a token (27 to 34); its loss is 0.0040 nats higher (0.0010 to 0.0070), "
        "which is 3.1% more tokens (0.8 to 5.5); so the same loss costs 29% less time (23 to 33)"
    )


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        ((0.004, 0.001, 0.007), "3.1% more tokens (0.3 or more)"),
        ((-0.004, -0.007, -0.001), "3.0% fewer tokens (0.3 or more)"),
    ],
)
def test_a_decaying_rate_leaves_the_far_end_open(
    gap: tuple[float, float, float], text: str
) -> None:
    tokens = paired.price(Estimate(*gap), Estimate(0.13, 0.13, 0.13), decays=True)
    assert f", which is {text}" in compare.sentence(Estimate(*gap), "nats", {"tokens": tokens})


def write_run(folder: Path, seed: int, run: dict[str, Any]) -> None:
    """Write a run's folder, as far as the command reads it. Losses fall with the logarithm of the steps."""
    folder.mkdir(parents=True)
    own = {"debug.seed": run.get("seed", seed)}
    if folder.parts[0] == "b":
        own["optimizer.eps"] = 1e-6
    job = dict(table(__file__, "job")) | own | run.get("job", {})
    if run.get("validates"):
        job |= {"validation.enable": True, "data.validation_fraction": 0.1}
    lines = [
        f"{key} = {value if str(value)[0] in '{[' else json.dumps(value)}\n"
        for key, value in job.items()
        if value is not None
    ]
    (folder / "config.toml").write_text("".join(lines))
    if host := run.get("host", "here"):
        facts = {"world_size": run.get("ranks", 1), "device_names": ["CPU"], "hostname": host}
        (folder / "environment.json").write_text(json.dumps(facts))
    if kind := run.get("kind"):
        (folder / "status.json").write_text(json.dumps({"state": "failed", "kind": kind}))
    losses = [
        4
        - run.get("falls", 0.2) * math.log(step)
        + 0.01 * seed
        + run.get("gap", 0) * (1 + seed / 10)
        + run.get("wobble", 0) * (seed - 1)
        for step in range(1, 1 + run.get("last", 40))
    ]
    rows, log = [], run.get("log", 2)
    for step in range(log, len(losses) + 1, log):
        row = {"step": step, "tokens": 64 * step, "loss_mean": fmean(losses[step - log : step])}
        row |= {"tokens_per_s": run.get("speed", 1000), "memory_gib": 1.0, "lr": 1.0}
        if run.get("decays"):
            row["lr"] = 1 - step / 41
        if run.get("validates") and step % run.get("every", 4) == 0:
            row["validation_loss"] = losses[step - 1] - 1
        rows.append(json.dumps(row) + "\n")
    if rows:
        (folder / "metrics.jsonl").write_text("".join(rows))


CASES = table(__file__, "pairs_of_runs")


@pytest.mark.parametrize("case", CASES, ids=[case["what"] for case in CASES])
def test_pairs_of_runs(
    case: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shell: Shell,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in case.get("files", {}).items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    for side, seed in product("ab", range(3)):
        run = case.get(side, {}) | case.get(f"{side}{seed}", {})
        write_run(Path(side, str(seed)), seed, run)
    said = "".join(shell("compare a b", *case.get("words", []), code=case.get("code", 0)))
    assert [text for text in case["says"] if text not in said] == [], said
    assert [text for text in case.get("not", []) if text in said] == [], said


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", "6e-3"), ("b", "4e-3")):
        text = f"{JOB}[optimizer]\nlr = {rate}\n"
        Path(f"{name}.toml").write_text(text)
    return ["compare", "a.toml", "b.toml"]


def test_jobs_are_trained_and_compared(
    jobs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*jobs, "--seeds=2", "--steps=40", "--training.local_batch_size=32"]
    assert titan([*words, "--json=c.json"]) == 0
    gaps = []
    for seed in range(2):
        a, b = (read_rows(Path(f"compare/{side}/seed={seed}/metrics.jsonl")) for side in "ab")
        # Of the steps from 32 on.
        gaps.append(
            fmean(y["loss_mean"] - x["loss_mean"] for x, y in zip(a[-5:], b[-5:], strict=True))
        )
    value, _, high = json.loads(Path("c.json").read_text())["gap"]
    assert value == pytest.approx(fmean(gaps)) and value > 0.05
    # Student's quantile for one degree of freedom.
    assert high - value == pytest.approx(6.314 * abs(gaps[0] - gaps[1]) / 2)
    # Nothing is trained again. Time may be simulated: 125 tokens/s in place of 100 take 20% less.
    parts = {"memory": {"needed_gib": 1.0}, "interval": {"shares": {}}}
    facts = [parts | {"tokens_per_s_per_gpu": speed} for speed in (100.0, 125.0)]
    monkeypatch.setattr(compare, "simulated", lambda *_, **__: facts.pop(0))
    capsys.readouterr()
    assert titan([*words, "--hardware=h100-sxm"]) == 0
    said = capsys.readouterr().out
    assert "begins" not in said and "B takes 20% less time a token" in said


@tabled("old, new, expected")
def test_losses_that_do_not_compare(
    jobs: list[str], old: str, new: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("b.toml").write_text(Path("b.toml").read_text().replace(old, new))
    assert titan(jobs) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    assert titan([*jobs, "--seeds=1"]) == 2 and not Path("compare/a/seed=0").exists()
