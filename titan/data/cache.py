"""The cache of tokenised text: finite sources are tokenised once, and mapped by all processes.

A cache entry is a folder of token shards named by a hash of everything its content follows from, so it is never
stale, only unused; it may be deleted at any time. Processes that need the same entry take a file lock in
turn: the first writes, with a worker process on each core where there is much to do, and says how long it will take; the
others, which wait and so leave it their cores, find it written. The lock is the kernel's (flock): it ends with the
process that holds it, so a killed process leaves nothing to clear, and its finished shards are kept.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.data.display import display
from titan.data.errors import DataError
from titan.data.shards import INDEX
from titan.data.sources import Documents
from titan.data.writer import Recipe, write_shards

logger = logging.getLogger(__name__)

_SHARD_TOKENS = 2**26  # what an interrupted run loses at most
_ALONE_BYTES = 2**25  # seconds of work, for which no workers are started


def default_cache_folder() -> Path:
    """titan/ in the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan"


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Write in `folder`, made where there is none, as the only process; waits for one that does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that is tokenising into %s", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DataError(
            f"cannot fill '{folder}': {error}; choose another folder (for cached text: data.cache_folder), with "
            "room, on a file system with locks"
        ) from error


def cached_shards(documents: Documents, *, recipe: Recipe, cache_folder: str) -> Path:
    """The folder with the documents' tokens, written first where it is not there yet."""
    root = Path(cache_folder).expanduser() if cache_folder else default_cache_folder()
    folder = root / "tokens" / recipe.key(documents, shard_tokens=_SHARD_TOKENS)
    if not (folder / INDEX).is_file():
        is_large = (documents.num_bytes or 0) > _ALONE_BYTES
        title = f"tokenising {documents.name} into the cache, once"
        with exclusive(folder), display(documents, title=title) as report:
            write_shards(
                documents,
                folder=folder,
                recipe=recipe,
                shard_tokens=_SHARD_TOKENS,
                workers=usable_cores() if is_large else 1,
                report=report,
            )
    return folder


def usable_cores() -> int:
    """Return the cores this process may run on, which in a container or a Slurm job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
