"""Tokenise finite sources once, into a cache that all processes map.

A cache entry is a folder of token shards named by a hash of everything that its content depends on. So an entry is never
stale, only unused, and may be deleted at any time. Whoever writes it holds a file lock. The lock is the kernel's (flock) and
ends with the process that holds it. So a killed process leaves nothing to clear, and the next one keeps its finished shards.

Short text is tokenised by the first process that needs it, while the others wait. Longer text is tokenised by a process in
the background, with a worker on each core, while training reads the shards that are finished. The first of these is small,
so that training begins soon. A thread of each rank waits for the lock, so that the next one goes on when the first dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.config.base import Section
from titan.config.options import is_quiet
from titan.data import DataError
from titan.data.shards import INDEX, TokenShards
from titan.data.sources import Documents, open_documents
from titan.data.writer import Progress, TokenizationSpec, open_index, write_shards
from titan.untrusted import InputError

logger = logging.getLogger(__name__)

_SHARD_TOKENS = 2**26  # an interrupted run loses at most one shard for each split
_FIRST_SHARD_TOKENS = 2**20  # a second of work or less
_SHORT_BYTES = 2**24  # two seconds of work: starting a process and its workers takes as long
_INTERVAL_S, _RARE_INTERVAL_S = 10.0, 60.0  # between two lines of progress, waiting and not
_LOOK_S = 0.05  # between two looks at what the writer has finished
_NICENESS = 10  # of tokenising after the first shard
_WRITERS = 3  # of which all but the last are replaced when they are killed


def default_cache_folder() -> Path:
    """Return titan/ in the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan"


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Make `folder` if it is missing. Raises DataError for any error of the file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(
            f"cannot fill '{folder}': {error}; choose another folder (for cached text: data.cache_folder), with "
            "room, on a file system with locks"
        ) from error


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Make `folder` if it is missing, and be the only process that writes there. Waits for another one."""
    with explained(folder), (folder / "lock").open("a") as lock:
        try:
            # First without waiting, to say so before waiting.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is tokenising into %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def open_cached(
    section: Section, *, spec: TokenizationSpec, cache_folder: str, split: str
) -> tuple[TokenShards, str]:
    """Return the tokens of a source, which may still be growing, and the source's name. Raises DataError."""
    documents = open_documents(section)
    if (documents.num_bytes or 0) <= _SHORT_BYTES:
        folder = cached_shards(documents, spec=spec, cache_folder=cache_folder)
        return TokenShards(folder, split=split), documents.name
    key = spec.key(documents, shard_tokens=[_FIRST_SHARD_TOKENS, _SHARD_TOKENS])
    folder = cache_entry(cache_folder, key)
    options = {"first_shard_tokens": _FIRST_SHARD_TOKENS, "shard_tokens": _SHARD_TOKENS}
    options |= {"folder": folder, "spec": spec, "workers": usable_cores()}
    source = pickle.dumps((section, options))
    return GrowingShards(folder, split=split, key=key, spec=spec, source=source), documents.name


def cache_entry(cache_folder: str, key: str) -> Path:
    """Return the folder of an entry, in `data.cache_folder` or the default."""
    root = Path(cache_folder).expanduser() if cache_folder else default_cache_folder()
    return root / "tokens" / key


def cached_shards(documents: Documents, *, spec: TokenizationSpec, cache_folder: str) -> Path:
    """Return the folder with the documents' tokens. Writes it first if it is missing."""
    folder = cache_entry(cache_folder, spec.key(documents, shard_tokens=_SHARD_TOKENS))
    # Complete entries are found without a lock.
    if not (folder / INDEX).is_file():
        title = f"tokenising {documents.name} into the cache, once"
        # Under the lock, write_shards looks again: another process may have finished meanwhile.
        with exclusive(folder), display(documents, title=title) as report:
            write_shards(
                documents, folder=folder, spec=spec, shard_tokens=_SHARD_TOKENS, report=report
            )
    return folder


class GrowingShards(TokenShards):
    """Read a cache entry while a process in the background writes it."""

    def __init__(
        self, folder: Path, *, split: str, key: str, spec: TokenizationSpec, source: bytes
    ) -> None:
        """Read the entry `key`. source: what `fill` needs, pickled."""
        self._key, self._spec, self._failure = key, spec, ""
        self.is_complete = (folder / INDEX).is_file()
        super().__init__(folder, split=split, index=open_index(folder, key=key, spec=spec))
        # Tokenising begins while the model is built.
        if not self.is_complete:
            threading.Thread(target=self._fill, args=(source,), daemon=True).start()

    def wait(self, enough: Callable[[], bool]) -> None:
        while not (enough() or self.is_complete):
            if self._failure:
                raise DataError(self._failure)
            time.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        # In this order, since progress.json goes when index.json has come.
        is_complete = (self.folder / INDEX).is_file()
        index = open_index(self.folder, key=self._key, spec=self._spec)
        if is_complete or index.total(self.split) > self.num_tokens:
            self.use(index)
        self.is_complete = is_complete

    def _fill(self, source: bytes) -> None:
        """Wait for the lock, and for the process that writes what is missing then."""
        # The kernel ends that process when this thread ends, and so with this process.
        code = f"import sys; sys.path[:] = {sys.path!r}; from titan.health.signals import die_with_parent"
        code += "; die_with_parent(); from titan.data.cache import fill; fill()"
        try:
            with exclusive(self.folder):
                for _ in range(_WRITERS):
                    done = subprocess.run(
                        [sys.executable, "-c", code], input=source, stdout=subprocess.PIPE
                    )
                    if done.stdout or not done.returncode:
                        break
            # Whoever waits raises it. Nobody may ever need the text behind it.
            if done.returncode:
                how = f"tokenising into '{self.folder}' was killed {_WRITERS} times ({done.returncode})"
                self._failure = done.stdout.decode() or f"{how}; is memory running out?"
        except DataError as error:
            self._failure = str(error)


def fill() -> None:
    """Write the cache entry that standard input describes. Runs in a separate process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the process that started this one handles them
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    os.setpgrp()  # the workers' too
    section, options = pickle.load(sys.stdin.buffer)
    try:
        documents = open_documents(section)
        title = f"tokenising {documents.name} into the cache, once, while training"
        shown = display(documents, title=title, interval_s=_RARE_INTERVAL_S)
        with shown as show, explained(options["folder"]):

            def report(progress: Progress) -> None:
                # Training goes on, so the rest is done in the time that it leaves.
                if progress.tokens > options["first_shard_tokens"]:
                    os.setpriority(os.PRIO_PGRP, 0, _NICENESS)
                show(progress)

            write_shards(documents, report=report, **options)
    except InputError as error:
        print(error, file=answers, end="", flush=True)
        sys.exit(str(error))  # shown now, for training may need that text much later


def usable_cores() -> int:
    """Return the cores this process may run on, which in a container or a Slurm job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def display(
    documents: Documents, *, title: str, interval_s: float = 0
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress on standard error: a bar on a terminal, else a line every ten seconds.

    With interval_s, it is a line as often as that, beside what a run prints.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    is_bar = console.is_terminal and not (interval_s or console.no_color or is_quiet())
    with Bar(*columns, console=console, disable=not is_bar) as bar:
        task = bar.add_task(title, total=documents.num_bytes)
        begin = printed = time.monotonic()

        # A closure, since the writer reports and only this function has the bar.
        def report(progress: Progress) -> None:
            nonlocal printed
            now = time.monotonic()
            line = describe(progress, documents.num_bytes, elapsed_s=now - begin)
            bar.update(task, description=line, completed=progress.num_bytes)
            if bar.disable and not is_quiet() and now - printed >= (interval_s or _INTERVAL_S):
                printed = now
                print(f"{title}: {line}", file=sys.stderr, flush=True)

        yield report
        bar.update(task, completed=documents.num_bytes)


def describe(progress: Progress, num_bytes: int | None, *, elapsed_s: float) -> str:
    """Return how much is done and, if the size is known, how fast and how long the rest will take."""
    done = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
    speed = progress.num_bytes / max(elapsed_s, 1e-9)
    if not num_bytes or not speed:
        return done
    left_s = round(max(num_bytes - progress.num_bytes, 0) / speed)
    left = f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"
    share = min(progress.num_bytes / num_bytes, 1)
    return f"{share:.0%} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s, {left} left; {done}"
