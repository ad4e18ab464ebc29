"""manifest.json: size and hashes of every file of a checkpoint, and the check of files against it.

A file is hashed in blocks of 16 MiB (xxh3, 128 bits) while it is written. So the hash is that of the intended bytes, not of
the bytes that the disk returns. Blocks let ranks share the check, and let a report name the damaged bytes. The manifest
contains a hash of itself, and a reader accepts only the exact bytes that `render` writes. The hashes guard against accidents.
They are no signature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from typing import IO, Any

from xxhash import xxh3_128

from titan import __version__
from titan.base.untrusted import (
    Count,
    InputError,
    is_lost,
    is_plain_name,
    parse_json,
    printable,
    retry,
)
from titan.checkpoint import CheckpointError, tensor_index
from titan.checkpoint.formats import (
    DAMAGED,
    LOST,
    newer,
    require_known,
    unreadable,
)
from titan.checkpoint.storage import Location, join, name_of, read_file, storage_of

NAME, TITAN_JSON = "manifest.json", "titan.json"
# DCP's index. It is the only mark of steps that titan wrote before it wrote manifests.
METADATA = ".metadata"
BLOCK_BYTES = 16 * 2**20
_JOINED_BYTES = 2**20
_HEAD_BYTES = 4096  # which hold the format
_MAX_VALUES = 1_000_000  # values of a manifest, enough for the blocks of 16 TB


@dataclass(frozen=True)
class FileEntry:
    """A file's entry in a manifest: its size in bytes, and the hash of each block."""

    bytes: Count
    blocks: list[str]


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    Attributes:
        step: number of the step.
        files: entry of each file, by name.
        format: version of the format.
        block_bytes: bytes of a block.
        hash: hash of all other fields.
        titan: version of titan that wrote the step; empty in older steps.
        torch: version of torch that wrote it.
    """

    step: Count
    files: dict[str, FileEntry]
    format: int = 1
    block_bytes: int = BLOCK_BYTES
    hash: str = ""
    titan: str = ""
    torch: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        return {name: entry.bytes for name, entry in self.files.items()}


@dataclass(frozen=True, order=True)
class Damage:
    """Damage of a file, or of its bytes from `first` up to `last`.

    Attributes:
        file: name of the file.
        reason: the damage, in words.
        first: first damaged byte.
        last: end of the damaged bytes, exclusive. 0 means that the whole file is damaged.
        unreadable: the file is missing, or cannot be read.
        kind: kind of failure (titan/base/errors.py). A step that cannot be read now, or is of a newer titan, may be whole.
    """

    file: str
    reason: str
    first: int = 0
    last: int = 0
    unreadable: bool = False
    kind: str = DAMAGED

    @staticmethod
    def of(file: str, error: OSError) -> Damage:
        """Return the damage of a file that could not be read."""
        is_missing = isinstance(error, FileNotFoundError)
        why = "it is missing" if is_missing else error.strerror or error
        kind = LOST if is_lost(error) else DAMAGED
        return Damage(file, f"cannot be read ({why})", unreadable=True, kind=kind)

    def __str__(self) -> str:
        where = f" bytes {self.first:,} to {self.last - 1:,}" if self.last else ""
        return printable(f"{self.file}:{where} {self.reason}")


class HashingStream:
    """Stream that hashes the bytes written to another stream.

    Small writes are joined, since torch writes an archive of one tensor in about forty writes.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._hash = stream, xxh3_128()
        self._bytes, self._blocks = 0, []
        self._waiting = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(self._waiting) + len(view) > _JOINED_BYTES:
            self._write_waiting()
        if len(view) < _JOINED_BYTES:
            self._waiting += view
        else:
            self._write(view)
        return len(view)

    def _write(self, view: memoryview) -> None:
        self._stream.write(view)
        rest = view
        # A write may end in the middle of a block, or span several.
        while len(rest):
            room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part, rest = rest[:room], rest[room:]
            self._hash.update(part)
            self._bytes += len(part)
            if self._bytes % BLOCK_BYTES == 0:
                self._end_block()

    def tell(self) -> int:
        return self._bytes + len(self._waiting)

    def flush(self) -> None:
        self._write_waiting()
        self._stream.flush()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        self._write(memoryview(waiting))

    def close(self) -> None:
        """Do nothing: the stream underneath belongs to the caller who opened it."""

    def entry(self) -> FileEntry:
        """Return the manifest's entry. Call it once, after the last write."""
        self._write_waiting()
        if self._bytes % BLOCK_BYTES:
            self._end_block()
        return FileEntry(self._bytes, self._blocks)

    def _end_block(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        self._hash.reset()


def render(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.json, with its hash."""
    # Steps without versions have no such fields.
    return _sealed({k: v for k, v in asdict(manifest).items() if k != "hash" and v != ""})


def _sealed(body: dict[str, Any]) -> bytes:
    """Return the bytes of these fields with their hash."""
    digest = xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"hash": digest}, indent=1, sort_keys=True) + "\n").encode()


def write_manifest(
    folder: Location, entries: dict[str, FileEntry], *, step: int, torch: str = ""
) -> None:
    """Write the manifest of a step with these files, which this version of torch has written."""
    manifest = Manifest(step, entries, titan=__version__, torch=torch)
    storage_of(folder).write(join(folder, NAME), render(manifest))


def read_manifest(folder: Location) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        OSError: the file is missing, or cannot be read.
        InputError: the file is not as it was written, or a newer titan wrote it.
    """
    where = join(folder, NAME)
    text = read_file(where)
    require_known(text, file=where, is_first=False)
    body = parse_json(text, dict[str, Any], name=where, values=_MAX_VALUES)
    is_whole = bool(body.pop("hash", "")) and _sealed(body) == text
    manifest = None
    with suppress(InputError):
        manifest = parse_json(text, Manifest, name=where, values=_MAX_VALUES)
    if is_whole and (manifest is None or render(manifest) != text):
        # Fields that this titan does not write are no damage.
        raise newer(where, "with other fields")
    # Require the right hash, names without a path, and the right number of blocks for each size.
    if not (is_whole and manifest and manifest.block_bytes == BLOCK_BYTES) or not all(
        is_plain_name(name) and len(entry.blocks) == ceil(entry.bytes / BLOCK_BYTES)
        for name, entry in manifest.files.items()
    ):
        raise InputError(f"{where}: is not what was saved")
    return manifest


def list_steps(folder: Location) -> list[int]:
    """Return the steps with a committed checkpoint in a folder, oldest first.

    Raises:
        CheckpointError: the folder cannot be read now, which does not mean that it has no steps.
    """
    storage = storage_of(folder)
    # A local step is committed by its name, so a step without a manifest is listed, and then refused as damaged.
    marks = (NAME, METADATA) if storage.has_rename else (NAME,)
    try:
        return sorted(
            int(name.removeprefix("step-"))
            for name in storage.listdir(folder)
            if re.fullmatch(r"step-\d+", name)
            and any(storage.exists(join(join(folder, name), mark)) for mark in marks)
        )
    except OSError as error:
        raise unreadable(folder, error) from error


def find_damage(folder: Location, *, part: int = 0, parts: int = 1) -> list[Damage]:
    """Find the damage of a checkpoint.

    Args:
        folder: the step's folder.
        part: number of this rank's share of the blocks. It checks blocks `part`, `part` + `parts`, ...
        parts: number of ranks that share the check.
    """
    try:
        manifest = read_manifest(folder)
    except OSError as error:
        return [Damage.of(NAME, error)]
    except CheckpointError as error:
        return [_explain(folder, NAME, error)]
    except InputError:
        return [Damage(NAME, "is not what was saved")]
    name = name_of(folder)
    if name.startswith("step-") and name != f"step-{manifest.step}":
        return [Damage(NAME, f"belongs to step {manifest.step}")]
    damages, number = list[Damage](), 0
    # Blocks are numbered through all files, and dealt to the ranks by number.
    for file, entry in sorted(manifest.files.items()):
        num_blocks = max(len(entry.blocks), 1)  # some rank must check the size of an empty file
        mine = [i for i in range(num_blocks) if (number + i) % parts == part]
        number += num_blocks
        if mine:
            damages += _check_file(join(folder, file), entry, mine)
    if part == 0:
        for file in (TITAN_JSON, tensor_index.NAME):
            damages += _find_newer(folder, file)
        # One rank checks the index, which is a single small file.
        if tensor_index.NAME not in {damage.file for damage in damages}:
            try:
                tensor_index.read_index(folder, manifest.sizes)
            except CheckpointError as error:
                damages.append(_explain(folder, tensor_index.NAME, error))
    return damages


def _find_newer(folder: Location, file: str) -> Iterator[Damage]:
    """Yield the file if it is of a newer titan. A missing or unreadable file is found by the check of its bytes."""
    location = join(folder, file)

    def read() -> bytes:
        with storage_of(location).open(location, "rb") as stream:
            return stream.read(_HEAD_BYTES)

    try:
        require_known(retry(read), file=location)
    except CheckpointError as error:
        yield _explain(folder, file, error)
    except OSError:
        pass


def _explain(folder: Location, file: str, error: CheckpointError) -> Damage:
    reason = str(error).removeprefix(f"{join(folder, file)}: ")
    return Damage(file, reason, kind=error.kind)


def _check_file(location: Location, entry: FileEntry, blocks: list[int]) -> Iterator[Damage]:
    file, storage = name_of(location), storage_of(location)

    def block(stream: IO[bytes], number: int) -> bytes:
        stream.seek(number * BLOCK_BYTES)
        return stream.read(BLOCK_BYTES)

    try:
        if (size := storage.size(location)) != entry.bytes:
            # The blocks of a file with another size cannot be compared.
            reason = f"has {size:,} bytes, not the {entry.bytes:,} that were saved"
            yield Damage(file, reason)
            return
        with retry(lambda: storage.open(location, "rb")) as stream:
            for number in blocks if entry.blocks else []:
                first = number * BLOCK_BYTES
                data = retry(partial(block, stream, number))
                if xxh3_128(data).hexdigest() != entry.blocks[number]:
                    last = min(first + BLOCK_BYTES, entry.bytes)
                    yield Damage(file, "are not what was saved", first, last)
    except OSError as error:
        yield Damage.of(file, error)


def file_sizes(folder: Location) -> Mapping[str, int]:
    """Return the sizes of a checkpoint's files: from its manifest or, without a usable manifest, from the files themselves.

    Raises:
        CheckpointError: the manifest cannot be read now, or is of a newer titan.
    """
    try:
        return read_manifest(folder).sizes
    except OSError as error:
        if is_lost(error):
            raise unreadable(join(folder, NAME), error) from error
    except CheckpointError:
        raise
    except InputError:
        pass
    # Only with checkpoint.verify = "off": find_damage reports it.
    storage = storage_of(folder)
    return {name: storage.size(join(folder, name)) for name in storage.listdir(folder)}


def describe(damages: Iterable[Damage]) -> str:
    """Return the first three damages in one line, and the number of the others."""
    texts = list(dict.fromkeys(map(str, sorted(damages))))
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
