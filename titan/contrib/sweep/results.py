"""Results of a sweep: a row for each run, a table with intervals, a verdict, and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from titan.observe.rows import final_loss, read_rows
from titan.run_folder import read_status
from titan.untrusted import InputError

from .grid import Trial

# 95% quantiles of Student's distribution by degrees of freedom: a two-sided interval of 90%.
_STUDENT = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 8: 1.860, 10: 1.812, 15: 1.753, 30: 1.697, 100: 1.660}  # fmt: skip
# Keys of what a loss is measured on.
_OTHER_TEXT = ("tokenizer.", "data.", "training.dataset", "model.hf_assets_path")


@dataclass(frozen=True)
class Setting:
    """Runs of the same settings with different seeds.

    Attributes:
        settings: The settings, as text.
        losses: Final losses of the runs that are done.
        states: State of each run.
    """

    settings: str
    losses: list[float]
    states: list[str]

    @property
    def loss(self) -> float:
        """Return the mean loss; infinite if a run diverged or none is done."""
        return fmean(self.losses) if self.losses and "diverged" not in self.states else math.inf


def row_of(trial: Trial) -> dict[str, Any]:
    """Return the result of a run: its settings, seed, state, and what its last rows say."""
    status, file = read_status(trial.run), trial.run / "metrics.jsonl"
    try:
        rows = read_rows(file) if file.is_file() else []
    except InputError:
        rows = []
    last = rows[-1] if rows else {}
    state, loss = str(status.get("state") or "waiting"), final_loss(rows)
    if status.get("kind") == "loss_not_finite":
        state, loss = "diverged", None
    elif state == "done" and not trial.is_done:
        state = "stopped early"
    return {
        "name": trial.name,
        "settings": trial.settings,
        "seed": trial.seed,
        "state": state,
        "loss": loss,
        "step": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "tokens_per_s": last.get("tokens_per_s"),
        "seconds": last.get("time_s"),
        "reason": status.get("reason") or "",
    }


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write results.jsonl."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "results.jsonl").write_text(text, encoding="utf-8")


def text_of(settings: dict[str, str]) -> str:
    """Return settings as they are on the command line."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the job"


def groups_of(rows: Sequence[dict[str, Any]]) -> list[Setting]:
    """Return the groups of runs, the best first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(text_of(row["settings"]), []).append(row)
    groups = [
        Setting(
            text,
            [row["loss"] for row in of_group if row["loss"] is not None and row["state"] == "done"],
            [row["state"] for row in of_group],
        )
        for text, of_group in found.items()
    ]
    return sorted(groups, key=lambda group: group.loss)


def difference(
    best: Setting, other: Setting, groups: Sequence[Setting]
) -> tuple[float, float | None]:
    """Return how much larger a group's loss is than the best one's, and the half width of the 90% interval.

    All groups share one variance between seeds. None: no group has two seeds, so that the noise is unknown.
    """
    several = [group.losses for group in groups if len(group.losses) > 1]
    freedom = sum(len(losses) - 1 for losses in several)
    gap = other.loss - best.loss
    if not freedom:
        return gap, None
    shared = sum((len(losses) - 1) * variance(losses) for losses in several) / freedom
    quantile = _STUDENT[max(known for known in _STUDENT if known <= freedom)]
    return gap, quantile * math.sqrt(shared * (1 / len(best.losses) + 1 / len(other.losses)))


def table(groups: Sequence[Setting]) -> list[str]:
    """Return the table's lines: settings, mean loss, and what it is over the best."""
    lines = ["| settings | loss | over the best | runs |", "|---|--:|--:|---|"]
    for group in groups:
        states = ", ".join(
            f"{group.states.count(state)} {state}" for state in dict.fromkeys(group.states)
        )
        over = "-"
        if math.isfinite(group.loss) and group is not groups[0]:
            gap, width = difference(groups[0], group, groups)
            over = f"{gap:.4f}" + (f" ± {width:.4f}" if width is not None else "")
        loss = f"{group.loss:.4f}" if math.isfinite(group.loss) else "-"
        lines.append(f"| {group.settings} | {loss} | {over} | {states} |")
    return lines


def verdict(groups: Sequence[Setting]) -> str:
    """Return a sentence about the best settings and the next best."""
    finite = [group for group in groups if math.isfinite(group.loss)]
    if not finite:
        return "no settings have finished all their runs"
    for key in _OTHER_TEXT:
        words = [[w for w in group.settings.split() if w.startswith(key)] for group in finite]
        if any(of_group != words[0] for of_group in words):
            return f"runs differ in {key}*: losses on other text or tokens do not compare"
    if len(finite) == 1:
        return f"{finite[0].settings} alone has finished, with loss {finite[0].loss:.4f}"
    best, second = finite[:2]
    gap, width = difference(best, second, finite)
    if width is None:
        return (
            f"{best.settings} is {gap:.4f} nats below {second.settings}, with a seed each: how much seeds differ is unknown; "
            "--seeds 2 measures it"
        )
    if gap > width:
        return f"{best.settings} is better than {second.settings} by {gap:.4f} ± {width:.4f} nats"
    return f"{best.settings} and {second.settings} do not differ: {gap:.4f} ± {width:.4f} nats; more seeds or longer runs may tell"


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the losses over the key that has most numbers as values, with a line for each setting of the others.

    Raises:
        InputError: No key has numbers, or no run is done.
    """
    from matplotlib.figure import Figure

    done = [row for row in rows if row["loss"] is not None and row["state"] == "done"]
    numbers = {
        key: {row["settings"][key] for row in done}
        for key in (done[0]["settings"] if done else ())
        if all(_is_number(row["settings"][key]) for row in done)
    }
    if not numbers:
        raise InputError("titan sweep: --plot: no key has numbers as values, or no run is done")
    axis = max(numbers, key=lambda key: len(numbers[key]))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in done:
        others = " ".join(f"{k}={v}" for k, v in row["settings"].items() if k != axis)
        lines.setdefault(others, []).append((float(row["settings"][axis]), row["loss"]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for others, points in sorted(lines.items()):
        x = sorted({point[0] for point in points})
        means = [fmean(loss for at, loss in points if at == each) for each in x]
        [line] = axes.plot(x, means, label=others or None)
        axes.scatter(*zip(*points, strict=True), color=line.get_color(), s=14)
    values = [float(value) for value in numbers[axis]]
    if min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log")
    axes.set(xlabel=axis, ylabel="final loss, nats per token")
    if any(lines):
        axes.legend()
    figure.savefig(file, dpi=110, format="png")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
