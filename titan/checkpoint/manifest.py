"""manifest.json: what a checkpoint's files must hold to the bit, and what is wrong with them if they do not.

A file is hashed in blocks of 16 MiB (xxh3, 128 bits), while it is written: so the hash is of what was meant, not of what
the disk gave back, and later a damaged block can be told from its neighbours, and blocks be shared out over ranks. The
manifest holds a hash of itself, and only one spelling of it is accepted. It guards against accidents, not against people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import IO, Any

from xxhash import xxh3_128

from titan.checkpoint import CheckpointError, safe
from titan.checkpoint.storage import Location, join, name_of, storage_of
from titan.untrusted import Count, InputError, is_plain_name, parse_json, printable, read_stream

NAME = "manifest.json"
METADATA = ".metadata"  # DCP's; all that marks the steps of titan's first days
BLOCK_BYTES = 16 * 2**20
_MAX_VALUES = 1_000_000  # of a manifest: the blocks of 16 TB
Entry = dict[str, Any]  # of a file: {"bytes": its size, "blocks": [a hash for each block]}


@dataclass(frozen=True)
class _Entry:
    bytes: Count
    blocks: list[str]


@dataclass(frozen=True)
class _Manifest:
    format: int
    step: Count
    block_bytes: int
    files: dict[str, _Entry]
    hash: str


@dataclass(frozen=True, order=True)
class Damage:
    """What is wrong with a file; with its bytes from `first` up to `last`, if that is known."""

    file: str
    reason: str
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        where = f" bytes {self.first:,} to {self.last - 1:,}" if self.last else ""
        return printable(f"{self.file}:{where} {self.reason}")


class HashingStream:
    """Writes to a stream and hashes what it writes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._hash = stream, xxh3_128()
        self._bytes, self._blocks = 0, []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        rest = view
        while len(rest):
            room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part, rest = rest[:room], rest[room:]
            self._hash.update(part)
            self._bytes += len(part)
            if self._bytes % BLOCK_BYTES == 0:
                self._end_block()
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Whoever opened the stream underneath closes it."""

    def entry(self) -> Entry:
        """After the last write."""
        if self._bytes % BLOCK_BYTES:
            self._end_block()
        return {"bytes": self._bytes, "blocks": self._blocks}

    def _end_block(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        self._hash.reset()


def render(content: dict[str, Any]) -> bytes:
    """A manifest's bytes; `content` without its hash."""
    body = {name: value for name, value in content.items() if name != "hash"}
    digest = xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"hash": digest}, indent=1, sort_keys=True) + "\n").encode()


def write_manifest(folder: Location, entries: dict[str, Entry], *, step: int) -> None:
    content = {"format": 1, "step": step, "block_bytes": BLOCK_BYTES, "files": entries}
    storage_of(folder).write(join(folder, NAME), render(content))


def list_steps(folder: Location) -> list[int]:
    """Steps with a committed checkpoint in a folder, oldest first."""
    files = storage_of(folder)
    # Local steps are committed by their name; what titan wrote before it wrote manifests is to be found, and refused.
    marks = (NAME, METADATA) if files.has_rename else (NAME,)
    found = []
    for name in files.listdir(folder):
        step = join(folder, name)
        match = re.fullmatch(r"step-(\d+)", name)
        if match and any(files.exists(join(step, mark)) for mark in marks):
            found.append(int(match[1]))
    return sorted(found)


def find_damage(folder: Location, *, part: int = 0, parts: int = 1) -> list[Damage]:
    """What is wrong with a checkpoint; of its blocks, looks only at each `parts`-th, so that ranks share the work."""
    try:
        manifest = _read(folder)
    except FileNotFoundError:
        return [Damage(NAME, "cannot be read (it is missing)")]
    except OSError as error:
        return [Damage(NAME, f"cannot be read ({error.strerror or error})")]
    except InputError:
        return [Damage(NAME, "is not what was saved")]
    name = name_of(folder)
    if name.startswith("step-") and name != f"step-{manifest.step}":
        return [Damage(NAME, f"belongs to step {manifest.step}")]
    found, number = [], 0
    for file, entry in sorted(manifest.files.items()):
        blocks = entry.blocks or [None]  # an empty file still has a size
        mine = [i for i in range(len(blocks)) if (number + i) % parts == part]
        number += len(blocks)
        if mine:
            found += _check_file(join(folder, file), file, asdict(entry), mine)
    if part == 0 and METADATA not in {damage.file for damage in found}:
        try:
            read_layout(folder, _sizes(manifest))
        except InputError as error:
            found.append(Damage(METADATA, str(error).removeprefix(f"{join(folder, METADATA)} ")))
    return found


def read_layout(folder: Location, sizes: dict[str, int] | None = None) -> safe.Layout:
    """Read which tensors a checkpoint holds, and where. Raises CheckpointError where they are not whole, or lie in other
    files than the manifest's (`sizes`, which is read if it is not given; without one, the files in the folder)."""
    files, name = storage_of(folder), str(join(folder, METADATA))
    try:
        if sizes is None:
            sizes = _sizes_of(folder)
        total = sum(size for file, size in sizes.items() if file != METADATA)
        with files.open(join(folder, METADATA), "rb") as stream:
            # A chunk takes more space in its file than here.
            if (size := files.size(join(folder, METADATA))) > min(2**20 + total, safe.MAX_BYTES):
                raise CheckpointError(f"{name} is refused: {size:,} bytes are too many")
            layout = safe.read_metadata(stream, name=name)
        safe.check_files(layout, sizes)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: {name}: {error.strerror or 'it is missing'}"
        ) from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{name} is refused: {error}") from error
    return layout


def _read(folder: Location) -> _Manifest:
    files, where = storage_of(folder), join(folder, NAME)
    with files.open(where, "rb") as stream:
        text = read_stream(stream, files.size(where), name=where)
    manifest = parse_json(text, _Manifest, name=where, values=_MAX_VALUES)
    fits = all(
        is_plain_name(name) and len(entry.blocks) == ceil(entry.bytes / BLOCK_BYTES)
        for name, entry in manifest.files.items()
    )
    if not fits or manifest.block_bytes != BLOCK_BYTES or render(asdict(manifest)) != text:
        raise InputError(f"{where}: is not what was saved")
    return manifest


def _sizes(manifest: _Manifest) -> dict[str, int]:
    return {name: entry.bytes for name, entry in manifest.files.items()}


def _sizes_of(folder: Location) -> dict[str, int]:
    """Sizes of a checkpoint's files: by its manifest or, where there is none that can be read, as they lie there."""
    try:
        return _sizes(_read(folder))
    except (OSError, InputError):  # a run that verifies does not come here
        files = storage_of(folder)
        return {name: files.size(join(folder, name)) for name in files.listdir(folder)}


def _check_file(location: Location, file: str, entry: Entry, blocks: list[int]) -> list[Damage]:
    files, expected = storage_of(location), entry["bytes"]
    try:
        size = files.size(location)
        if size != expected:
            return [Damage(file, f"has {size:,} bytes, not the {expected:,} that were saved")]
        with files.open(location, "rb") as stream:
            return list(_check_blocks(stream, file, entry, blocks))
    except OSError as error:
        return [Damage(file, f"cannot be read ({error.strerror or 'it is missing'})")]


def _check_blocks(
    stream: IO[bytes], file: str, entry: Entry, blocks: list[int]
) -> Iterator[Damage]:
    for number in blocks if entry["blocks"] else []:
        first = number * BLOCK_BYTES
        stream.seek(first)
        data = stream.read(BLOCK_BYTES)
        if xxh3_128(data).hexdigest() != entry["blocks"][number]:
            last = min(first + BLOCK_BYTES, entry["bytes"])
            yield Damage(file, "are not what was saved", first, last)


def describe(damages: Iterable[Damage]) -> str:
    """In a line."""
    texts = list(dict.fromkeys(map(str, sorted(damages))))
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def as_json(damages: Iterable[Damage]) -> list[dict[str, Any]]:
    return [asdict(damage) for damage in sorted(damages)]
