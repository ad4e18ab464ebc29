"""The one writer of a run folder's files. Imports no torch.

    replace     whole files (status.json, config.toml, environment.json, ...): a temporary name, then a rename
    append      files of lines (metrics.jsonl, events.jsonl, logs/rank-N.log, logs/rank-N.times.jsonl)

These files only tell about a run, so none of them ends it. An error that passes is tried again at once. After any other
error (a full disk) there is one warning, the text waits in memory, and later writes try again. `report` counts the lines
that stayed unwritten.

A run folder may come from anybody, so no link is followed: neither a link in place of a file, nor a folder that leads
out of the run folder.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from titan.base.untrusted import printable, retry

_LOG = logging.getLogger("titan")
# Training waits for these retries, so they are short.
_PAUSES_S = (0.05, 0.25)
# At the end of a run there is no later write.
_LAST_PAUSES_S = (0.05, 0.25, 1.0)
_MAX_WAITING = 10_000  # lines of a file that wait in memory


def require_inside(path: Path, folder: Path) -> None:
    """Check that a file to write is no link, and that no link on its path leads out of a folder.

    Raises:
        OSError: it is or does. A path that names another folder by itself is the user's wish.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which is not followed")
    is_named_inside = path.absolute().is_relative_to(folder.absolute())
    if is_named_inside and not path.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, f"{path.parent} leads out of {folder}")


def open_to_write(path: Path, flags: int, *, within: Path | None = None) -> int:
    """Open a file to write to it. Return its descriptor.

    Args:
        path: the file.
        flags: flags of os.open.
        within: folder that no link may lead out of.

    Raises:
        OSError: the file cannot be opened, or is a link or no regular file.
    """
    require_inside(path, within or path.parent)
    # O_NOFOLLOW: the link may be new. O_NONBLOCK: a FIFO would otherwise wait for its reader.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(descriptor)
        # The other name of a hard link may be outside.
        what = (
            "has a second name, a hard link" if state.st_nlink > 1 else "is not a regular file"
        )
        raise OSError(errno.EMLINK, f"it {what}")
    return descriptor


def write_text_atomically(
    path: Path, text: str, *, durable: bool = True, within: Path | None = None
) -> None:
    """Write a file so that a reader sees the old or the new content, even after a crash.

    Args:
        path: the file. A link in its place is replaced.
        text: its new content.
        durable: whether this holds over a power failure, too, which means waiting for the disk.
        within: as for `open_to_write`.
    """
    write_atomically(path, text.encode(), durable=durable, within=within)


def write_atomically(
    path: Path, data: bytes, *, durable: bool = True, within: Path | None = None
) -> None:
    """Write bytes as `write_text_atomically` writes text."""
    retry(lambda: _write_atomically(path, data, durable, within), pauses_s=_PAUSES_S)


def _write_atomically(path: Path, data: bytes, durable: bool, within: Path | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename does not cross file systems. The ids avoid collisions.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = open_to_write(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, within=within
        )
        try:
            _write(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # A rename is atomic: a reader sees one of the two files.
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _overwrite(path: Path, data: bytes, *, within: Path) -> None:
    """Write a file in the room of its old content, which says what is no longer true. The disk is full."""
    descriptor = open_to_write(path, os.O_WRONLY, within=within)
    try:
        if os.fstat(descriptor).st_blocks * 512 < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write(descriptor, data)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes. On a full disk a write can be short without an error."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@cache
def run_files(folder: Path) -> RunFiles:
    """Return the writer of a run folder, the same in the whole process."""
    return RunFiles(folder)


class RunFiles:
    """Writer of the files of a run folder that tell about the run. No method raises OSError.

    A file belongs to one thread, except replaced files. Nothing here waits for another thread, since a thread that
    reports a hang writes, too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        # What could not be written yet: lines, and contents of files that are replaced.
        self._lines: dict[str, list[str]] = {}
        self._texts: dict[str, str] = {}
        self._lost: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}  # of the files whose last write failed
        self._told: set[str] = set()
        # Whole files of this run, and the folder that has them.
        self._whole: dict[str, str] = {}
        self._place = 0

    def replace(
        self, name: str, text: str, *, durable: bool = False, last: bool = False
    ) -> None:
        """Write a whole file.

        Args:
            name: path of the file in the run folder.
            text: its content.
            durable: as for `write_text_atomically`.
            last: whether no later write will try again. Then any error is retried.
        """
        self._texts[name] = self._whole[name] = text
        path, data = self.folder / name, text.encode(errors="backslashreplace")

        def write() -> None:
            try:
                _write_atomically(path, data, durable, self.folder)
            except OSError as error:
                if not last or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _overwrite(path, data, within=self.folder)

        if self.attempt(name, write, last=last):
            self._texts.pop(name, None)

    def append(self, name: str, text: str) -> None:
        """Append a line to a file, and the lines that wait.

        Args:
            name: path of the file in the run folder.
            text: one or more lines, with their ends.
        """
        lines = self._lines.setdefault(name, [])
        lines.append(text)
        if len(lines) > _MAX_WAITING:
            self._lost[name] += 1
            del lines[0]
        self._append_waiting(name)

    def take_waiting(self, name: str) -> list[str]:
        """Return the lines of a file that wait, and forget them."""
        return self._lines.pop(name, [])

    def lose(self, name: str, reason: str = "") -> None:
        """Count a line that another writer could not write. Warn of the first one, unless `attempt` did."""
        self._lost[name] += 1
        if reason:
            self._warn(name, reason)

    def attempt(self, name: str, action: Callable[[], object], *, last: bool = False) -> bool:
        """Do something with a file. An error becomes a warning, once for each file.

        Args:
            name: name of the file in the warning.
            action: may raise OSError.
            last: as for `replace`.

        Returns:
            Whether it worked.
        """
        self._follow_folder()
        pauses_s = _LAST_PAUSES_S if last else () if name in self._reasons else _PAUSES_S
        try:
            retry(action, pauses_s=pauses_s, of_any=last)
        except OSError as error:
            self._warn(name, error.strerror or str(error))
            return False
        self._reasons.pop(name, None)
        return True

    def make(self, name: str, write: Callable[[Path], object]) -> bool:
        """Call a function that writes a whole file, such as a trace or a picture.

        Args:
            name: path of the file in the run folder.
            write: writes the file with this path.

        Returns:
            Whether it worked.
        """
        path = self.folder / name

        def make() -> None:
            require_inside(path, self.folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            # A FIFO would wait for its reader, and a hard link may have its other name outside.
            path.unlink(missing_ok=True)
            write(path)

        return self.attempt(path.name, make)

    def remove(self, name: str) -> None:
        """Remove a file that another run has left, if it is there."""
        path = self.folder / name
        self.attempt(name, lambda: path.unlink(missing_ok=True))

    def flush(self, *, last: bool = False) -> None:
        """Try again what waits. `last` is as for `replace`."""
        for name, text in [*self._texts.items()]:
            self.replace(name, text, last=last)
        for name in [*self._lines]:
            self._append_waiting(name, last=last)

    def report(self) -> None:
        """End a run: try a last time what waits, warn of what stays unwritten, and close the files."""
        self.flush(last=True)
        found = [f"{name} could not be written" for name in self._texts]
        counts = self._lost + Counter({name: len(lines) for name, lines in self._lines.items()})
        for name, count in counts.items():
            found.append(f"{count:,} line{'s' * (count > 1)} of {name} could not be written")
        reasons = {name: f" ({why})" for name, why in self._reasons.items()}
        for text, name in zip(found, [*self._texts, *counts], strict=True):
            _LOG.warning(text + reasons.get(name, ""))
        for name in [*self._descriptors]:
            self._close(name)
        for state in (
            self._lines,
            self._texts,
            self._lost,
            self._reasons,
            self._told,
            self._whole,
        ):
            state.clear()

    def _follow_folder(self) -> None:
        """Write the whole files again if somebody has moved or removed the folder, which later lines make again."""
        before, self._place = self._place, 0
        with suppress(OSError):
            self._place = self.folder.stat().st_ino
        if before not in (0, self._place) and "config.toml" in self._whole:
            _LOG.warning(
                f"{self.folder} was moved or removed while the run goes on; it is made again, and holds what follows"
            )
            for name, text in [*self._whole.items()]:
                self.replace(name, text)

    def _warn(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        if name not in self._told:
            # Before the warning, since the log itself may be the file.
            self._told.add(name)
            _LOG.warning(
                f"{self.folder / name} cannot be written ({reason}); training goes on, and tries again later"
            )

    def _append_waiting(self, name: str, *, last: bool = False) -> None:
        lines = self._lines.get(name)
        if lines and self.attempt(name, lambda: self._append(name, "".join(lines)), last=last):
            lines.clear()

    def _append(self, name: str, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        try:
            descriptor = self._descriptors.get(name)
            if descriptor is None or not self._is_there(name, descriptor):
                self._close(name)
                descriptor, is_torn = self._open(name)
                data = b"\n" * is_torn + data
            before = os.fstat(descriptor).st_size
            try:
                _write(descriptor, data)
            except OSError:
                os.ftruncate(descriptor, before)  # the next line must not follow half a line
                raise
        except OSError:
            # A descriptor of a file server that came back would stay stale.
            self._close(name)
            raise

    def _open(self, name: str) -> tuple[int, bool]:
        """Open a file of lines. Return its descriptor, and whether a crash left half a line at its end."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            state = os.lstat(path)
            # A backup by hard links, or a file elsewhere, keeps its content: the lines go into a copy.
            if stat.S_ISREG(state.st_mode) and state.st_nlink > 1:
                _write_atomically(path, path.read_bytes(), False, self.folder)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = self._descriptors[name] = open_to_write(path, flags, within=self.folder)
        size = os.fstat(descriptor).st_size
        return descriptor, size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"

    def _is_there(self, name: str, descriptor: int) -> bool:
        """Return whether an open file still has its name: it may have been moved aside."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self.folder / name), os.fstat(descriptor))
        return False

    def _close(self, name: str) -> None:
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


class LineHandler(logging.Handler):
    """Handler that appends records to a file of a run folder, as printable text."""

    def __init__(self, files: RunFiles, name: str) -> None:
        super().__init__()
        self._files, self._name = files, name

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # wrong arguments of the caller
            self.handleError(record)
            return
        self._files.append(self._name, "\n".join(map(printable, text.split("\n"))) + "\n")
