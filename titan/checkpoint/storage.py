"""Storage of a checkpoint's files: a folder (a path), or a URL that fsspec knows (s3://, gs://, memory://).

Local files survive a power cut once `fsync` has returned, and a rename is atomic. Object stores have neither, but an object
appears there only as a whole, when its stream is closed. commit.py relies on the guarantee that the storage gives. No torch is
imported here, because `titan verify` needs none.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from titan.base.untrusted import (
    MAX_BYTES,
    is_lost,
    open_regular,
    printable,
    read_stream,
    rename,
    retry,
    without_passwords,
)
from titan.checkpoint import CheckpointError

# File systems of fsspec that wrap another file system or read an archive. They may write copies on this machine.
_WRAPPERS = {
    "simplecache",
    "filecache",
    "blockcache",
    "cached",
    "dir",
    "reference",
    "generic",
    "async_wrapper",
    "zip",
    "tar",
    "libarchive",
    "data",
}
T = TypeVar("T")
Location = (
    str | Path
)  # a path, or a URL as str, since a Path would collapse the slashes of a URL


def join(location: Location, name: str) -> Location:
    """Return the location of `name` in a folder."""
    return location / name if isinstance(location, Path) else f"{location.rstrip('/')}/{name}"


def folder_of(location: Location) -> Location:
    """Return the folder of a file."""
    return location.parent if isinstance(location, Path) else location.rpartition("/")[0]


def name_of(location: Location) -> str:
    """Return the last part of a location."""
    return str(location).rstrip("/").rsplit("/", 1)[-1]


def as_location(text: str) -> Location:
    """Return a URL as it is, and any other text as a path."""
    return text if "://" in text else Path(text)


def unusable(url: str) -> str:
    """Return why a URL cannot hold checkpoints, or "" if it can."""
    from fsspec import get_filesystem_class  # slow to import, and only URLs need it

    scheme = url.split("://", 1)[0]
    if without_passwords(url) != url:
        names = f"FSSPEC_{scheme.upper()}_PASSWORD"
        return f"has a password, which would stand in the run's files; leave it out, and set {names}, or the store's own variables, such as AWS_SECRET_ACCESS_KEY"
    if "::" in url or scheme in _WRAPPERS:
        return "chained and wrapped file systems are not used; name the folder itself"
    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def storage_of(location: Location) -> LocalStorage:
    """Return the storage of a location.

    Raises:
        CheckpointError: the URL is unusable.
    """
    return RemoteStorage(str(location)) if "://" in str(location) else LocalStorage()


def read_file(location: Location, *, limit: int = MAX_BYTES) -> bytes:
    """Read a file, again after errors that may pass.

    Raises:
        OSError: it is missing, or cannot be read.
        InputError: it is too large.
    """
    storage = storage_of(location)

    def read() -> bytes:
        with storage.open(location, "rb") as stream:
            return read_stream(stream, storage.size(location), name=location, limit=limit)

    return retry(read)


class LocalStorage:
    """Files of a local or shared file system.

    Attributes:
        has_rename: whether a rename is atomic.
    """

    has_rename = True

    def open(self, location: Location, mode: str) -> IO[bytes]:
        """Open a file. Reading refuses links and devices (titan/base/untrusted.py)."""
        path = Path(location)
        return open_regular(path, within=path.parent) if mode == "rb" else path.open(mode)

    def exists(self, location: Location) -> bool:
        """Return whether there is a file or folder with this name."""
        return self._found(location, os.stat) is not None

    def listdir(self, folder: Location) -> list[str]:
        """Return the names in a folder, sorted. A folder that does not exist has none."""
        return sorted(self._found(folder, os.listdir) or ())

    def _found(self, location: Location, look: Callable[[Location], T]) -> T | None:
        """Look at a file or folder; None if there is none. A folder that cannot be read now is not an empty one."""
        try:
            return retry(lambda: look(location))
        except (
            FileNotFoundError,
            NotADirectoryError,
            ValueError,
        ):  # ValueError: a NUL in the name
            return None
        except OSError as error:
            if is_lost(error):
                raise
            return None

    def size(self, location: Location) -> int:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return retry(lambda: Path(location).stat().st_size)

    def make_folder(self, folder: Location) -> None:
        """Create a folder, and the folders above it, unless they exist."""
        Path(folder).mkdir(parents=True, exist_ok=True)

    def remove(self, location: Location) -> None:
        """Remove a file, a folder with all its contents, or a link without what it leads to."""
        path = Path(location)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def rename(self, old: Location, new: Location) -> None:
        """Rename atomically. The new name is durable when this returns."""
        rename(Path(old), Path(new))
        self.fsync_folder(Path(new).parent)

    def fsync(self, stream: IO[bytes]) -> None:
        """Wait until a stream's bytes are on disk."""
        stream.flush()
        os.fsync(stream.fileno())

    def fsync_folder(self, folder: Location) -> None:
        """Wait until the names in a folder are on disk."""

        def sync() -> None:
            # A new name is an entry of its folder, which must reach the disk, too.
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        retry(sync)

    def write(self, location: Location, data: bytes) -> None:
        """Write a file, and wait until it is on disk."""
        with self.open(location, "wb") as stream:
            stream.write(data)
            self.fsync(stream)


class RemoteStorage(LocalStorage):
    """Files of a file system of fsspec, chosen by the URL's scheme."""

    has_rename = False

    def __init__(self, url: str) -> None:
        if reason := unusable(url):
            raise CheckpointError(printable(f"{url}: {reason}"))
        import fsspec  # torch requires it; a scheme may need another package, which its message names

        try:
            self.system: Any = fsspec.core.url_to_fs(url)[0]
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url}: {error}") from error
        self.system.invalidate_cache()  # fsspec caches listings; another process may have written

    def open(self, location: Location, mode: str) -> IO[bytes]:
        if mode == "rb":
            # A name in a store may also be a folder, or a link.
            info = self.system.info(str(location))
            if info["type"] != "file" or info.get("islink"):
                raise OSError(errno.EINVAL, "it is not a regular file")
        return self.system.open(str(location), mode)

    def exists(self, location: Location) -> bool:
        return self.system.exists(str(location))

    def listdir(self, folder: Location) -> list[str]:
        try:
            return sorted(map(name_of, self.system.ls(str(folder), detail=False)))
        except FileNotFoundError:
            return []

    def size(self, location: Location) -> int:
        return self.system.size(str(location))

    def make_folder(self, folder: Location) -> None:
        self.system.makedirs(str(folder), exist_ok=True)

    def remove(self, location: Location) -> None:
        self.system.rm(str(location), recursive=True)

    def rename(self, old: Location, new: Location) -> None:
        self.system.mv(str(old), str(new))

    def fsync(self, stream: IO[bytes]) -> None:
        """Do nothing: an object is stored when its stream is closed."""

    def fsync_folder(self, folder: Location) -> None:
        """Do nothing: an object store has no folders."""
