"""Log of metrics: rows in metrics.jsonl and, if enabled, in TensorBoard and Weights & Biases.

metrics.jsonl holds one JSON object for each logged step, in order and each step once. This holds
over crashes: a resume at step N cuts the rows after N, which the crashed run wrote, and a torn last
line. docs/evaluation.md defines every key. If a sink fails (disk full, server down), it warns once,
training continues, and rows of metrics.jsonl wait until they can be written (titan/base/run_writer.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan.base.rows import Row, cut_after, number
from titan.base.run_folder import METRICS
from titan.base.run_writer import RunFiles, run_files
from titan.config.schema import MetricsSection
from titan.observe.sinks import Sink, TensorBoardSink, WandbSink, require

_LOADS = "experts.json"
_SAMPLES = "samples.json"


class JsonlSink:
    """File of rows. Each row is one write, so a crash can tear only the last line.

    Attributes:
        lacks_row: whether an earlier start wrote no row of the step that the run continues from.
    """

    def __init__(self, files: RunFiles, name: str, *, resume_step: int) -> None:
        self._files, self._name, self._resume_step = files, name, resume_step
        self.lacks_row = self._is_cut = False
        # time_s counts from the first start, over every pause and crash since.
        self._started_unix_s = time.time()
        self._waiting: list[Row] = []  # rows until the file is cut
        # Rows that an earlier sink of this process could not write, up to the step to go on from.
        rows = (json.loads(line) for line in files.take_waiting(name))
        self._kept: list[Row] = [row for row in rows if row["step"] <= resume_step]
        self._cut_once()

    def write(self, row: Row) -> None:
        self._waiting.append(row)
        if not self._cut_once():
            return
        for each in self._waiting:
            time_s = round(max(each["unix_s"] - self._started_unix_s, 0.0), 3)
            line = json.dumps(each | {"time_s": time_s}, allow_nan=False)
            self._files.append(self._name, f"{line}\n")
        self._waiting.clear()

    def close(self) -> None:
        """Count the rows that wait for the cut. The writer of the run folder has the file."""
        if not self._cut_once():
            for _ in self._waiting:
                self._files.lose(self._name)

    def _cut_once(self) -> bool:
        """Cut the rows after the step to go on from, unless that is done. Return whether it is done."""
        self._is_cut = self._is_cut or self._files.attempt(self._name, self._cut)
        return self._is_cut

    def _cut(self) -> None:
        path = self._files.folder / self._name
        # In a new folder, no row was lost.
        existed = path.exists()
        last = (cut_after(path, step=self._resume_step) if existed else None) or {}
        unix_s, time_s = number(last.get("unix_s")), number(last.get("time_s"))
        if unix_s is not None and time_s is not None:
            self._started_unix_s = unix_s - time_s
        newest = self._kept[-1] if self._kept else last
        self.lacks_row = existed and newest.get("step") != self._resume_step
        for row in self._kept:
            self._files.append(self._name, f"{json.dumps(row)}\n")


class MetricsLog:
    """All sinks of a rank. Each rank has a MetricsLog; the settings determine which ranks write."""

    def __init__(
        self,
        run_dir: Path,
        *,
        section: MetricsSection,
        rank: int = 0,
        resume_step: int = 0,
        resume_row: Row | None = None,
        job_config: dict[str, Any] | None = None,
    ) -> None:
        """Open the sinks.

        Args:
            run_dir: run folder.
            section: config section [metrics].
            rank: this rank.
            resume_step: step that the run continues from, 0 for a fresh run.
            resume_row: row of that step in its checkpoint. It is written if a crash prevented that.
            job_config: config for Weights & Biases.

        Raises:
            MissingExtra: an enabled sink is not installed. Every rank raises it.
        """
        # Every rank checks, also a rank that writes nothing: otherwise rank 0 would end and the others wait for it.
        for extra in ("tensorboard", "wandb"):
            if getattr(section, f"enable_{extra}"):
                require(extra, extra=extra, asked_by=f"metrics.enable_{extra}")
        self._files, self._is_main = run_files(run_dir), rank == 0
        self._sinks: dict[str, Sink] = {}
        if rank and not section.save_for_all_ranks:
            return
        # Readers look for the name of rank 0's file.
        name = f"metrics.rank-{rank}.jsonl" if rank else METRICS
        self._open(name, lambda: JsonlSink(self._files, name, resume_step=resume_step))
        if section.enable_tensorboard:
            folder = run_dir / section.save_tb_folder
            folder = folder / f"rank-{rank}" if section.save_for_all_ranks else folder
            options = {"within": run_dir, "resume_step": resume_step}
            self._open("TensorBoard", lambda: TensorBoardSink(folder, **options))
        if section.enable_wandb and rank == 0:
            about = {"section": section, "resume_step": resume_step, "job_config": job_config}
            self._open("Weights & Biases", lambda: WandbSink(run_dir, **about))
        rows = self._sinks.get(name)
        is_lost = isinstance(rows, JsonlSink) and rows.lacks_row
        if is_lost and resume_row and resume_row.get("step") == resume_step:
            self.write(resume_row)

    def write(self, row: Row) -> None:
        """Write a row to all sinks."""
        # All sinks get the same time.
        values = {"unix_s": round(time.time(), 3)} | finite(row)
        for name, sink in self._sinks.items():
            self._guard(name, lambda sink=sink: sink.write(values))

    def write_loads(self, step: int, layers: list[int], loads: list[list[int]]) -> None:
        """Replace experts.json, which has the newest loads.

        Args:
            step: number of the step.
            layers: layers with experts.
            loads: tokens of each expert, for each of the layers.
        """
        if self._is_main:
            # Only one step's loads: all loads of a long run would fill the disk.
            text = json.dumps({"step": step, "layers": layers, "loads": loads}) + "\n"
            self._files.replace(_LOADS, text)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write generated samples: samples/step-N.txt, samples.json with the newest, and TensorBoard.

        Args:
            step: number of the step.
            texts: generated text by its prompt.
        """
        if not self._is_main:
            return
        page = "\n\n".join(f"{prompt}[...]{text}" for prompt, text in texts.items()) + "\n"
        newest = json.dumps({"step": step, "texts": [*texts.items()]}) + "\n"
        self._files.replace(f"samples/step-{step}.txt", page)
        self._files.replace(_SAMPLES, newest)
        board = self._sinks.get("TensorBoard")
        if isinstance(board, TensorBoardSink):
            self._guard("TensorBoard", lambda: board.write_texts(step, texts))

    def close(self) -> None:
        """Close all sinks. If a sink fails, warn."""
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)

    def _open(self, name: str, build: Callable[[], Sink]) -> None:
        self._guard(name, lambda: self._sinks.update({name: build()}))

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        """Run an action on a sink. Metrics are not worth a training run, so any exception becomes one warning."""
        try:
            action()
        except Exception as error:
            self._files.lose(name, f"{type(error).__name__}: {error}")


def finite(row: Row) -> Row:
    """Return a row with null for NaN and infinity, which JSON does not have. Every reader takes null for "no number"."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
