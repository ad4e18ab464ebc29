"""Readers of a run's folder for the live page, while the run writes it. Only files of fixed names are read.

Each poll reads the lines that were added to metrics.jsonl and events.jsonl (titan/tools/row_files.py). If a resume cut a file
or replaced it, its `generation` changes and the client gets all rows again. A million rows are thinned to four thousand,
which contain every peak. A damaged file costs its own part of the page, and adds a line to `problems`. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from titan.base.rows import Row, number, parse
from titan.base.run_folder import CONFIG, ENVIRONMENT, EVENTS, METRICS, SIGNS, STATUS, RunFolder
from titan.base.untrusted import InputError, open_regular
from titan.tools.row_files import MAX_ROWS, LineFile, RowFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COLUMNS = (
    "step",
    "loss",
    "loss_mean",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_s",
    "mfu",
    "time_s",
    "memory_gib",
    "step_s",
    "data_wait_s",
    "validation_loss",
    "bits_per_byte",
    "loss_z",
    "grad_norm_z",
    "slowest_rank",
    "slowest_rank_s",
    "median_rank_s",
    "goodput",
    "unix_s",
    "eta_s",
    "expert_imbalance",
    "drift/ratio",
)
MAX_EVENTS = 500
# Limits, so that no file of a run, whoever wrote it, makes the page or this process large.
_EVENTS_BYTES, _SMALL_BYTES = 2**22, 2**20
_MAX_STARTS, _MAX_RANKS, _MAX_KEYS, _MAX_TEXT = 200, 8192, 64, 2000
# Events that change how the page looks; they are read even if newer ones push them out of the list.
_LASTING = re.compile(rb'"event": "(start|resume|rewind|straggler|recovered|drift|drift_over)"')
_RANK_NUMBERS = ("step", "unix_s", "step_s", "data_wait_s", "own_s")
_TAIL_BYTES = 1024  # at the end of a file of times: more than one row
_MAX_CELLS = 2**17  # of the table of experts: 128 layers of 1024


class RunReader:
    """Reader of one run's folder.

    Attributes:
        folder: folder of the run.
        name: name of the run on the page.
        metrics: rows of metrics.jsonl, thinned to about `limit`.
        events: rows of events.jsonl.
    """

    def __init__(self, folder: Path, *, name: str, limit: int = MAX_ROWS) -> None:
        # A run writes these at its start, so a folder without them is no run.
        """Open the folder of a run.

        Args:
            folder: folder of the run.
            name: name of the run on the page.
            limit: approximate number of rows to keep.

        Raises:
            InputError: It is not the folder of a run.
        """
        if not any((folder / sign).is_file() for sign in SIGNS):
            raise InputError(f"{folder}: not the folder of a run{RunFolder.near(folder)}")
        self.folder, self.name = folder, name
        self.metrics = RowFile(folder / METRICS, limit=limit)
        num_events = max(limit * MAX_EVENTS // MAX_ROWS, 10)
        self.events = EventFile(folder / EVENTS, limit=num_events)
        # Content of each file that was read, with the file's modification time then.
        self._ranks: dict[int, tuple[float, Row]] = {}
        self._read: dict[str, tuple[float, Row]] = {}
        self._problems: list[str] = []
        self._tasks: list[str] = []  # columns of evaluations so far; new columns are appended

    def data(self, *, generation: int = 0, since: int = 0) -> Row:
        """Return the answer to a client's poll.

        Args:
            generation: generation of the client's rows.
            since: number of rows that the client has.

        Returns:
            Facts of the run and the rows after `since`, or all rows if the generation has changed.
        """
        # Read the new lines first, then answer from all rows kept.
        self.metrics.update()
        self.events.update()
        self._problems = [p for p in (self.metrics.problem, self.events.problem) if p]
        # A client with rows of an earlier generation starts over.
        is_known = generation == self.metrics.tail.generation
        rows = self.metrics.since(since) if is_known else None
        shown = self.metrics.thin.rows() if rows is None else rows
        evaluated = (key for row in shown for key in row if key.startswith("eval/"))
        self._tasks = list(islice(dict.fromkeys([*self._tasks, *evaluated]), _MAX_KEYS))
        status = self._small(STATUS, json.loads)
        account = self.events.rows[-1] if self.events.rows else {}
        # Events and status have the account of time up to them, and the newest is the longest.
        accounts = [
            row["seconds"] for row in (status, account) if is_account(row.get("seconds"))
        ]
        seconds = max(accounts, key=lambda parts: sum(parts.values()), default={})
        return {
            "name": self.name,
            "generation": self.metrics.tail.generation,
            "since": 0 if rows is None else since,
            "total": self.metrics.thin.count,
            "rows": [[number(row.get(c)) for c in (*COLUMNS, *self._tasks)] for row in shown],
            "tasks": [key[:_MAX_TEXT] for key in self._tasks],
            "samples": self._small("samples.json", json.loads, keep=sample_texts),
            "status": status,
            "facts": self._facts(),
            "experts": self._small("experts.json", json.loads, keep=expert_table),
            "ranks": self._rank_rows(),
            "stragglers": sorted(self.events.slow),
            "drift": self.events.drift,
            "starts": list(self.events.starts),
            "events": [
                {k: v for k, v in e.items() if k != "seconds"} for e in self.events.rows
            ],
            "seconds": seconds,
            "restarts": account.get("restarts"),
            "lost_steps": account.get("lost_steps"),
            "problems": self._problems,
        }

    def _facts(self) -> Row:
        """Return the facts that stay the same during a run."""
        config = self._small(CONFIG, lambda text: tomllib.loads(text.decode()), keep=dict)
        environment = self._small(ENVIRONMENT, json.loads)
        facts: Row = {"folder": str(self.folder)}
        # Each fact that is missing, or has another type, is left out.
        with suppress(KeyError, TypeError):
            facts["steps"] = number(config["training"]["steps"])
        with suppress(KeyError, TypeError):
            facts["description"] = config["job"]["description"]
            facts["model"] = f"{config['model']['name']} {config['model']['flavor']}"
        with suppress(KeyError, TypeError, IndexError):
            facts |= {k: environment[k] for k in ("world_size", "torch", "hostname")}
            facts["device"] = environment["device_names"][0]
        return scalars(facts)

    def _small(
        self,
        name: str,
        load: Callable[[bytes], Any],
        *,
        keep: Callable[[Row], Row] | None = None,
    ) -> Row:
        """Return the content of a small file, which is read again only if it has changed.

        Args:
            name: name of the file.
            load: function that parses the file's bytes.
            keep: function that selects the content for the page, by default all numbers and texts. It may raise ValueError.

        Returns:
            The content. A damaged file gives {} and a line in `problems`.
        """
        try:
            with open_regular(self.folder / name, within=self.folder) as file:
                status = os.fstat(file.fileno())
                if self._read.get(name, (0.0,))[0] != status.st_mtime:
                    if status.st_size > _SMALL_BYTES:
                        raise ValueError(f"{status.st_size:,} bytes")
                    content = load(file.read(_SMALL_BYTES))
                    if not isinstance(content, dict):
                        raise ValueError("no object")
                    kept = keep(content) if keep else scalars(content, nested=True)
                    self._read[name] = status.st_mtime, kept
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._problems.append(f"{name} cannot be read ({str(error)[:200]})")
            return {}
        return self._read[name][1]

    def _rank_rows(self) -> list[Row]:
        """Return the newest row in each rank's file of times."""
        for path in islice(self.folder.glob("logs/rank-*.times.jsonl"), _MAX_RANKS):
            with suppress(OSError, ValueError):
                rank = int(path.name.split(".")[0].removeprefix("rank-"))
                with open_regular(path, within=path.parent) as file:
                    status = os.fstat(file.fileno())
                    # Unchanged since the last poll: with thousands of ranks most files are.
                    if self._ranks.get(rank, (0.0,))[0] == status.st_mtime:
                        continue
                    # Only the last row counts, and a file has thousands.
                    file.seek(max(status.st_size - _TAIL_BYTES, 0))
                    line = file.read(_TAIL_BYTES).rpartition(b"\n")[0].rpartition(b"\n")[2]
                row = scalars(parse(line) or {})
                numbers: Row = {k: number(row.get(k)) for k in _RANK_NUMBERS}
                numbers |= {"rank": rank, "host": row.get("host")}
                self._ranks[rank] = status.st_mtime, numbers
        return [self._ranks[rank][1] for rank in sorted(self._ranks)]


class EventFile(LineFile):
    """Newest events of a run, its restarts, its slow ranks, and its present drift.

    Attributes:
        rows: the newest events.
        starts: steps at which the run started again.
        slow: ranks that are slow now.
        drift: text of the drift that is reported now, or "".
    """

    def __init__(self, path: Path, *, limit: int) -> None:
        self._limit = limit
        super().__init__(path, last_bytes=_EVENTS_BYTES)

    def begin(self) -> None:
        self.slow, self.drift = set[int](), ""
        self.rows = deque[Row](maxlen=self._limit)
        self.starts = deque[list[Any]](maxlen=_MAX_STARTS)

    def take(self, lines: list[bytes]) -> None:
        # Only the newest events of a long block are shown, and those that change how the page looks.
        newest = len(lines) - self._limit
        for n, line in enumerate(lines):
            if n >= newest or _LASTING.search(line):
                self._take(parse(line, key="event"))

    def _take(self, row: Row | None) -> None:
        row = scalars(row or {}, nested=True)
        event, step, rank = row.get("event"), number(row.get("step")), row.get("rank")
        if not isinstance(event, str):
            self.num_bad += 1
            return
        self.rows.append(row | {"step": step, "unix_s": number(row.get("unix_s"))})
        if event in ("start", "resume"):  # other hosts, perhaps
            self.slow.clear()
            self.drift = ""
        if event in ("resume", "rewind") and step is not None:
            self.starts.append([step, event, number(row.get("unix_s"))])
        if event in ("straggler", "recovered") and isinstance(rank, int):
            (self.slow.add if event == "straggler" else self.slow.discard)(rank)
        if event in ("drift", "drift_over"):
            text = row.get("text")
            self.drift = text if event == "drift" and isinstance(text, str) else ""


def is_account(seconds: object) -> bool:
    """Return whether a value from a file is the account of a run's time: a number of seconds for each part."""
    return isinstance(seconds, dict) and None not in map(number, seconds.values())


def scalars(row: Row, *, nested: bool = False) -> Row:
    """Return a row's numbers and its texts, cut to a maximum length.

    Args:
        row: the row.
        nested: keep one level of objects, and the first text of a list. Other values are dropped.
    """
    kept: Row = {}
    # Keys are cut in number and length, too: a file of a run may be anyone's.
    for key, value in islice(row.items(), _MAX_KEYS):
        if isinstance(value, str):
            kept[key[:100]] = value[:_MAX_TEXT]
        elif isinstance(value, bool) or number(value) is not None:
            kept[key[:100]] = value
        elif nested and isinstance(value, dict):
            kept[key[:100]] = scalars(value)
        elif nested and isinstance(value, list):
            kept[key[:100]] = [v[:_MAX_TEXT] for v in value[:1] if isinstance(v, str)]
    return kept


def expert_table(content: Row) -> Row:
    """Return the numbers of an experts.json: step, layers, and the loads of each layer as a list.

    Args:
        content: the parsed file.

    Raises:
        ValueError: It has no table of loads, or a very large table.
    """
    layers, loads = content.get("layers"), content.get("loads")
    if not (isinstance(layers, list) and isinstance(loads, list) and len(layers) == len(loads)):
        raise ValueError("no table of loads")
    if not all(isinstance(row, list) for row in loads) or sum(map(len, loads)) > _MAX_CELLS:
        raise ValueError("no table of loads, or a very large one")
    return {
        "step": number(content.get("step")),
        "layers": [number(layer) for layer in layers],
        "loads": [[number(load) for load in row] for row in loads],
    }


def sample_texts(content: Row) -> Row:
    """Return the texts of a samples.json: step, and pairs of a prompt and its continuation.

    Args:
        content: the parsed file.

    Raises:
        ValueError: It has no pairs of texts.
    """
    texts = content.get("texts")
    if not isinstance(texts, list) or not all(
        isinstance(p, list) and len(p) == 2 for p in texts
    ):
        raise ValueError("no pairs of texts")
    pairs = [[str(text)[:_MAX_TEXT] for text in pair] for pair in texts[:_MAX_KEYS]]
    return {"step": number(content.get("step")), "texts": pairs}


def read_all(readers: Sequence[RunReader], positions: Sequence[tuple[int, int]] = ()) -> Row:
    """Return the answer to a poll.

    Args:
        readers: readers of the runs.
        positions: generation and number of rows that the client has of each run.
    """
    known = [*positions, *[(0, 0)] * len(readers)][: len(readers)]
    runs = [r.data(generation=g, since=n) for r, (g, n) in zip(readers, known, strict=True)]
    return {"now": round(time.time(), 3), "columns": COLUMNS, "runs": runs}
