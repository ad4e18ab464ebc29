"""Reading DCP's .metadata, which is a pickle, without running anything it says.

A pickle names classes and functions for the reader to look up and call. Here names are looked up in a table, exactly (a
dotted name such as `os.mkdir` in an allowed module is just another name that is not in it), and the table holds no code of
torch's: what the pickle builds are records of names and values, out of which the metadata is then made anew, checked value by
value. Two more ways out are closed: entries that torch would unpickle (titan stores tensors only), and file names
that lead out of the folder. The tensors themselves are read by torch.load(weights_only=True).
"""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from titan.checkpoint import CheckpointError

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_METADATA, _FILESYSTEM = metadata.__name__, filesystem.__name__
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _Record:
    """An object that a pickle describes: the values given to it, and nothing that could run."""

    def __new__(cls, *args: Any) -> _Record:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, kind: type) -> Any:
        value = self.state[name]
        if type(value) is not kind:
            raise TypeError(f"{name} is {value!r:.40}, not of type {kind.__name__}")
        return value


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        # Classes of this one reading: a pickle may set attributes of what it is given.
        self._table: dict[tuple[str, str], Any] = {
            key: type(key[1], (_Record,), {"__module__": __name__}) for key in _RECORDS
        }
        self._table[("torch", "Size")] = tuple
        self._table |= {("torch", name): dtype for name, dtype in _DTYPES.items()}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def read_metadata(stream: IO[bytes], *, name: str) -> metadata.Metadata:
    """The metadata in a stream. Raises CheckpointError, with `name` of the file, for anything but tensors' metadata."""
    try:
        return _metadata(_Unpickler(stream).load())
    except Exception as error:  # what a damaged pickle raises knows no bounds
        raise CheckpointError(f"{name} is refused: {str(error) or type(error).__name__}") from error


def _metadata(found: Any) -> metadata.Metadata:
    _expect(found, "Metadata")
    tensors = {_text(k): _tensor(k, v) for k, v in found.get("state_dict_metadata", dict).items()}
    storage = {_index(k): _storage(v) for k, v in found.get("storage_data", dict).items()}
    return metadata.Metadata(
        state_dict_metadata=tensors,  # pyright: ignore[reportArgumentType]
        storage_data=storage,
        storage_meta=metadata.StorageMeta(),
    )


def _tensor(name: str, found: Any) -> metadata.TensorStorageMetadata:
    if type(found).__name__ == "BytesStorageMetadata":
        raise ValueError(f'"{name}" is a pickled object, and titan reads tensors only')
    _expect(found, "TensorStorageMetadata")
    dtype = _expect(found.state["properties"], "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r:.40} is no dtype")
    chunks = []
    for chunk in found.get("chunks", list):
        _expect(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
        chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
    properties = metadata.TensorProperties(dtype=dtype)
    return metadata.TensorStorageMetadata(properties, _size(found.state["size"]), chunks)


def _index(found: Any) -> metadata.MetadataIndex:
    state = _expect(found, "MetadataIndex").state
    offset, index = state.get("offset"), state.get("index")
    if index is not None and type(index) is not int:
        raise TypeError(f"index {index!r:.40}")
    return metadata.MetadataIndex(
        found.get("fqn", str), None if offset is None else _size(offset), index
    )


def _storage(found: Any) -> Any:
    _expect(found, "_StorageInfo")
    path = found.get("relative_path", str)
    if not path or path in (".", "..") or "/" in path or "\\" in path:
        raise ValueError(f'it refers to the file "{path:.80}", outside of the checkpoint')
    return filesystem._StorageInfo(path, found.get("offset", int), found.get("length", int))


def _expect(found: Any, name: str) -> _Record:
    if not isinstance(found, _Record) or type(found).__name__ != name or found.state is None:
        raise TypeError(f"{found!r:.40} is no {name}")
    return found


def _size(found: Any) -> torch.Size:
    if type(found) is not tuple or not all(type(n) is int and n >= 0 for n in found):
        raise TypeError(f"{found!r:.40} is no size")
    return torch.Size(found)


def _text(found: Any) -> str:
    if type(found) is not str:
        raise TypeError(f"{found!r:.40} is no name")
    return found
