"""Tensors in and out of a checkpoint's folder: DCP's reader and writer, on our files.

What the writer writes is hashed on its way; what the reader reads as metadata goes through safe.py, and each tensor is looked
at before torch reads it.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titan.checkpoint import CheckpointError
from titan.checkpoint.manifest import Entry, HashingStream, read_layout
from titan.checkpoint.storage import Location, die_at, join, name_of, storage_of

StateDict = dict[str, Tensor]
_DIRECTORY_BYTES = 2**16  # at the end of an archive: torch's has four entries or so
# That a single process saves and loads alone is no news. For good: a background thread cannot do so for a moment.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class _Folder(FileSystem):
    """DCP's view of one folder. Paths are strings, since a Path would spoil a URL."""

    def __init__(self, location: Location) -> None:
        self.location, self.files = location, storage_of(location)
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        # The metadata needs no temporary name of its own: nothing in this folder counts before its manifest.
        name = name_of(os.fspath(path)).removesuffix(".tmp")
        with self.files.open(join(self.location, name), mode) as stream:
            if mode == "rb":
                yield stream
                return
            hashing = HashingStream(stream)
            try:
                yield hashing
            except RuntimeError as error:
                # torch's zip writer, cut short by a full disk, ends with an error of its own.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            die_at("unsynced", self.location)
            self.files.fsync(stream)
            self.entries[name] = hashing.entry()

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        self.files.make_folder(self.location)

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # the folder is fresh

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """See create_stream."""


class Writer(dcp.FileSystemWriter):
    """Writes into a fresh folder; `entries` are then the manifest's, of the files that this rank has written."""

    def __init__(self, location: Location, state: StateDict) -> None:
        super().__init__(str(location), sync_files=False)  # ours are, as they are closed
        if all(value.device.type == "cpu" for value in state.values()):
            # Copying ahead from the device would wait for its default stream, which is training's.
            self.per_thread_copy_ahead = 0
        self.fs = self.folder = _Folder(location)
        self.path = str(location)

    @property
    def entries(self) -> dict[str, Entry]:
        return self.folder.entries


class Reader(dcp.FileSystemReader):
    """Reads tensors, and never runs what a file says."""

    def __init__(self, location: Location, metadata: Metadata | None = None) -> None:
        super().__init__(str(location))
        self.fs = self.folder = _Folder(location)
        self.path = str(location)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata or read_metadata(self.folder.location)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """The bytes of a chunk, which torch.load reads next: a small archive must not become a large tensor."""
        part = super()._slice_file(file, sinfo)
        part.seek(max(sinfo.length - _DIRECTORY_BYTES, 0))
        try:
            with zipfile.ZipFile(io.BytesIO(part.read(_DIRECTORY_BYTES))) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{sinfo.relative_path}: no tensor of torch: {error}") from error
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > sinfo.length:
            raise CheckpointError(f"{sinfo.relative_path}: holds a compressed tensor")
        part.seek(0)
        return part


def read_metadata(location: Location) -> Metadata:
    """DCP's metadata of a checkpoint."""
    layout = read_layout(location)
    tensors: Any = {}
    for name, stored in layout.tensors.items():
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{location}: {name} is {stored.dtype}, which this torch lacks")
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in stored.chunks]
        properties = TensorProperties(dtype=dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.size), chunks)
    places = {
        MetadataIndex(name, None if offset is None else torch.Size(offset), index): _StorageInfo(*p)
        for (name, offset, index), p in layout.places.items()
    }
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def stored_shapes(location: Location) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a checkpoint."""
    return _shapes(read_metadata(location))


def _shapes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    entries: Any = metadata.state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def load(location: Location, state: StateDict) -> None:
    """Fill the tensors of `state`, whatever their layout, from a checkpoint; all ranks call this together.

    Raises CheckpointError naming the tensors that are missing or have another shape, or saying why files are refused.
    """
    metadata = read_metadata(location)
    stored = _shapes(metadata)
    missing = [name for name in state if name not in stored]
    if missing:
        raise CheckpointError(
            f"{location} lacks {_some(missing)}: saved from another model or optimizer?",
            kind="checkpoint_differs",
        )
    other = [
        f"{k} {tuple(stored[k][0])} (wanted {tuple(v.shape)})"
        for k, v in state.items()
        if stored[k][0] != v.shape
    ]
    if other:
        raise CheckpointError(
            f"{location} holds other shapes: {_some(other)}: saved from another model?",
            kind="checkpoint_differs",
        )
    try:
        dcp.load(
            state, storage_reader=Reader(location, metadata), no_dist=not dist.is_initialized()
        )
    except dcp.CheckpointException as error:  # a BaseException
        raise CheckpointError(f"{location} cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Why it failed, in a line; of DCP's exception, the first rank's own reason."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(cause)}"
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
