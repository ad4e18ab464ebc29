"""Console of a run: the start-up page, a line for each logged step, and a bar on a terminal.

Lines are columns of fixed width, so that a log file reads as a table. If a terminal is too narrow,
whole columns are left out, the least important first. Without a terminal, with NO_COLOR, or without
colours, the output is plain text and has no bar. With --quiet only warnings and the last lines are
printed. Only rank 0 prints; the messages of other ranks go to their logs (titan/base/run_folder.py).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from titan.base.rows import Row
from titan.base.untrusted import harmless
from titan.config.options import is_quiet
from titan.config.schema import MetricsSection
from titan.observe.columns import COLUMNS, duration
from titan.observe.startup import StartupPage

_LOG = logging.getLogger("titan")
_MAX_WIDTH = 160  # columns of a log file: room for every column of metrics
_WIDE = 60  # columns of a terminal whose bar has room for the elapsed time
_REFRESH_PER_S = 2  # redrawing takes Python time from the training loop
_GAP = "  "
LARGE_Z = 6.0  # a robust z-score that ordinary steps do not reach


@dataclass(frozen=True)
class _Column:
    """Padded text in a style of rich.

    If space is short, the column of the highest order is left out first.
    """

    text: str
    order: int = 0
    style: str = ""


class _Console(RichConsole):
    """Console that outlives the reader of its pipe, as of `titan train ... | tee log`, and that no text can steer."""

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))

    def on_broken_pipe(self) -> None:
        # rich would end the process.
        self.quiet = True


class Console(logging.Handler):
    """Console of rank 0, which also prints the warnings that any part of titan logs."""

    def __init__(
        self,
        section: MetricsSection,
        *,
        rank: int = 0,
        total_steps: int,
        is_terminal: bool | None = None,
        file: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        """Start to print warnings.

        Args:
            section: config section [metrics].
            rank: this rank.
            total_steps: scale of the bar, and width of the step column.
            is_terminal: whether `file` is a terminal; None: ask the file.
            file: output; None: stdout.
            width: columns of `file`; None: ask the file.
        """
        super().__init__(level=logging.WARNING)
        out: TextIO = file or sys.stdout
        if is_terminal is None:
            is_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._is_rank_0 = rank == 0
        self._total_steps = total_steps
        # The bar needs a terminal that can move its cursor, and has colours.
        no_color = section.disable_color_printing or os.environ.get("NO_COLOR")
        live = is_terminal and not no_color
        self._console = _Console(
            file=out,
            force_terminal=live,
            no_color=None if live else True,
            # rich would cut lines of a log file at 80 characters.
            width=width or (None if is_terminal else _MAX_WIDTH),
            # Print texts as they are: "[bold]" in a message is no markup.
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._is_quiet = is_quiet()
        self.bar = self._make_bar() if live and self._is_rank_0 and not self._is_quiet else None
        self._end_s = math.nan  # end of training, by time.monotonic
        self._widths: list[int] = []  # widths of the columns of a step's line
        # Warnings of any part of titan appear between the lines, above the bar.
        _LOG.addHandler(self)

    def startup(self, page: StartupPage) -> None:
        """Print the start-up page."""
        self._print(page.render(self._console.width))

    def advance(self, step: int, *, eta_s: float | None = None) -> None:
        """Move the bar. Call it for every step.

        Args:
            step: number of the step.
            eta_s: remaining seconds of the run; None: the last value runs down.
        """
        if self.bar is not None:
            now_s = time.monotonic()
            if eta_s is not None:
                self._end_s = now_s + eta_s
            # Between logged steps, the remaining time of the last one runs down.
            left_s = self._end_s - now_s
            eta = "-" if math.isnan(left_s) else duration(max(left_s, 0.0))
            self.bar.start()  # appears with the first step
            self.bar.update(self.bar.tasks[0].id, completed=step, eta=eta)

    def step(self, row: Row) -> None:
        """Print a line for a logged step."""
        columns = [_Column(self._step_column(row["step"]), style="cyan")]
        columns += [
            _Column(column.text(row), column.order, column.style)
            for column in COLUMNS.values()
            if column.text is not None
        ]
        self._print_columns(*self._aligned(columns), always=row["step"] == self._total_steps)
        if spikes := self._spikes(row):  # a line below, so that the columns stay where they are
            self._print_columns(_Column(self._step_column(row["step"]), style="cyan"), *spikes)
        self.advance(row["step"], eta_s=row["eta_s"])

    def validation(self, row: Row) -> None:
        """Print a line for a validation."""
        columns = [
            _Column(self._step_column(row["step"])),
            _Column(f"validation loss {row['validation_loss']:.4f}", style="bold green"),
        ]
        if row.get("bits_per_byte") is not None:
            columns.append(_Column(f"{row['bits_per_byte']:.4f} bits/byte", style="green"))
        self._print_columns(*columns, always=row["step"] == self._total_steps)

    def message(self, text: str, *, always: bool = False) -> None:
        """Print a line, and write it to the log of every rank.

        Args:
            text: the line.
            always: whether to print it with --quiet, too.
        """
        _LOG.info(text)
        self._print(Text(text), always=always)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning or an error of the logger "titan".

        The last error of a run goes to standard error instead.
        """
        if not getattr(record, "last_words", False):
            text = f"{record.levelname.lower()}: {record.getMessage()}"
            self._print(Text(text, style="yellow"), always=True)

    def close(self) -> None:
        """Remove the bar; the lines stay. Lines may be printed afterwards."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        _LOG.removeHandler(self)
        super().close()

    def _print(self, text: Text, *, always: bool = False) -> None:
        if self._is_rank_0 and (always or not self._is_quiet):
            # Standard output may be a file on a full disk, or a pipe that nobody reads any more.
            with suppress(OSError):
                # A log file keeps long lines whole, so that they can be searched.
                self._console.print(text, soft_wrap=not self._console.is_terminal)
                # A log file of a batch job is read while the job runs.
                self._console.file.flush()

    def _aligned(self, columns: list[_Column]) -> list[_Column]:
        """Pad the columns of a step's line to their widest texts so far."""
        pairs = zip_longest((len(c.text) for c in columns), self._widths, fillvalue=0)
        self._widths = [max(pair) for pair in pairs]
        sized = zip(columns, self._widths, strict=True)
        return [replace(c, text=c.text.ljust(width)) for c, width in sized if width]

    def _print_columns(self, *columns: _Column, always: bool = False) -> None:
        """Print a line, without the columns of the highest orders if they do not fit."""
        shown = list(columns)
        # Order 0 stays, however narrow the terminal is.
        while (
            any(c.order for c in shown)
            and len(_GAP.join(c.text for c in shown)) > self._console.width
        ):
            shown.remove(max(shown, key=lambda c: c.order))
        line = Text(_GAP).join(Text(c.text, style=c.style) for c in shown)
        line.rstrip()
        self._print(line, always=always)

    def _spikes(self, row: Row) -> list[_Column]:
        """Return a column for each large score."""
        scores = {"loss": row["loss_z"], "gradient norm": row["grad_norm_z"]}
        return [
            _Column(
                f"{name} unusual: {z:.1f} deviations above the last steps", style="bold red"
            )
            for name, z in scores.items()
            if z is not None and z > LARGE_Z
        ]

    def _step_column(self, step: int) -> str:
        # Thousands separators make long numbers readable, but seven digits would not fit the table.
        separator = "," if self._total_steps < 1_000_000 else ""
        total = f"{self._total_steps:{separator}}"
        return f"step {step:>{len(total)}{separator}}/{total}"

    def _make_bar(self) -> Progress:
        bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            # rich would cut the columns of a narrow terminal short.
            *([TimeElapsedColumn()] if self._console.width >= _WIDE else []),
            TextColumn("eta {task.fields[eta]}", style="cyan"),
            console=self._console,
            # rich prints lines above the bar, but would take errors out of `2> FILE`.
            redirect_stderr=sys.stderr.isatty(),
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
            expand=True,
        )
        bar.add_task("training", total=self._total_steps, eta="-")
        return bar
