"""Files of checkpoints: in a local or shared folder (a path), or anywhere fsspec reaches (a URL: s3://, gs://, memory://).

Local files survive a power cut once `persist` has returned. Object stores have neither that nor an atomic rename, but what
they hold is whole: an object appears when its stream is closed. No torch here: `titan verify` uses it.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import IO, Any

from titan.checkpoint import CheckpointError
from titan.untrusted import open_regular

# Of fsspec: they wrap another file system, or read an archive, and may write copies on this machine.
_WRAPPERS = {
    *("simplecache", "filecache", "blockcache", "cached", "dir", "reference", "generic", "async_wrapper"),
    *("zip", "tar", "libarchive", "data"),
}  # fmt: skip
Location = str | Path  # of a folder: a path, or a URL, which has to stay a string


def join(location: Location, name: str) -> Location:
    return location / name if isinstance(location, Path) else f"{location.rstrip('/')}/{name}"


def name_of(location: Location) -> str:
    return str(location).rstrip("/").rsplit("/", 1)[-1]


def as_location(text: str) -> Location:
    return text if "://" in text else Path(text)


def unusable(url: str) -> str:
    """Why a URL cannot hold checkpoints, if so. Asks fsspec, which only those who have a URL need."""
    from fsspec import get_filesystem_class

    scheme = url.split("://", 1)[0]
    if "::" in url or scheme in _WRAPPERS:
        return "chained and wrapped file systems are not used; name the folder itself"
    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def storage_of(location: Location) -> LocalStorage:
    return RemoteStorage(str(location)) if "://" in str(location) else LocalStorage()


def die_at(point: str, location: Location) -> None:
    """Tests end this process here, as the kernel or a power cut would: TITAN_KILL_SAVE=POINT:RANK:STEP."""
    if wanted := os.environ.get("TITAN_KILL_SAVE"):
        step = name_of(location).rsplit("-", 1)[-1]
        if wanted == f"{point}:{os.environ.get('RANK', '0')}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)


class LocalStorage:
    """A local or shared file system."""

    has_rename = True

    def open(self, location: Location, mode: str) -> IO[bytes]:
        path = Path(location)
        return open_regular(path, within=path.parent) if mode == "rb" else path.open(mode)

    def exists(self, location: Location) -> bool:
        return Path(location).exists()

    def listdir(self, folder: Location) -> list[str]:
        """What lies in a folder, sorted; nothing where there is none."""
        return sorted(p.name for p in Path(folder).iterdir()) if Path(folder).is_dir() else []

    def size(self, location: Location) -> int:
        return Path(location).stat().st_size

    def make_folder(self, folder: Location) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def remove(self, location: Location) -> None:
        """A file, or a folder with all that is in it."""
        path = Path(location)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def rename(self, old: Location, new: Location) -> None:
        """Atomic and, when this returns, durable."""
        Path(old).rename(new)
        self.fsync_folder(Path(new).parent)

    def fsync(self, stream: IO[bytes]) -> None:
        stream.flush()
        os.fsync(stream.fileno())

    def fsync_folder(self, folder: Location) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, location: Location, data: bytes) -> None:
        with self.open(location, "wb") as stream:
            stream.write(data)
            self.fsync(stream)


class RemoteStorage(LocalStorage):
    """Whatever fsspec knows by this URL's scheme."""

    has_rename = False

    def __init__(self, url: str) -> None:
        if reason := unusable(url):
            raise CheckpointError(f"{url}: {reason}")
        import fsspec  # torch brings it; a scheme may need its own package, which its message names

        try:
            self.system: Any = fsspec.core.url_to_fs(url)[0]
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url}: {error}") from error
        self.system.invalidate_cache()  # listings of another process's files

    def open(self, location: Location, mode: str) -> IO[bytes]:
        if mode == "rb":
            about = self.system.info(str(location))
            if about["type"] != "file" or about.get("islink"):
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
        """Closing the stream is all there is."""

    def fsync_folder(self, folder: Location) -> None:
        """Nothing to do."""
