"""The folder of a run that goes on as another job. It is made beside its place, and gets its name in one rename.

    NEW.swap-PLAN/run/                  becomes NEW: the checkpoint, and all rows of metrics and events up to it
    NEW.swap-PLAN/old, new, spread      run folders of the comparison

PLAN identifies what is compared. A killed command leaves the folder, and the same command takes up what is finished in it. The folder
of the old run is only read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan.base.rows import Row
from titan.base.run_folder import CONFIG, EVENTS, METRICS, RunFolder
from titan.base.run_writer import write_text_atomically
from titan.base.untrusted import InputError, read_json
from titan.checkpoint.manifest import NAME, read_manifest
from titan.checkpoint.storage import LocalStorage, Location, join, storage_of
from titan.config.toml import format_value

LINEAGE, BEFORE = "swap.json", "before.toml"
"""Files of a run folder: what its swaps compared and found, and the job before the last one."""


class Handover:
    """A new run folder in the making.

    Attributes:
        target: the new run folder.
        plan: identity of the command.
        work: folder beside it.
        old: the old run folder.
        saved: its checkpoints by step.
        base: step of the newest whole one.
        run: the new run folder, until it has its name.
    """

    def __init__(
        self, target: Path, plan: str, old: Path, saved: Mapping[int, Location], base: int
    ) -> None:
        self.target, self.plan = target, plan
        self.old, self.saved, self.base = old, saved, base
        self.work = target.with_name(f"{target.name}.swap-{plan}")
        self.run = self.work / "run"

    def begin(self) -> int | None:
        """Make the work folder, and delete those of other plans.

        Returns:
            The step to begin from, which a killed command may have copied. None: a command with this plan has handed over.

        Raises:
            InputError: the folder of the new run exists.
        """
        is_done = lineage(self.target)["plan"] == self.plan
        pattern = f"{self.target.name}.swap-{'?' * len(self.plan)}"
        for folder in self.target.parent.glob(pattern):
            if is_done or folder != self.work:
                shutil.rmtree(folder)
        if is_done:
            return None
        if self.target.exists() and any(self.target.iterdir()):
            raise InputError(f"job.dump_folder: {self.target} exists; name a new folder")
        self.work.mkdir(parents=True, exist_ok=True)
        return next((int(path.name[5:]) for path in self.run.glob("**/step-*")), self.base)

    def job(self, name: str, text: str) -> str:
        """Write a file of keys into the work folder. Return its name."""
        file = self.work / f"{name}.toml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    def part(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder of the work folder. Unless it is there, `make` makes it under another name."""
        place, making = self.work / name, self.work / f".{name}-{os.getpid()}"
        if not place.exists():
            make(making)
            making.rename(place)
        return place

    def copy(self, step: int, folder: str) -> Path:
        """Copy what the new run begins with. Return the folder of its checkpoint.

        Args:
            step: the checkpoint to begin with.
            folder: folder of the new run's checkpoints, within its run folder.
        """
        inner, run = f"{folder}/step-{step}", self.old

        def make(target: Path) -> None:
            _copy_step(self.saved[step], target / inner)
            rows, events = (
                [row for row in rows if row["step"] <= step]
                for rows in (RunFolder(run).rows(), RunFolder(run).events())
            )
            for row in rows[-1:]:
                row["swap"] = str(run)
            # With the time of the last event: the next start accounts for all that follows.
            swap = {"event": "swap", "step": step, "run": str(run)}
            _write_rows(target / METRICS, rows)
            _write_rows(target / EVENTS, [*events, dict(*events[-1:]) | swap])
            shutil.copyfile(run / CONFIG, target / BEFORE)

        return self.part("run", make) / inner

    def finish(self, swap: Mapping[str, Any]) -> None:
        """Hand over: give the new run folder its name.

        Args:
            swap: what swap.json says of this swap.
        """
        swaps = {"plan": self.plan, "swaps": [*lineage(self.old)["swaps"], swap]}
        text = json.dumps(swaps, indent=2) + "\n"
        write_text_atomically(self.run / LINEAGE, text)
        LocalStorage().rename(self.run, self.target)
        shutil.rmtree(self.work)


def toml_lines(values: Mapping[str, Any]) -> str:
    """Return keys as TOML, without those that are not set."""
    lines = (f"{k} = {format_value(v)}\n" for k, v in values.items() if v is not None)
    return "".join(lines)


def lineage(run: Path) -> dict[str, Any]:
    """Return the content of swap.json."""
    none = {"plan": "", "swaps": []}
    file = run / LINEAGE
    return none | read_json(file, dict[str, Any], within=run) if file.exists() else none


def _copy_step(step: Location, target: Path) -> None:
    """Copy a checkpoint. Whoever loads the copy compares it with its hashes."""
    storage = storage_of(step)
    target.mkdir(parents=True)
    for name in (*read_manifest(step).files, NAME):
        with storage.open(join(step, name), "rb") as source, (target / name).open("wb") as copy:
            shutil.copyfileobj(source, copy)
            storage.fsync(copy)


def _write_rows(file: Path, rows: list[Row]) -> None:
    write_text_atomically(file, "".join(f"{json.dumps(row)}\n" for row in rows))
