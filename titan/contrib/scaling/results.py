"""Results of a sweep: a row for each run, a table with intervals, and a verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError

from .runs import final_loss
from .trials import Trial

# 95% quantiles of Student's distribution by degrees of freedom: a two-sided interval of 90%.
_STUDENT = {
    1: 6.314,
    2: 2.920,
    3: 2.353,
    4: 2.132,
    5: 2.015,
    6: 1.943,
    8: 1.860,
    10: 1.812,
    15: 1.753,
    30: 1.697,
    100: 1.660,
}
# Keys of what a loss is measured on.
_OTHER_TEXT = ("tokenizer.", "data.", "training.dataset", "model.hf_assets_path")


@dataclass(frozen=True)
class Setting:
    """Runs of the same settings with different seeds.

    Attributes:
        settings: the settings, as text.
        losses: final losses of the runs that are done.
        states: state of each run.
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
    rows = []
    with suppress(InputError):
        rows = RunFolder(trial.run).rows()
    last, state = rows[-1] if rows else {}, trial.state
    return {
        "name": trial.name,
        "settings": trial.settings,
        "seed": trial.seed,
        "state": state,
        "loss": None if state == "diverged" else final_loss(rows),
        "step": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "tokens_per_s": last.get("tokens_per_s"),
        "seconds": last.get("time_s"),
        "reason": RunFolder(trial.run).status.reason,
    }


def text_of(settings: dict[str, str]) -> str:
    """Return settings as they are on the command line."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the job"


def groups_of(rows: Sequence[dict[str, Any]]) -> list[Setting]:
    """Return the groups of runs, the best first."""
    found: dict[str, Setting] = {}
    for row in rows:
        text = text_of(row["settings"])
        group = found.setdefault(text, Setting(text, [], []))
        group.states.append(row["state"])
        if row["state"] == "done" and row["loss"] is not None:
            group.losses.append(row["loss"])
    return sorted(found.values(), key=lambda group: group.loss)


def student(freedom: int) -> float:
    """Return the 95% quantile of Student's distribution, for an interval of 90%."""
    return _STUDENT[max(known for known in _STUDENT if known <= freedom)]


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
    return gap, student(freedom) * math.sqrt(
        shared * (1 / len(best.losses) + 1 / len(other.losses))
    )


def table(groups: Sequence[Setting]) -> list[str]:
    """Return the table's lines: settings, mean loss, and what it is over the best."""
    lines = ["| settings | loss | over the best | runs |", "|---|--:|--:|---|"]
    for group in groups:
        counts = Counter(group.states).items()
        states = ", ".join(f"{count} {state}" for state, count in counts)
        loss = over = "-"
        if math.isfinite(group.loss):
            loss = f"{group.loss:.4f}"
            if group is not groups[0]:
                over = _interval(*difference(groups[0], group, groups))
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
    best, *others = finite
    if not others:
        return f"{best.settings} alone has finished, with loss {best.loss:.4f}"
    second = others[0]
    gap, width = difference(best, second, finite)
    if width is None:
        return (
            f"{best.settings} is {gap:.4f} nats below {second.settings}, with a seed each: how much seeds differ is unknown; "
            "--seeds 2 measures it"
        )
    size = f"{_interval(gap, width)} nats"
    if gap > width:
        return f"{best.settings} is better than {second.settings} by {size}"
    return f"{best.settings} and {second.settings} do not differ: {size}; more seeds or longer runs may tell"


def _interval(gap: float, width: float | None) -> str:
    return f"{gap:.4f}" if width is None else f"{gap:.4f} ± {width:.4f}"
