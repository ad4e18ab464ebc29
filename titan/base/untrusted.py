"""Readers of files that others wrote: regular files of bounded size, with checked types and printable text.

A job file, a run folder, a checkpoint or a model's folder may come from anybody. Every reader
raises `InputError`, one line that names the file. `kind` is a type that pydantic knows (a
dataclass, `dict[str, Any]`). Keys that the type does not have are left out. Imports no torch.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import AllowInfNan, Field, TypeAdapter, ValidationError

from titan.base.failure import UserError

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib  # noqa: F401

T = TypeVar("T")
Finite = Annotated[float, AllowInfNan(False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**20)]
MAX_BYTES = 64 * 2**20
MAX_VALUES = 300_000  # of a JSON file: Python needs about 100 bytes for each
TAIL_BYTES = 2**20
MAX_TEXT = 4000  # characters of a text or a line for people
# Control characters (C0, C1), marks that change the direction of text or are invisible, line separators, surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s]*@")
# As above, without line ends, tabs and the invisible characters that scripts and emoji need.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]"
)
# Errors that say nothing about a file, and may pass: a file server that fails over, a network, a signal.
_PASSING = {errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN}
_PASSING |= {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
PAUSES_S = (0.05, 0.25, 1.0, 3.0)


class InputError(UserError, ValueError):
    """Error: a file cannot be used. The message is for the user, and safe to print."""

    def __init__(self, message: object, *, kind: str = "") -> None:
        super().__init__("\n".join(map(printable, str(message).split("\n"))), kind=kind)


def printable(text: str, limit: int = 0) -> str:
    r"""Return text for one line of a terminal. Control characters are escaped, as `\u001b`.

    Args:
        text: any text.
        limit: largest number of characters before escaping; 0: no limit.
    """
    # Cut before escaping: the result may be longer, but the scanned text is bounded.
    if limit and len(text) > limit:
        text = f"{text[: limit - 4]} ..."
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", without_passwords(text))


def without_passwords(text: str) -> str:
    """Return a text with "..." for each password in a URL."""
    return _PASSWORD.sub(r"\1:...@", text)


def harmless(text: str, allowed: str = "") -> str:
    """Return a text for a terminal without passwords, in which characters that could steer it are escaped."""

    def escape(match: re.Match[str]) -> str:
        return match[0] if match[0] in allowed else printable(match[0])

    return _STEERS.sub(escape, without_passwords(text))


class PrintableStream:
    """Output stream that escapes characters that could steer a terminal, whoever prints them.

    It is the net below `printable`: a message or a model's text may quote a file of anybody.
    """

    def __init__(self, stream: Any, *, allowed: str = "") -> None:
        self._stream, self._allowed = stream, allowed

    def write(self, text: str) -> int:
        self._stream.write(harmless(text, self._allowed))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def retry(
    action: Callable[[], T], *, pauses_s: Sequence[float] | None = None, of_any: bool = False
) -> T:
    """Call `action`, again after errors of the file system that may pass.

    Args:
        action: reads or writes a file.
        pauses_s: seconds before each further call; None: `PAUSES_S`.
        of_any: whether to call again after any OSError.
    """
    for pause_s in PAUSES_S if pauses_s is None else pauses_s:
        try:
            return action()
        except (ConnectionError, TimeoutError):  # of a network disk or an object store
            pass
        except OSError as error:
            if not of_any and error.errno not in _PASSING:
                raise
        time.sleep(pause_s)
    return action()


def rename(old: Path, new: Path) -> None:
    """Rename atomically, again after errors that may pass. A file server may report an error of a rename that it has done."""
    errors: list[OSError] = []

    def move() -> None:
        try:
            old.replace(new)
        except OSError as error:
            is_done = bool(errors) and is_there(new) and not is_there(old)
            errors.append(error)
            if not is_done:
                raise

    retry(move)


def is_lost(error: OSError) -> bool:
    """Return whether a file cannot be read now, so that nothing is known about it: it may be whole."""
    is_gone = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    # EINVAL and ELOOP: `open_regular` refuses what is no file of this folder.
    return not is_gone and error.errno not in (errno.EINVAL, errno.ELOOP)


def is_plain_name(name: object) -> bool:
    """Return whether this is the name of a file in a folder, and no path out of it."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not {"/", "\\"} & {*name}
        # Short enough for a file system, without characters to escape.
        and printable(name, 255) == name
    )


def open_regular(path: Path, *, within: Path | None = None) -> IO[bytes]:
    """Open a regular file. A FIFO or a device could block forever.

    Args:
        path: the file.
        within: folder that a link must not lead out of. None follows every link.

    Raises:
        OSError: the file is not regular, or cannot be opened.
    """
    try:
        # Resolve both, since the folder's own path may have a link.
        if within is not None and not path.resolve().is_relative_to(within.resolve()):
            raise OSError(errno.ELOOP, "it is a link that leads out of its folder")
        # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (ValueError, RuntimeError) as error:  # a NUL in the name; links in a circle
        raise OSError(errno.EINVAL, str(error)) from error
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def is_there(file: Path) -> bool:
    """Return whether a file, folder or link has this name. Readers refuse anything but a regular file."""
    return file.is_symlink() or file.exists()


def why_not_private(folder: Path) -> str:
    """Return why a folder is not one that only this user and root may write into; "" if it is.

    A folder that does not exist is created with mode 0700.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        link, state = folder.lstat(), folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not {link.st_uid, state.st_uid} <= {os.getuid(), 0}:
        return "another user owns it"
    if state.st_mode & 0o022:
        mode = stat.S_IMODE(state.st_mode)
        return f"others can write into it (mode {mode:o}); chmod -R go-w {folder}"
    return ""


def root_of(folder: Path) -> Path:
    """Return the folder that links of a Hugging Face folder may lead into.

    It is the folder itself or, in the hub's cache, its model's folder.
    """
    return folder.parents[1] if folder.absolute().parent.name == "snapshots" else folder


class Unpacked(io.RawIOBase):
    """Stream of the bytes of a file, unpacked if it is a .gz or .zst file.

    It raises InputError when a file unpacks to more than text does. Text and traces shrink 3 to 20
    times, and deflate's limit is 1032. A ratio between the two comes from a file that was made to
    fill a disk or a memory.
    """

    MAX_RATIO, RATIO_FROM_BYTES = 200, 2**24

    def __init__(self, path: Path) -> None:
        self._path, self._packed, self._num_bytes = path, open_regular(path), 0
        self._content: Any = self._packed
        if (ending := path.suffix.lower()) == ".gz":
            self._content = gzip.GzipFile(fileobj=self._packed)
        elif ending == ".zst":
            try:
                import pyarrow
            except ImportError as error:
                raise InputError(
                    f"{path}: .zst needs pyarrow: pip install 'titan-pretrain[huggingface]'"
                ) from error
            self._content = pyarrow.CompressedInputStream(self._packed, "zstd")

    @property
    def position(self) -> int:
        """Return the number of bytes read from the file itself."""
        return self._packed.tell()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._content.readinto(buffer)
        except OSError as error:
            # zstd's own bound on the memory of a reader, which --long=28 and more exceed.
            if self._path.suffix.lower() == ".zst" and "memory" in str(error):
                raise InputError(
                    f"{self._path}: was packed with a longer window than readers allow (zstd --long); pack it again: "
                    f"zstd -d --long=31 {self._path}, then zstd without --long"
                ) from error
            raise
        self._num_bytes += count
        # Small files may shrink by any factor, since they cannot fill anything.
        if self._num_bytes > max(self.RATIO_FROM_BYTES, self.MAX_RATIO * self.position):
            raise InputError(
                f"{self._path}: its first {self.position:,} bytes unpack to {self._num_bytes:,}, which no text does; "
                "replace the file or leave it out"
            )
        return count

    def close(self) -> None:
        self._packed.close()
        super().close()


def read_bytes(path: Path, *, limit: int = MAX_BYTES, within: Path | None = None) -> bytes:
    """Read the bytes of a regular file.

    Args:
        path: the file.
        limit: largest number of bytes.
        within: as for `open_regular`.

    Raises:
        InputError: the file cannot be read, or is too large.
    """

    def read() -> bytes:
        with open_regular(path, within=within) as file:
            return read_stream(file, os.fstat(file.fileno()).st_size, name=path, limit=limit)

    try:
        return retry(read)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_stream(stream: IO[bytes], size: int, *, name: object, limit: int = MAX_BYTES) -> bytes:
    """Read all of a stream.

    Args:
        stream: the stream.
        size: its number of bytes.
        name: name of the stream in errors.
        limit: largest number of bytes.

    Raises:
        InputError: the stream is too large.
    """
    if size > limit:
        raise InputError(f"{name}: has {size:,} bytes, more than the {limit:,} that are read")
    return stream.read(size)


def read_text(path: Path, *, within: Path | None = None) -> str:
    """Read the text of a UTF-8 file.

    Args:
        path: the file.
        within: as for `open_regular`.

    Raises:
        InputError: the file cannot be read.
    """
    return decode(read_bytes(path, within=within), name=path)


def read_lines(path: Path, *, within: Path | None = None) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file that are not blank, with their numbers.

    Only a line feed ends a line, or a carriage return and a line feed: JSON text may hold other
    characters that `str.splitlines` takes for line ends, such as U+2028.
    """
    for number, line in enumerate(read_text(path, within=within).split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def decode(data: bytes, *, name: object) -> str:
    """Return the text of UTF-8 bytes, without a byte order mark at its beginning.

    Raises:
        InputError: the bytes are not UTF-8. The message begins with `name`.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: is not UTF-8 text (at byte {error.start:,})") from error


def read_json(
    path: Path,
    kind: type[T],
    *,
    limit: int = MAX_BYTES,
    values: int = MAX_VALUES,
    within: Path | None = None,
) -> T:
    """Read the value of type `kind` in a JSON file.

    Args:
        path: the file.
        kind: type of the value.
        limit: largest number of bytes.
        values: largest number of values in the file.
        within: as for `open_regular`.

    Raises:
        InputError: the file cannot be read, or has another type.
    """
    return parse_json(
        read_bytes(path, limit=limit, within=within), kind, name=path, values=values
    )


def parse_json(
    text: str | bytes, kind: type[T], *, name: object, values: int = MAX_VALUES
) -> T:
    """Parse the value of type `kind` in a JSON text.

    Args:
        text: the JSON text.
        kind: type of the value.
        name: name of the text in errors.
        values: largest number of values in the text.

    Raises:
        InputError: the text is not JSON of this type, or has too many values.
    """
    text = (
        text.removeprefix(codecs.BOM_UTF8)
        if isinstance(text, bytes)
        else text.removeprefix("\ufeff")
    )
    # Count before parsing: "[]" takes two bytes here and 56 in memory.
    marks: Any = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    # Commas, brackets and braces bound the number of values from above.
    if sum(text.count(mark) for mark in marks) > values:
        raise InputError(f"{name}: holds more than {values:,} values")
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{name}: cannot be read: {_explain(error)}") from None


def tail_lines(path: Path, *, limit: int = TAIL_BYTES, within: Path | None = None) -> list[str]:
    """Read the last lines of a text file. Long lines are cut.

    Args:
        path: the file.
        limit: number of bytes at its end.
        within: as for `open_regular`.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open_regular(path, within=within) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start := max(size - limit, 0))
            text = file.read(limit).decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    lines = text.split("\n")
    # The first line of a tail is incomplete. Drop it, unless it is the only one.
    return [line[:MAX_TEXT] for line in lines[bool(start) :] or lines]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(printable(str(part), 40) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
