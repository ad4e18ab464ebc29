"""Plan and auto beside all layouts of small spaces, whose simulations are stored (scripts/bench/simulator.py spaces)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from titan.config.load import load_from_argv
from titan.sim.price.profiles import load_profile
from titan.sim.search import auto
from titan.sim.search.candidates import LayoutSearch
from titan.sim.search.plan import plan
from titan.sim.search.point import Point
from titan.sim.search.variants import Variant

SPACES: dict[str, Any] = json.loads(Path(__file__).with_name("planner_spaces.json").read_text())


class StoredSearch(LayoutSearch):
    """Search of a space that looks its simulations up."""

    def __init__(self, space: dict[str, Any]) -> None:
        job = space["job"]
        super().__init__(
            job,
            load_from_argv(job),
            load_profile(space["hardware"]),
            world_size=space["world"],
            held=space["held"],
        )
        stored: list[dict[str, Any]] = [row["point"] | {"also": ()} for row in space["rows"]]
        points = [Point(**settings) for settings in stored]
        self.rows = dict(zip(points, space["rows"], strict=True))
        self.asked: set[Point] = set()
        self.stopped = False

    def combinations(self) -> Iterator[Point]:
        yield from self.rows

    def __call__(self, settings: Iterable[dict[str, str]]) -> list[Variant]:
        by_settings = {json.dumps(self.settings(point)): point for point in self.rows}
        return [self._variant(by_settings.get(json.dumps(one)), one) for one in settings]

    def _variant(self, point: Point | None, settings: dict[str, str]) -> Variant:
        point = point or (None if settings else self.own())
        row = self.rows.get(point) if point else None
        if point is None or row is None:
            return Variant(settings, "stored", problem="outside of the space")
        self.asked.add(point)
        facts = {
            "tokens_per_s_per_gpu": row["speed"],
            "fits": row["fits"],
            "tight": row["tight"],
        }
        return Variant(
            settings, "stored", facts | {"memory": {"needed_gib": row["needed_gib"]}}
        )


@pytest.mark.parametrize("name", SPACES)
def test_plan_and_auto_find_the_best(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "reason", lambda *_: "")
    best = max(row["speed"] for row in SPACES[name]["rows"] if row["fits"])
    search = StoredSearch(SPACES[name])
    [(_, first), *_] = plan(search, budget=min(20, len(search.rows) // 2)).ranked
    assert first.speed >= 0.99 * best
    assert len(search.asked) < len(search.rows)
    search = StoredSearch(SPACES[name])
    choice = auto._by_simulation(search)
    assert not isinstance(choice, str)
    chosen = choice.settings.items()
    [point] = [p for p in search.rows if search.settings(p).items() <= chosen]
    assert search.rows[point]["speed"] >= 0.99 * best
    assert len(search.asked) <= 7
