"""What a page shows of a run, read from its folder while the run writes it: only files of fixed names, and nothing is changed.

metrics.jsonl and events.jsonl are read on from where they were read to; one that was replaced (a resume or a rewind cuts rows away) is read
anew, which its `generation` tells. A hundred thousand rows become two thousand, with every peak among them. Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from titan.config.toml import read_toml
from titan.observe.runinfo import read_status

Row = dict[str, Any]

COLUMNS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "memory_gib", "time_s"),
    *("step_s", "data_wait_s", "validation_loss", "bits_per_byte", "loss_z", "grad_norm_z"),
    *("slowest_rank", "slowest_rank_s", "median_rank_s", "goodput", "unix_s", "eta_s"),
)
MAX_ROWS = 2000
MAX_EVENTS = 500
_SIGNS = ("metrics.jsonl", "status.json", "config.toml", "environment.json")
_TAIL_BYTES = 1024  # of a file of times: more than a row


class WatchError(Exception):
    """The user's mistake, in a line."""


class Tail:
    """Rows of a JSON-lines file that grows; a torn last line waits for its end."""

    def __init__(self, path: Path, *, key: str) -> None:
        self.path, self.key = path, key
        self.rows: list[Row] = []
        self.generation = 0
        self._inode, self._offset = -1, 0

    def update(self) -> None:
        try:
            stat = self.path.stat()
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self.rows, self._offset, self._inode = [], 0, stat.st_ino
                self.generation += 1
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read(stat.st_size - self._offset)
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                self.rows += [row] if isinstance(row, dict) and self.key in row else []


class RunReader:
    """One run's folder."""

    def __init__(self, folder: Path, *, name: str) -> None:
        if not any((folder / sign).is_file() for sign in _SIGNS):
            near = sorted({p.parent.name for s in _SIGNS for p in folder.parent.glob(f"*/{s}")})[:5]
            hint = f"; runs near it: {', '.join(near)}" if near else ""
            raise WatchError(f"{folder}: not the folder of a run{hint}")
        self.folder, self.name = folder, name
        self.metrics = Tail(folder / "metrics.jsonl", key="step")
        self.events = Tail(folder / "events.jsonl", key="event")
        self._ranks: dict[str, tuple[float, Row]] = {}

    def data(self, *, generation: int = 0, since: int = 0) -> Row:
        """What is new since a client's `since` rows of a `generation`; all of it, where that is not this one."""
        self.metrics.update()
        self.events.update()
        rows, events = self.metrics.rows, self.events.rows
        since = since if generation == self.metrics.generation and since <= len(rows) else 0
        status = read_status(self.folder)
        account = events[-1] if events else {}
        return {
            "name": self.name,
            "generation": self.metrics.generation,
            "since": since,
            "total": len(rows),
            "rows": [[row.get(c) for c in COLUMNS] for row in thin(rows[since:])],
            "status": status,
            "facts": self._facts(),
            "ranks": self._rank_rows(),
            "stragglers": _stragglers(events),
            "events": [
                {k: v for k, v in e.items() if k != "seconds"} for e in events[-MAX_EVENTS:]
            ],
            "seconds": account.get("seconds", {}),
            "restarts": account.get("restarts"),
            "lost_steps": account.get("lost_steps"),
        }

    def _facts(self) -> Row:
        """What does not change while a run goes on."""
        facts: Row = {"folder": str(self.folder)}
        with suppress(Exception):  # being written, or by hand
            config, _ = read_toml(self.folder / "config.toml")
            facts["steps"] = config["training"]["steps"]
            facts["description"] = config["job"]["description"]
            facts["model"] = f"{config['model']['name']} {config['model']['flavor']}"
        with suppress(OSError, ValueError):
            environment = json.loads((self.folder / "environment.json").read_text())
            facts |= {k: environment[k] for k in ("world_size", "torch", "hostname")}
            facts["device"] = environment["device_names"][0]
        return facts

    def _rank_rows(self) -> list[Row]:
        """The newest row of each rank's times."""
        for path in self.folder.glob("logs/rank-*.times.jsonl"):
            rank = path.name.split(".")[0].removeprefix("rank-")
            with suppress(OSError, ValueError, IndexError):
                stat = path.stat()
                if self._ranks.get(rank, (0.0,))[0] != stat.st_mtime:
                    with path.open("rb") as file:
                        file.seek(max(stat.st_size - _TAIL_BYTES, 0))
                        line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
                    self._ranks[rank] = stat.st_mtime, {"rank": int(rank)} | json.loads(line)
        return sorted((row for _, row in self._ranks.values()), key=lambda row: row["rank"])


def thin(rows: Sequence[Row], limit: int = MAX_ROWS) -> Sequence[Row]:
    """At most about `limit` rows: of each stretch those with its least and largest loss, a validation, and the last."""
    if len(rows) <= limit:
        return rows
    stretch = ceil(len(rows) / (limit / 4))
    kept = []
    for start in range(0, len(rows), stretch):
        part = range(start, min(start + stretch, len(rows)))
        valid = [i for i in part if rows[i].get("loss") is not None]
        chosen = {part[-1]}
        if valid:
            chosen |= {f(valid, key=lambda i: rows[i]["loss"]) for f in (min, max)}
        chosen |= set([i for i in part if rows[i].get("validation_loss") is not None][-1:])
        kept += [rows[i] for i in sorted(chosen)]
    return kept


def _stragglers(events: Sequence[Row]) -> list[int]:
    """Ranks that were told to be slow since the last start, and not to be fast again."""
    slow: set[int] = set()
    for event in events:
        if event["event"] in ("start", "resume"):
            slow.clear()
        elif event["event"] in ("straggler", "recovered") and isinstance(event.get("rank"), int):
            (slow.add if event["event"] == "straggler" else slow.discard)(event["rank"])
    return sorted(slow)


def read_all(readers: Sequence[RunReader], positions: Sequence[tuple[int, int]] = ()) -> Row:
    """The answer to a poll. positions: generation and number of rows that the client has, for each run."""
    known = [*positions, *[(0, 0)] * len(readers)][: len(readers)]
    runs = [r.data(generation=g, since=n) for r, (g, n) in zip(readers, known, strict=True)]
    return {"now": round(time.time(), 3), "columns": COLUMNS, "runs": runs}
