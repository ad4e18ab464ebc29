"""Fit the simulator's intervals to the published runs: titan/sim/report/errors.toml, by the model of titan/sim/report/intervals.py.

`scripts/sim_accuracy.py --write` saves its predictions with the classes of their work (predictions.json), and writes `document`.
`scripts/sim_accuracy.py --intervals` fits them again and prints how many measurements the intervals hold, each publication predicted
from the others. No figure here is set by hand except the prior, which is what classes without runs get.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import ceil, hypot, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan.config.toml import read_toml
from titan.sim.price.profiles import load_profile
from titan.sim.report.intervals import HARDWARE, TENSOR, ratio_deviation

JOBS = Path(__file__).parents[1] / "train_configs" / "published"
PREDICTIONS = JOBS / "predictions.json"
LEVEL = 0.9
CLASSES = (
    *("matmuls", "matmuls in 8 bits", "attention", "attention across ranks", "eager kernels", "compiled kernels"),
    *("experts' dispatch", "transfers within a node", "transfers between nodes", "waiting for the host", "waiting for stages"),
)  # fmt: skip
OTHER = "other software"
"""Class of a whole step of a program that the jobs do not imitate. No job of titan has it."""
PARAMETERS = ("floor", *CLASSES, TENSOR, HARDWARE, OTHER)
OTHERS = (
    "torchtitan-graph",
    "fms-fsdp",
    "arxiv-2407",
    "NVIDIA-NeMo",
    "KempnerInstitute",
    "llm-foundry",
)
LEFT_OUT = ("T8", "T9", "T10", "M3", "M4")
"""Rows that are no test: the power limit of these B200 is not published; M3 ran TransformerEngine's kernels, and M4 all experts in one bmm."""
PRIOR, PRIOR_RUNS = 0.25, 0.5
"""Standard deviation of a class before any run, and the number of runs that it counts as."""
RUN_TO_RUN = 0.01
"""Prior of the floor: what two runs of one job differ by."""
FREEDOM = 4.0
"""Degrees of freedom of the errors (Student's t), so that a few strange runs do not widen all others."""
NORMAL = 1.645
"""Standard deviations that hold 90% of normal errors: fewer would trust that the next publication is as near as these."""
COUNTS_FROM = 0.05  # share of the step from which a run says something about a class


class Known(NamedTuple):
    """Predicted and measured run.

    Attributes:
        name: ID of its row.
        source: publication.
        job: what a planner keeps: model, number of GPUs, machine, sequence length and options of the software.
        device: device of its profile.
        mix: shares by class.
        error: log(measured / predicted).
        profile: its profile.
    """

    name: str
    source: str
    job: str
    device: str
    mix: dict[str, float]
    error: float
    profile: str = ""


class Fit(NamedTuple):
    """Fitted standard deviations by parameter, and the factor of an interval."""

    sigma: dict[str, float]
    factor: float


def saved() -> dict[str, dict[str, Any]]:
    """Return the saved predictions by row."""
    return json.loads(PREDICTIONS.read_text(encoding="utf-8")) if PREDICTIONS.exists() else {}


def save(predictions: dict[str, dict[str, Any]]) -> None:
    """Write predictions: {row: {"speed": tokens/s/GPU, "shares": {class: share}}}, those of other rows kept."""
    rounded = {
        name: {
            "speed": round(row["speed"], 3),
            "shares": {k: round(v, 4) for k, v in row["shares"].items() if v >= 1e-4},
        }
        for name, row in predictions.items()
    }
    lines = [
        f"{json.dumps(n)}: {json.dumps(row)}" for n, row in sorted((saved() | rounded).items())
    ]
    PREDICTIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def known_runs() -> list[Known]:
    """Return the runs whose measured speed a saved prediction can be compared with."""
    found, predictions = [], saved()
    for run in read_toml(JOBS / "runs.toml")[0]["run"]:
        name, measured = run["id"], run.get("tokens_per_s_per_gpu")
        row = predictions.get(name)
        # A profile's figures were set with the calibrated rows, so that their errors say nothing.
        if name in LEFT_OUT or run["use"] == "calibrate" or not (row and measured):
            continue
        file = run["profile"]
        profile = load_profile(JOBS / file if file.endswith(".toml") else file)
        mix = {name: share for name, share in row["shares"].items() if name != HARDWARE}
        if profile.unsupported:
            mix[HARDWARE] = 1.0
        if run["tp"] > 1:
            mix[TENSOR] = 1.0
        if run["source"].startswith(OTHERS):
            mix[OTHER] = 1.0
        # Layouts and recomputation are a planner's choice, and so is when FSDP frees parameters.
        options = [option for option in run["options"] if not option.startswith("reshard")]
        job = f"{run['model']} {run['gpus']} {file} {run['seq_len']} {options}"
        error = log(measured / row["speed"])
        found.append(Known(name, run["source"], job, profile.device, mix, error, file))
    return found


def _shares(runs: Sequence[Known]) -> np.ndarray:
    """Return the squared shares of each run (row) in each parameter (column)."""
    return np.array(
        [[r.mix.get(p, float(p == "floor")) ** 2 for p in PARAMETERS] for r in runs]
    )


def sigmas(runs: Sequence[Known]) -> dict[str, float]:
    """Return the standard deviations that make the runs' errors most likely, given the prior.

    Each step multiplies a variance by the root of the ratio of the two parts of its gradient. It stays positive, and the likelihood
    never falls (Hunter and Lange 2004, on MM algorithms).
    """
    squares, error = _shares(runs), np.array([r.error for r in runs]) ** 2
    prior = np.full(len(PARAMETERS), PRIOR**2)
    prior[0] = RUN_TO_RUN**2
    variance = prior.copy()
    for _ in range(1000):
        total = squares @ variance
        weight = (FREEDOM + 1) / (FREEDOM + error / total)
        up = (weight * error / total**2) @ squares + PRIOR_RUNS * prior / variance**2
        down = (1 / total) @ squares + PRIOR_RUNS / variance
        variance *= np.sqrt(up / down)
    found = dict(zip(PARAMETERS, np.sqrt(variance).tolist(), strict=True))
    return found | {"floor": hypot(found["floor"], source_deviation(runs))}


def source_deviation(runs: Sequence[Known]) -> float:
    """Return the standard deviation of what the runs of one publication are off by together, from the median over publications.

    A publication's machines, software and way to measure are its own, so that its runs err alike. Those on unsupported hardware and of
    other software have classes of their own.
    """
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        if not {HARDWARE, OTHER} & set(run.mix):
            errors[run.source].append(run.error)
    # 1.4826 is the standard deviation of a normal distribution over its median absolute value.
    return 1.4826 * float(np.median([abs(np.mean(own)) for own in errors.values()]))


def card_deviation(runs: Sequence[Known]) -> float:
    """Return the standard deviation of a card without runs, whose profile is made as those of other cards: datasheet, tables, benchmarks.

    Each card with such a profile stands for one left out: no figure of it was set with its runs, so that the median of their errors is
    what its profile is off by. Those of h100-96g-500w set its profile. The prior counts as it does for a class.
    """
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        if HARDWARE not in run.mix and run.profile != "h100-96g-500w":
            errors[run.device].append(run.error)
    cards = [float(np.median(own)) ** 2 for own in errors.values()]
    return ((PRIOR_RUNS * PRIOR**2 + sum(cards)) / (PRIOR_RUNS + len(cards))) ** 0.5


def deviations(runs: Sequence[Known], sigma: dict[str, float]) -> np.ndarray:
    """Return the standard deviation of each run."""
    return np.sqrt(_shares(runs) @ np.array([sigma[p] ** 2 for p in PARAMETERS]))


def groups(runs: Sequence[Known]) -> Iterable[tuple[list[Known], list[Known]]]:
    """Yield the runs of each publication, and all others."""
    for source in dict.fromkeys(run.source for run in runs):
        yield [r for r in runs if r.source == source], [r for r in runs if r.source != source]


def fit(runs: Sequence[Known]) -> Fit:
    """Return the fit. The factor holds `LEVEL` of the runs, each with the sigmas of the other publications."""
    scores = [
        abs(run.error) / deviation
        for own, others in groups(runs)
        for run, deviation in zip(own, deviations(own, sigmas(others)), strict=True)
    ]
    # The quantile of conformal prediction: one more run than there are.
    place = min(len(scores), ceil((len(scores) + 1) * LEVEL))
    return Fit(sigmas(runs), max(NORMAL, float(sorted(scores)[place - 1])))


def cross_validated(runs: Sequence[Known]) -> list[tuple[Known, float, bool]]:
    """Return each run with the half width of its interval, fitted to the other publications alone, and whether it holds."""
    rows = []
    for own, others in groups(runs):
        sigma, factor = fit(others)
        for run, deviation in zip(own, deviations(own, sigma), strict=True):
            rows.append((run, factor * deviation, bool(abs(run.error) <= factor * deviation)))
    return rows


def pairs(runs: Sequence[Known]) -> list[tuple[Known, Known]]:
    """Return the pairs of runs of one publication that run the same job, as layouts that a planner chooses between do."""
    like = [run for run in runs if OTHER not in run.mix]
    return [(a, b) for a, b in combinations(like, 2) if (a.source, a.job) == (b.source, b.job)]


def pair_floor(runs: Sequence[Known], found: Fit) -> float:
    """Return the smallest floor with which `LEVEL` of the pairs of runs hold, to 0.1%."""
    every = pairs(runs)
    for thousandths in range(300):
        floor = thousandths / 1000
        inside = sum(_holds(a, b, found, floor) for a, b in every)
        if inside >= LEVEL * len(every):
            break
    return floor


def _holds(a: Known, b: Known, found: Fit, floor: float) -> bool:
    """Return whether the measured ratio of two runs is in the interval of the predicted one."""
    deviation = ratio_deviation(a.mix, b.mix, found.sigma, floor)
    return abs(a.error - b.error) <= found.factor * deviation


def document() -> str:
    """Return the text of errors.toml."""
    runs = known_runs()
    found = fit(runs)
    counts = {
        p: sum(r.mix.get(p, 0.0) >= COUNTS_FROM for r in runs)
        for p in (*CLASSES, TENSOR, HARDWARE)
    }
    devices = Counter(r.device for r in runs if HARDWARE not in r.mix and r.device)
    lines = [
        "# Written by scripts/sim_accuracy.py --write; do not edit. titan/sim/report/intervals.py says what the figures mean.",
        f"level = {LEVEL}",
        f"factor = {found.factor:.3f}",
        f"floor = {found.sigma['floor']:.4f}",
        f"pair_floor = {pair_floor(runs, found):.4f}",
        f"untested_card = {card_deviation(runs):.4f}",
        "",
        f"[sigma] # of {len(runs)} runs",
        *(f"{json.dumps(p)} = {found.sigma[p]:.4f}" for p in (*CLASSES, TENSOR, HARDWARE)),
        "",
        f"[runs] # in which the class is {COUNTS_FROM:.0%} of the step or more",
        *(f"{json.dumps(p)} = {n}" for p, n in counts.items()),
        "",
        "[devices] # with supported figures: their runs",
        *(f"{json.dumps(device)} = {n}" for device, n in sorted(devices.items())),
    ]
    return "\n".join(lines) + "\n"


def table() -> list[str]:
    """Return how many measurements the intervals hold, by publication, each fitted to the others alone."""
    rows = cross_validated(known_runs())
    lines = ["| publication | runs | in the interval | mean half width | mean error |", "|---|--:|--:|--:|--:|"]  # fmt: skip
    sources = [*dict.fromkeys(run.source for run, _, _ in rows)]
    for name in [*sources, "all"]:
        own = [row for row in rows if name in (row[0].source, "all")]
        inside = sum(holds for _, _, holds in own)
        width = sum(w for _, w, _ in own) / len(own)
        error = sum(abs(run.error) for run, _, _ in own) / len(own)
        lines.append(f"| {name} | {len(own)} | {inside} | {width:.1%} | {error:.1%} |")
    inside = sum(holds for _, _, holds in rows)
    outside = ", ".join(run.name for run, _, holds in rows if not holds)
    return [*lines, "", f"{inside} of {len(rows)} hold: {40 * inside / len(rows):.1f} of 40. Outside: {outside}."]  # fmt: skip
