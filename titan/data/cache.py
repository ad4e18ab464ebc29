"""Cache of tokenized text: each finite source is tokenized once, and all processes map the result.

A cache entry is a folder of token shards, named by a hash of everything that its content depends on. So an entry is never
stale, only unused, and may be deleted at any time. The process that writes an entry holds a file lock. The lock is the kernel's
(flock) and ends with the process. So a killed process leaves nothing to clean up, and the next process keeps its finished shards.

The first process that needs a text tokenizes it, a long text with a worker on each core. The others wait. The first process
shows how long that takes. `titan prepare` does the same ahead of a run.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.base.hardware import usable_cores
from titan.base.untrusted import printable
from titan.config.options import is_quiet
from titan.data import DataError, default_cache_folder
from titan.data.shards import INDEX
from titan.data.sources import Documents
from titan.data.writer import Progress, TokenizationSpec, write_shards

logger = logging.getLogger(__name__)

_SHARD_TOKENS = 2**26  # an interrupted run loses at most one shard for each split
_SHORT_BYTES = 2**24  # two seconds of work; starting the workers takes as long
_INTERVAL_S = 10.0  # between two lines of progress, if there is no terminal


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Create `folder` if it is missing, and lock it for writing. Wait if another process holds the lock.

    Raises:
        DataError: the file system reports any error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            try:
                # First without waiting, so that the message comes before the wait.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that is tokenizing into %s", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DataError(
            f"cannot fill '{folder}': {error}; choose another folder (for cached text: data.cache_folder), with "
            "room, on a file system with locks"
        ) from error


def cache_entry(cache_folder: str, key: str) -> Path:
    """Return the folder of a cache entry, in `data.cache_folder` or in the default folder."""
    root = Path(cache_folder).expanduser() if cache_folder else default_cache_folder()
    return root / "tokens" / key


def cached_shards(documents: Documents, *, spec: TokenizationSpec, cache_folder: str) -> Path:
    """Return the folder with the documents' tokens. Write it first if it is missing."""
    folder = cache_entry(cache_folder, spec.key(documents, shard_tokens=_SHARD_TOKENS))
    # Complete entries are found without a lock.
    if not (folder / INDEX).is_file():
        is_long = (documents.num_bytes or 0) > _SHORT_BYTES
        title = printable(f"tokenizing {documents.name} into the cache, once")
        # Under the lock, write_shards looks again: another process may have finished meanwhile.
        with exclusive(folder):
            if is_long and not (folder / INDEX).is_file() and not is_quiet():
                hint = "all ranks wait; `titan prepare` does it ahead of a run"
                print(f"{title}: {hint}", file=sys.stderr, flush=True)
            with display(documents, title=title) as report:
                write_shards(
                    documents,
                    folder=folder,
                    spec=spec,
                    shard_tokens=_SHARD_TOKENS,
                    workers=usable_cores() if is_long else 1,
                    report=report,
                )
    return folder


@contextmanager
def display(documents: Documents, *, title: str) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console, title = Console(stderr=True), printable(title)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    is_bar = console.is_terminal and not (console.no_color or is_quiet())
    with Bar(*columns, console=console, disable=not is_bar) as bar:
        task = bar.add_task(title, total=documents.num_bytes)
        begin = printed = time.monotonic()

        # A closure: the writer calls it, and only this function has the bar.
        def report(progress: Progress) -> None:
            nonlocal printed
            now = time.monotonic()
            line = describe(progress, documents.num_bytes, elapsed_s=now - begin)
            bar.update(task, description=line, completed=progress.num_bytes)
            if bar.disable and not is_quiet() and now - printed >= _INTERVAL_S:
                printed = now
                print(f"{title}: {line}", file=sys.stderr, flush=True)

        yield report
        bar.update(task, completed=documents.num_bytes)


def describe(progress: Progress, num_bytes: int | None, *, elapsed_s: float) -> str:
    """Return a line of progress: the work done and, if the size is known, speed and time left."""
    done = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
    speed = progress.num_bytes / max(elapsed_s, 1e-9)
    if not num_bytes or not speed:
        return done
    left_s = round(max(num_bytes - progress.num_bytes, 0) / speed)
    left = f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"
    share = min(progress.num_bytes / num_bytes, 1)
    return (
        f"{share:.0%} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s, {left} left; {done}"
    )
