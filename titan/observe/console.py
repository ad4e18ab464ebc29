"""Print what a person sees during a run: the start-up page, a line for each logged step, and on a terminal a bar.

Lines are columns of fixed width, so that a log file reads as a table. If a terminal is too narrow, whole columns are left
out, the least important first. Without a terminal, or without colours, the output is plain text. Only rank 0 prints; the
messages of other ranks go to their logs (titan/run_folder.py).
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from titan.config.schema import MetricsSection
from titan.observe.metrics import StepRow, ValidationRow
from titan.observe.startup import StartupPage

_LOG = logging.getLogger("titan")
_MAX_WIDTH = 140
_REFRESH_PER_S = 2  # redrawing takes Python time from the training loop
_GAP = "  "
LARGE_Z = 6.0  # a robust z-score that ordinary steps do not reach


@dataclass(frozen=True)
class _Column:
    """A padded text in a style of rich. If space is short, the column of the highest order is left out first."""

    text: str
    order: int = 0
    style: str = ""


class Console(logging.Handler):
    """Print the messages of rank 0, and the warnings that any part of titan logs."""

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
        """Begin to print warnings.

        Args:
            total_steps: scales the bar and the width of the step column.
            is_terminal, width: of `file` (stdout by default); None: ask it.
        """
        super().__init__(level=logging.WARNING)
        out: TextIO = file or sys.stdout
        if is_terminal is None:
            is_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._mfu_convention = section.mfu_convention
        self._is_rank_0 = rank == 0
        self._total_steps = total_steps
        # The bar needs a terminal that can move its cursor, and colours mark what moves.
        live = is_terminal and not section.disable_color_printing
        self._console = RichConsole(
            file=out,
            force_terminal=live,
            no_color=None if live else True,
            # rich would cut lines of a log file at 80 characters.
            width=width or (None if is_terminal else _MAX_WIDTH),
            # Texts are shown as they are: "[bold]" in a message is no markup.
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._bar = self._make_bar() if live and self._is_rank_0 else None
        # Warnings of any part of titan appear between the lines, above the bar.
        _LOG.addHandler(self)

    def startup(self, page: StartupPage) -> None:
        """Print the page."""
        self._print(page.render(self._console.width))

    def advance(self, step: int, *, eta_s: float | None = None) -> None:
        """Move the bar to `step`. Call it for every step."""
        if self._bar is not None:
            # Between logged steps the time left is not known: keep the one shown.
            task = self._bar.tasks[0]
            eta = task.fields["eta"] if eta_s is None else duration(eta_s)
            self._bar.start()  # appears with the first step
            self._bar.update(task.id, completed=step, eta=eta)

    def step(self, row: StepRow) -> None:
        """Print a line for a logged step."""
        # Figures of different conventions cannot be compared, so each line names its own.
        mfu = "n/a" if row.mfu is None else f"{row.mfu:5.1%} {self._mfu_convention}-attn"
        memory = "rss" if row.memory_kind == "rss" else "gpu"
        imbalance = row.expert_imbalance
        # Rows of the busiest expert-parallel rank, or of the busiest expert, over the mean.
        experts = [] if imbalance is None else [_Column(f"moe {imbalance:5.2f}x", order=2)]
        self._print_columns(
            _Column(self._step_column(row.step), style="cyan"),
            _Column(f"loss {row.loss:7.4f}", style="bold"),
            _Column(f"gnorm {_short(row.grad_norm):>6}", order=2),
            _Column(f"lr {row.lr:.2e}", order=4),
            _Column(f"{row.tokens_per_s:>9,.0f} tok/s"),
            _Column(f"mfu {mfu}", order=3),
            _Column(f"{memory} {row.memory_gib:5.2f} GiB", order=5),
            _Column(f"data {row.data_wait_s * 1e3:5.1f}ms", order=6),
            *experts,
            _Column(f"eta {duration(row.eta_s):>8}", order=1),
        )
        if spikes := self._spikes(row):  # a line below, so that the columns stay where they are
            self._print_columns(_Column(self._step_column(row.step), style="cyan"), *spikes)
        self.advance(row.step, eta_s=row.eta_s)

    def validation(self, row: ValidationRow) -> None:
        """Print a line for a validation."""
        columns = [
            _Column(self._step_column(row.step)),
            _Column(f"validation loss {row.validation_loss:.4f}", style="bold green"),
        ]
        if row.bits_per_byte is not None:
            columns.append(_Column(f"{row.bits_per_byte:.4f} bits/byte", style="green"))
        if row.unigram_bits_per_byte is not None:
            columns.append(_Column(f"(byte frequencies alone: {row.unigram_bits_per_byte:.4f})"))
        self._print_columns(*columns)

    def message(self, text: str) -> None:
        """Print a line, and write it to the log of every rank."""
        _LOG.info(text)
        self._print(Text(text))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning or an error of the logger "titan". The last error of a run goes to standard error instead."""
        if not getattr(record, "last_words", False):
            self._print(Text(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow"))

    def close(self) -> None:
        """Remove the bar; the lines stay. More may be printed afterwards."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        _LOG.removeHandler(self)
        super().close()

    def _print(self, text: Text) -> None:
        if self._is_rank_0:
            # A log file keeps long lines whole, so that they can be searched.
            self._console.print(text, soft_wrap=not self._console.is_terminal)
            # A log file of a batch job is read while the job runs.
            self._console.file.flush()

    def _print_columns(self, *columns: _Column) -> None:
        """Print a line, without the columns of the highest orders if they do not fit."""
        shown = list(columns)
        # Order 0 stays, however narrow the terminal is.
        while any(c.order for c in shown) and _width(shown) > self._console.width:
            shown.remove(max(shown, key=lambda c: c.order))
        self._print(Text(_GAP).join(Text(c.text, style=c.style) for c in shown))

    def _spikes(self, row: StepRow) -> list[_Column]:
        """Return a column for each score that is large."""
        scores = {"loss": row.loss_z, "gnorm": row.grad_norm_z}
        return [
            _Column(f"{name} z {z:.1f}", style="bold red")
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
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}", style="cyan"),
            console=self._console,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
            expand=True,
        )
        bar.add_task("training", total=self._total_steps, eta="-")
        return bar


def duration(seconds: float) -> str:
    """Format seconds as 12:34, 1:02:03 or 4d 05:06."""
    days, rest = divmod(round(seconds), 86_400)
    hours, minutes, secs = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _short(value: float) -> str:
    """Format a number in six characters, unless it is huge."""
    return f"{value:.3f}" if value < 100 else f"{value:.5g}" if value < 99_999 else f"{value:.0e}"


def _width(columns: list[_Column]) -> int:
    return len(_GAP.join(c.text for c in columns))
