"""Say how far tokenising is and how long it will take: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from titan.data.sources import Documents
from titan.data.writer import Progress

_INTERVAL_S = 10.0


@contextmanager
def display(documents: Documents, *, title: str) -> Iterator[Callable[[Progress], None]]:
    """Yield what is called with the progress. Writes to standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=documents.num_bytes)
        begin = printed = time.monotonic()

        def report(progress: Progress) -> None:
            nonlocal printed
            now = time.monotonic()
            line = describe(progress, documents.num_bytes, elapsed_s=now - begin)
            bar.update(task, description=line, completed=progress.num_bytes)
            if bar.disable and now - printed >= _INTERVAL_S:
                printed = now
                print(f"{title}: {line}", file=sys.stderr, flush=True)

        yield report
        bar.update(task, completed=documents.num_bytes)


def describe(progress: Progress, num_bytes: int | None, *, elapsed_s: float) -> str:
    """Return how much was done, and of files how fast and how long the rest will take."""
    done = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
    speed = progress.num_bytes / max(elapsed_s, 1e-9)
    if not num_bytes or not speed:
        return done
    left_s = round(max(num_bytes - progress.num_bytes, 0) / speed)
    left = f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"
    share = min(progress.num_bytes / num_bytes, 1)
    return f"{share:.0%} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s, {left} left; {done}"
