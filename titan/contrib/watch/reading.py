"""Readers of a run's folder for the live page, while the run writes it. Only files of fixed names are read.

Each poll reads the lines that were added to metrics.jsonl and events.jsonl (titan/tools/row_files.py). If a resume cut a file
or replaced it, its `generation` changes and the client gets all rows again. A million rows are thinned to four thousand,
which contain every peak. A damaged file costs its own part of the page, and adds a line to `problems`. Imports no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from titan.base.rows import Row, number, parse
from titan.base.run_folder import CONFIG, ENVIRONMENT, EVENTS, METRICS, SIGNS, STATUS, RunFolder
from titan.base.untrusted import InputError, parse_json, read_bytes, tail_lines, tomllib
from titan.tools.row_files import MAX_ROWS, LineFile, RowFile

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
    "slowest_rank_s",
    "median_rank_s",
    "goodput",
    "unix_s",
    "eta_s",
    "expert_imbalance",
)
# Of evaluations, and of a blend's sources.
_BY_RULE = ("eval/", "source_loss/", "source_validation_loss/")
# Limits, so that no file of a run, whoever wrote it, makes the page or this process large.
_EVENTS_BYTES, _SMALL_BYTES = 2**22, 2**20
_MAX_RANKS, _MAX_KEYS, _MAX_TEXT = 8192, 64, 2000
_RANK_NUMBERS = ("step", "unix_s", "step_s", "data_wait_s", "own_s")
_TAIL_BYTES = 1024  # at the end of a file of times: more than one row


def is_account(seconds: object) -> bool:
    """Return whether a value from a file is the account of a run's time: a number of seconds for each part."""
    return isinstance(seconds, dict) and None not in map(number, seconds.values())


def scalars(row: Row, *, nested: bool = True) -> Row:
    """Return a row's numbers and its texts, cut to a maximum length.

    Args:
        row: the row.
        nested: keep one level of objects, and the first text of a list. Other values are dropped.
    """
    kept: Row = {}
    # Keys are cut in number and length, too: a file of a run may be anyone's.
    for key, value in islice(row.items(), _MAX_KEYS):
        if isinstance(value, str):
            value = value[:_MAX_TEXT]
        elif nested and isinstance(value, dict):
            value = scalars(value, nested=False)
        elif nested and isinstance(value, list):
            value = [v[:_MAX_TEXT] for v in value[:1] if isinstance(v, str)]
        elif not isinstance(value, bool) and number(value) is None:
            continue
        kept[key[:100]] = value
    return kept


def expert_table(content: Row) -> Row:
    """Return the numbers of an experts.json: step, layers, and the loads of each layer as a list.

    Args:
        content: the parsed file.

    Raises:
        ValueError: It has no table of loads.
    """
    layers, loads = content.get("layers"), content.get("loads")
    is_table = isinstance(loads, list) and all(isinstance(row, list) for row in loads)
    if not is_table or not isinstance(layers, list) or len(layers) != len(loads):
        raise ValueError("no table of loads")
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
    try:
        pairs = [
            [str(prompt)[:_MAX_TEXT], str(text)[:_MAX_TEXT]]
            for prompt, text in content["texts"][:_MAX_KEYS]
        ]
    except (KeyError, TypeError, ValueError):
        raise ValueError("no pairs of texts") from None
    return {"step": number(content.get("step")), "texts": pairs}


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
        self.events = EventFile(folder / EVENTS, limit=max(limit // 8, 10))
        # Content of each small file, with the file's modification time then.
        self._read: dict[str, tuple[float, Row]] = {}
        self._problems: list[str] = []
        self._tasks: list[str] = []  # columns of `_BY_RULE` so far; new columns are appended

    def data(self, known: tuple[int, int] = (0, 0)) -> Row:
        """Return the answer to a client's poll.

        Args:
            known: generation of the client's rows, and their number.

        Returns:
            Facts of the run and the rows after these, or all rows if the generation has changed.
        """
        generation, since = known
        # Read the new lines first, then answer from all rows kept.
        self.metrics.update()
        self.events.update()
        self._problems = [*filter(None, (self.metrics.problem, self.events.problem))]
        # A client with rows of an earlier generation starts over.
        if generation != self.metrics.generation:
            since = 0
        rows = self.metrics.since(since)
        if rows is None:
            rows, since = self.metrics.thin.rows(), 0
        evaluated = (key for row in rows for key in row if key.startswith(_BY_RULE))
        self._tasks = list(islice(dict.fromkeys([*self._tasks, *evaluated]), _MAX_KEYS))
        status = self._small(STATUS)
        account = next(reversed(self.events.rows), Row())
        # Events and status have the account of time up to them, and the newest is the longest.
        accounts = [
            row["seconds"] for row in (status, account) if is_account(row.get("seconds"))
        ]
        seconds = max(accounts, key=lambda parts: sum(parts.values()), default={})
        return {
            "name": self.name,
            "generation": self.metrics.generation,
            "since": since,
            "total": self.metrics.thin.count,
            "rows": [[number(row.get(c)) for c in (*COLUMNS, *self._tasks)] for row in rows],
            "tasks": [key[:_MAX_TEXT] for key in self._tasks],
            "samples": self._small("samples.json", sample_texts),
            "status": status,
            "facts": self._facts(),
            "experts": self._small("experts.json", expert_table),
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
        config, environment = self._small(CONFIG), self._small(ENVIRONMENT)
        facts: Row = {}
        # Where a fact is missing, or has another type, those of its file are left out.
        with suppress(KeyError, TypeError):
            facts |= {
                "steps": number(config["training"]["steps"]),
                "description": config["job"]["description"],
                "model": f"{config['model']['name']} {config['model']['flavor']}",
            }
        with suppress(KeyError, TypeError, IndexError):
            facts |= {
                "world_size": environment["world_size"],
                "hostname": environment["hostname"],
                "device": environment["device_names"][0],
            }
        return scalars(facts)

    def _small(self, name: str, keep: Callable[[Row], Row] = scalars) -> Row:
        """Return the content of a small file, which is read again only if it has changed.

        Args:
            name: name of the file.
            keep: function that selects the content for the page, by default all numbers and texts. It may raise ValueError.

        Returns:
            The content. A damaged file gives {} and a line in `problems`.
        """
        path = self.folder / name
        try:
            changed_s = path.stat().st_mtime
            if self._read.get(name, (0.0,))[0] != changed_s:
                text = read_bytes(path, limit=_SMALL_BYTES, within=self.folder)
                is_job = name == CONFIG
                content = (
                    tomllib.loads(text.decode()) if is_job else parse_json(text, Row, name=name)
                )
                self._read[name] = changed_s, keep(content)
            return self._read[name][1]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._problems.append(f"{name} cannot be read ({str(error)[:200]})")
            return {}

    def _rank_rows(self) -> list[Row]:
        """Return the newest row in each rank's file of times."""
        rows = []
        for path in islice(self.folder.glob("logs/rank-*.times.jsonl"), _MAX_RANKS):
            with suppress(ValueError):
                rank = int(path.name.removeprefix("rank-").partition(".")[0])
                # A file has thousands of rows, and the last line may be incomplete.
                *_, line, _ = tail_lines(path, limit=_TAIL_BYTES, within=path.parent)
                row = scalars(parse(line.encode()) or {})
                shown: Row = {"rank": rank, "host": row.get("host")}
                rows.append(shown | {k: number(row.get(k)) for k in _RANK_NUMBERS})
        return sorted(rows, key=lambda row: row["rank"])


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
        self.starts = deque[list[Any]](maxlen=self._limit)

    def take(self, lines: list[bytes]) -> None:
        for line in lines:
            row = scalars(parse(line, key="event") or {})
            event, step, rank = row.get("event"), number(row.get("step")), row.get("rank")
            if not isinstance(event, str):
                self.num_bad += 1
                continue
            unix_s = number(row.get("unix_s"))
            self.rows.append(row | {"step": step, "unix_s": unix_s})
            if event in ("start", "resume", "drift_over"):
                self.drift = ""
                if event != "drift_over":  # other hosts, perhaps
                    self.slow.clear()
            if event in ("resume", "rewind") and step is not None:
                self.starts.append([step, event, unix_s])
            if event in ("straggler", "recovered") and isinstance(rank, int):
                (self.slow.add if event == "straggler" else self.slow.discard)(rank)
            if event == "drift":
                self.drift = str(row.get("text", ""))


def read_all(readers: Sequence[RunReader], positions: Sequence[tuple[int, int]] = ()) -> Row:
    """Return the answer to a poll.

    Args:
        readers: readers of the runs.
        positions: generation and number of rows that the client has of each run.
    """
    runs = [*map(RunReader.data, readers, chain(positions, repeat((0, 0))))]
    return {"now": time.time(), "columns": COLUMNS, "runs": runs}
