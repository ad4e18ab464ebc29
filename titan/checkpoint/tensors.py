"""DCP's writer and reader of tensors, on our storage.

The writer hashes the bytes that it writes, and writes DCP's index of tensors as JSON too. The reader reads only the JSON, and
checks the archive around each tensor before torch reads it.
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

from titan.base.untrusted import is_lost, retry
from titan.checkpoint import CheckpointError, tensor_index
from titan.checkpoint.formats import DAMAGED, LOST
from titan.checkpoint.manifest import FileEntry, HashingStream, file_sizes
from titan.checkpoint.storage import Location, join, name_of, storage_of
from titan.checkpoint.tensor_index import Chunk, StoredTensor, TensorIndex

StateDict = dict[str, Tensor]
# Bytes at the end of a zip archive that list its entries. torch's archive of one tensor has about four entries.
_DIRECTORY_BYTES = 2**16
_BUFFER_BYTES = 2**20
# DCP warns each time a single process saves or loads alone. The filter is permanent, because filters are not thread-safe: a save
# in the background cannot set a filter for a moment.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class _Folder(FileSystem):
    """DCP's view of one folder in our storage. Paths are strings, because a Path would spoil a URL."""

    def __init__(self, location: Location) -> None:
        self.location, self.storage = location, storage_of(location)
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        # DCP gives its metadata a temporary name, which is not needed: the manifest comes last, and commits the folder.
        name = name_of(os.fspath(path)).removesuffix(".tmp")
        with self.storage.open(join(self.location, name), mode) as stream:
            if mode == "rb":
                yield stream
                return
            hashing = HashingStream(stream)
            try:
                yield hashing
                hashing.flush()
            except RuntimeError as error:
                # On a full disk, torch's zip writer stops and raises its own error. Raise the error of the disk instead.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            self.storage.fsync(stream)
            self.entries[name] = hashing.entry()

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        self.storage.make_folder(self.location)

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # the folder is new

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Do nothing: create_stream has already used the final name."""


class _End(io.BytesIO):
    """The end of a file, where positions are those in the whole file: zipfile refuses an archive whose positions are others."""

    def __init__(self, data: bytes, *, before: int) -> None:
        super().__init__(data)
        self.before = before

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        shift = self.before if whence == os.SEEK_SET else 0
        return super().seek(offset - shift, whence) + self.before

    def tell(self) -> int:
        return super().tell() + self.before


class CheckpointWriter(dcp.FileSystemWriter):
    """Writer of tensors into a new folder. It collects the manifest's entries of the files that this rank writes."""

    def __init__(self, location: Location, state: StateDict) -> None:
        super().__init__(str(location), sync_files=False)  # create_stream syncs them
        if all(value.device.type == "cpu" for value in state.values()):
            # DCP copies ahead on the device's default stream, which training uses, and would wait for it.
            self.per_thread_copy_ahead = 0
        # DCP uses the name `fs`, and our code uses `folder`.
        self.fs = self.folder = _Folder(location)
        self.path = str(location)

    @property
    def entries(self) -> dict[str, FileEntry]:
        """Return the manifest's entries of the files that this rank wrote."""
        return self.folder.entries

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file beside the tensors."""
        with self.folder.create_stream(name, "wb") as stream:
            stream.write(data)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write .metadata and tensors.json. DCP calls this on rank 0, with the results of all ranks."""
        super().finish(metadata, results)
        # DCP has just pickled the same values as the metadata's storage_data.
        infos = {write.index: write.storage_data for of_rank in results for write in of_rank}
        self.write_file(tensor_index.NAME, tensor_index.render(index_of(metadata, infos)))


def index_of(metadata: Metadata, infos: dict[MetadataIndex, _StorageInfo]) -> TensorIndex:
    """Convert DCP's metadata to an index.

    Args:
        metadata: tensors and their chunks.
        infos: place of each chunk on disk.
    """
    tensors = {}
    entries: dict[str, Any] = metadata.state_dict_metadata
    for name, entry in entries.items():
        chunks = []
        for chunk in entry.chunks:
            info = infos[MetadataIndex(name, chunk.offsets)]
            place = (info.relative_path, info.offset, info.length)
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place))
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(dtype, tuple(entry.size), chunks)
    return TensorIndex(tensors)


class CheckpointReader(dcp.FileSystemReader):
    """Reader of tensors that runs nothing that a file says."""

    def __init__(self, location: Location, metadata: Metadata) -> None:
        super().__init__(str(location))
        self.fs = self.folder = _Folder(location)
        self.path = str(location)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # The index was read as JSON and checked. DCP itself would unpickle .metadata.
        return self.metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """Return the bytes of a chunk, which torch.load(weights_only=True) reads next.

        The chunk's archive must not be compressed, because a small archive could then become a tensor of any size.
        """
        part = super()._slice_file(file, sinfo)
        if sinfo.length <= _BUFFER_BYTES:  # one read, in place of torch's twenty or so
            part = io.BytesIO(part.read(sinfo.length))
        # A zip's list of entries is at its end. Read only the end, not the tensor.
        part.seek(before := max(sinfo.length - _DIRECTORY_BYTES, 0))
        try:
            with zipfile.ZipFile(_End(part.read(_DIRECTORY_BYTES), before=before)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise CheckpointError(
                f"{sinfo.relative_path}: no tensor of torch: {error}"
            ) from error
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > sinfo.length:
            raise CheckpointError(f"{sinfo.relative_path}: holds a compressed tensor")
        part.seek(0)
        return part


def read_metadata(location: Location) -> Metadata:
    """Return a checkpoint's index as DCP's metadata.

    Raises:
        CheckpointError: the index is unusable.
    """
    return metadata_of(tensor_index.read_index(location, file_sizes(location)), location)


def metadata_of(index: TensorIndex, location: Location) -> Metadata:
    """Convert an index to DCP's metadata.

    Args:
        index: a checked index.
        location: folder of the step, for errors.

    Raises:
        CheckpointError: this torch lacks the dtype of a tensor.
    """
    tensors = {}
    infos: dict[MetadataIndex, _StorageInfo] = {}
    for name, stored in index.tensors.items():
        # The index has checked the spelling of the name, so this is no other attribute of torch.
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"{location}: {name} is {stored.dtype}, which this torch lacks"
            )
        chunks = []
        for chunk in stored.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            info = _StorageInfo(chunk.file, chunk.first, chunk.num_bytes)
            infos[MetadataIndex(name, offsets)] = info
        properties = TensorProperties(dtype=dtype)
        tensors[name] = TensorStorageMetadata(properties, torch.Size(stored.size), chunks)
    return Metadata(tensors, storage_data=infos, storage_meta=StorageMeta())


def stored_shapes(location: Location) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor in a checkpoint.

    Raises:
        CheckpointError: the index is unusable.
    """
    return _shapes(read_metadata(location))


def _shapes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    entries: Any = metadata.state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def require_shapes(location: Location, state: StateDict) -> Metadata:
    """Check that a checkpoint has tensors of the shapes of these. Return its metadata.

    Raises:
        CheckpointError: tensors are missing or have another shape. The message names them.
    """
    metadata = read_metadata(location)
    stored = _shapes(metadata)
    # Find differences before DCP reads, since DCP's message would be a traceback of all ranks.
    if missing := [name for name in state if name not in stored]:
        raise CheckpointError(
            f"{location} lacks {some(missing)}: saved from another model or optimizer, or with other parameters frozen?",
            kind="checkpoint_differs",
        )
    other = [
        f"{k} {tuple(stored[k][0])} (wanted {tuple(v.shape)})"
        for k, v in state.items()
        if stored[k][0] != v.shape
    ]
    if other:
        raise CheckpointError(
            f"{location} holds other shapes: {some(other)}: saved from another model?",
            kind="checkpoint_differs",
        )
    return metadata


def load(location: Location, state: StateDict) -> None:
    """Fill the tensors of `state`, in any layout, from a checkpoint. All ranks call this together.

    Args:
        location: folder of the step.
        state: tensors to fill, by name.

    Raises:
        CheckpointError: tensors are missing or have another shape, or a file is refused. The message names them.
    """
    metadata = require_shapes(location, state)
    cause, failure, is_gone = None, "", False

    def read() -> None:
        try:
            # DCP reads only the slices that this rank's placements need. Each rank plans alone, since it has the whole index.
            reader = CheckpointReader(location, metadata)
            dcp.load(state, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:  # a BaseException
            for part, _ in error.failures.values():
                if isinstance(part, OSError):
                    raise part from error
            raise

    try:
        retry(read)
    except (OSError, dcp.CheckpointException) as error:
        is_gone = isinstance(error, OSError) and is_lost(error)
        # DCP has planned for a single rank, which it calls rank 0.
        cause, failure = error, reason(error).removeprefix("rank 0: ")
    failures = [(failure, is_gone)]
    if dist.is_initialized():
        failures *= dist.get_world_size()
        dist.all_gather_object(failures, (failure, is_gone))
    for rank, (failure, is_gone) in enumerate(failures):
        if failure:
            text = f"{location} cannot be read: rank {rank}: {failure}"
            raise CheckpointError(text, kind=LOST if is_gone else DAMAGED) from cause


def reason(error: BaseException) -> str:
    """Return the cause of a failure in one line. For DCP's exception, it is the cause on the first rank that failed."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason(cause)}"
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def some(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
