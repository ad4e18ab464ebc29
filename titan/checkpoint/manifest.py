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
from dataclasses import asdict, dataclass
from math import ceil
from typing import IO, Any

from xxhash import xxh3_128

from titan.checkpoint import tensor_index
from titan.checkpoint.storage import Location, join, name_of, storage_of
from titan.untrusted import Count, InputError, is_plain_name, parse_json, printable, read_stream

NAME, TITAN_JSON = "manifest.json", "titan.json"
# DCP's index. It is the only mark of steps that titan wrote before it wrote manifests.
METADATA = ".metadata"
BLOCK_BYTES = 16 * 2**20
_JOINED_BYTES = 2**20
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
    """

    step: Count
    files: dict[str, FileEntry]
    format: int = 1
    block_bytes: int = BLOCK_BYTES
    hash: str = ""

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
    """

    file: str
    reason: str
    first: int = 0
    last: int = 0
    unreadable: bool = False

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
    body = {name: value for name, value in asdict(manifest).items() if name != "hash"}
    digest = xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"hash": digest}, indent=1, sort_keys=True) + "\n").encode()


def write_manifest(folder: Location, entries: dict[str, FileEntry], *, step: int) -> None:
    """Write the manifest of a step with these files."""
    storage_of(folder).write(join(folder, NAME), render(Manifest(step, entries)))


def read_manifest(folder: Location) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        OSError: the file is missing, or cannot be read.
        InputError: the file is not as it was written.
    """
    storage, where = storage_of(folder), join(folder, NAME)
    with storage.open(where, "rb") as stream:
        text = read_stream(stream, storage.size(where), name=where)
    manifest = parse_json(text, Manifest, name=where, values=_MAX_VALUES)
    # Require names without a path, the right number of blocks for each size, and exactly the bytes that `render` writes.
    fits = all(
        is_plain_name(name) and len(entry.blocks) == ceil(entry.bytes / BLOCK_BYTES)
        for name, entry in manifest.files.items()
    )
    if not fits or manifest.block_bytes != BLOCK_BYTES or render(manifest) != text:
        raise InputError(f"{where}: is not what was saved")
    return manifest


def list_steps(folder: Location) -> list[int]:
    """Return the steps with a committed checkpoint in a folder, oldest first."""
    storage = storage_of(folder)
    # A local step is committed by its name, so a step without a manifest is listed, and then refused as damaged.
    marks = (NAME, METADATA) if storage.has_rename else (NAME,)
    return sorted(
        int(name.removeprefix("step-"))
        for name in storage.listdir(folder)
        if re.fullmatch(r"step-\d+", name)
        and any(storage.exists(join(join(folder, name), mark)) for mark in marks)
    )


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
        missing = isinstance(error, FileNotFoundError)
        why = "it is missing" if missing else error.strerror or error
        return [Damage(NAME, f"cannot be read ({why})", unreadable=True)]
    except InputError:
        return [Damage(NAME, "is not what was saved")]
    name = name_of(folder)
    if name.startswith("step-") and name != f"step-{manifest.step}":
        return [Damage(NAME, f"belongs to step {manifest.step}")]
    damages, number = [], 0
    # Blocks are numbered through all files, and dealt to the ranks by number.
    for file, entry in sorted(manifest.files.items()):
        num_blocks = max(len(entry.blocks), 1)  # some rank must check the size of an empty file
        mine = [i for i in range(num_blocks) if (number + i) % parts == part]
        number += num_blocks
        if mine:
            damages += _check_file(join(folder, file), entry, mine)
    # One rank checks the index, which is a single small file.
    if part == 0 and tensor_index.NAME not in {damage.file for damage in damages}:
        try:
            tensor_index.read_index(folder, manifest.sizes)
        except InputError as error:
            reason = str(error).removeprefix(f"{join(folder, tensor_index.NAME)}: ")
            damages.append(Damage(tensor_index.NAME, reason))
    return damages


def _check_file(location: Location, entry: FileEntry, blocks: list[int]) -> Iterator[Damage]:
    file, storage = name_of(location), storage_of(location)
    try:
        if (size := storage.size(location)) != entry.bytes:
            # The blocks of a file with another size cannot be compared.
            reason = f"has {size:,} bytes, not the {entry.bytes:,} that were saved"
            yield Damage(file, reason)
            return
        with storage.open(location, "rb") as stream:
            for number in blocks if entry.blocks else []:
                first = number * BLOCK_BYTES
                stream.seek(first)
                if xxh3_128(stream.read(BLOCK_BYTES)).hexdigest() != entry.blocks[number]:
                    last = min(first + BLOCK_BYTES, entry.bytes)
                    yield Damage(file, "are not what was saved", first, last)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or 'it is missing'})"
        yield Damage(file, reason, unreadable=True)


def file_sizes(folder: Location) -> Mapping[str, int]:
    """Return the sizes of a checkpoint's files: from its manifest or, without a usable manifest, from the files themselves."""
    try:
        return read_manifest(folder).sizes
    except (OSError, InputError):  # only with checkpoint.verify = "off": find_damage reports it
        storage = storage_of(folder)
        return {name: storage.size(join(folder, name)) for name in storage.listdir(folder)}


def describe(damages: Iterable[Damage]) -> str:
    """Return the first three damages in one line, and the number of the others."""
    texts = list(dict.fromkeys(map(str, sorted(damages))))
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
