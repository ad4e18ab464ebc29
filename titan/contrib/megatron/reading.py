"""Reader of Megatron's torch_dist checkpoints. Megatron is not needed, and nothing that a file says is run.

    latest_checkpointed_iteration.txt
    iter_0001000/metadata.json    {"sharded_backend": "torch_dist", ...}
    iter_0001000/.metadata        a pickle of DCP's index: the tensors, and the file and bytes of each of their chunks
    iter_0001000/common.pt        arguments, iteration and parameter groups; newer folders keep them beside the tensors
    iter_0001000/__0_0.distcp     chunks of tensors

Both pickles name classes. Classes of DCP's index are bound to DCP's own dataclasses, and any other name to `Unread`,
which keeps the values and does nothing.

    decoder.layers.self_attention.linear_proj.weight      (L, D, H K)   layers are stacked (before Megatron-Core 0.15)
    decoder.layers.7.self_attention.linear_proj.weight    (D, H K)      and are listed here by their numbers, in both forms
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titan.base.untrusted import open_regular, parse_json, printable, read_json
from titan.checkpoint import CheckpointError, tensor_index
from titan.checkpoint.storage import read_file
from titan.checkpoint.tensor_index import StoredTensor, TensorIndex
from titan.checkpoint.tensors import CheckpointReader, index_of, metadata_of, reason

_MAX_BYTES = 2**30
_COMMON = "common_state/shard_0_1"
_STACKED = re.compile(r"(.*\bdecoder\.layers\.)(\D.*)")


class Unread:
    """Object of a class that is not imported, such as an enum of Megatron. It has the fields of the original."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.values = values
        self.__dict__.update(fields)

    def __repr__(self) -> str:
        return printable(str(self.__dict__), 60)


# Data of DCP's index. Their constructors keep values, and do nothing else.
_KNOWN: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
        TensorProperties,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        StorageMeta,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
        OrderedDict,
    )
}


class _Index(pickle.Unpickler):
    """Unpickler of .metadata."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        return _KNOWN.get(name, Unread)


@dataclass
class MegatronTensor:
    """A tensor of a checkpoint.

    Attributes:
        stored: its chunks.
        row: number of the layer in these chunks; None: the tensor is no stack.
        whole: shape of a tensor that is stored by flattened shards, or None.
    """

    stored: StoredTensor
    row: int | None = None
    whole: tuple[int, ...] | None = None


@dataclass
class MegatronFolder:
    """A checkpoint of Megatron.

    Attributes:
        path: the folder iter_N.
        common: what is the same on all ranks.
        entries: tensors by their names, with the numbers of layers.
        others: names of entries that are no tensors.
        hashes: SHA-256 of each tensor that was read, by name.
    """

    path: Path
    common: dict[str, Any]
    entries: dict[str, MegatronTensor]
    others: list[str]
    hashes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Three parameters are read from one tensor in a row: queries, keys and values.
        self.read = lru_cache(maxsize=2)(self._read)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the run that wrote the checkpoint."""
        found = self.common.get("args")
        # Where Megatron is installed and imported, torch knows the class.
        if not isinstance(found, Unread | Namespace):
            raise CheckpointError(f"{self.path}: holds no arguments of a run (args)")
        return vars(found)

    @property
    def files(self) -> dict[str, Path]:
        """Return the file of each chunk."""
        return {
            f"{name} {number}": self.path / chunk.file
            for name, entry in self.entries.items()
            for number, chunk in enumerate(entry.stored.chunks)
        }

    def _read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: its file is damaged.
        """
        entry = self.entries[name]
        metadata = metadata_of(TensorIndex({name: entry.stored}), self.path)
        # metadata_of has checked the dtype.
        tensor = torch.empty(entry.stored.size, dtype=getattr(torch, entry.stored.dtype))
        try:
            reader = CheckpointReader(self.path, metadata)
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
            self.hashes[name] = digest(tensor)
            if entry.whole is not None:
                tensor = _unflattened(tensor, entry.whole)
        # A damaged file may raise any error, and DCP's is no Exception.
        except (dcp.CheckpointException, Exception) as error:
            why = printable(reason(error), 200)
            raise CheckpointError(f"{self.path}: {name} cannot be read: {why}") from error
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{self.path}: {name} is {entry.stored.dtype}, which is not read"
            )
        return tensor if entry.row is None else tensor[entry.row]


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _unflattened(tensor: Tensor, whole: tuple[int, ...]) -> Tensor:
    """Return a tensor in its shape. A grid of shards, such as (2, 1), is stored as (2, 1, elements of a shard)."""
    grid = tensor.shape[:-1]
    shard = [size // parts for size, parts in zip(whole, grid, strict=True)]
    order: list[int] = []
    for axis in range(len(grid)):
        order += [axis, len(grid) + axis]
    return tensor.view(*grid, *shard).permute(order).reshape(whole)


def open_folder(path: Path) -> MegatronFolder:
    """Open a checkpoint.

    Args:
        path: a folder iter_N, or the run's folder, which stands for its newest checkpoint.

    Raises:
        CheckpointError: it cannot be read. The message says why.
    """
    folder = _newest(path)
    found = read_json(folder / "metadata.json", dict[str, Any])
    if (backend := found.get("sharded_backend")) != "torch_dist":
        raise CheckpointError(
            f"{folder}: its format is {printable(str(backend), 40)}; titan reads torch_dist. In Megatron, load it and save it "
            "with --ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    metadata, entries = _read_index(folder, sizes)
    others = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if not isinstance(entry, TensorStorageMetadata)
    ]
    infos = {key.fqn: info for key, info in metadata.storage_data.items()}
    if "common.pt" in sizes:
        common = _read_objects(folder, "common.pt", 0, sizes["common.pt"])
    elif _COMMON in infos:
        info = infos[_COMMON]
        (common,) = _read_objects(folder, info.relative_path, info.offset, info.length)
    else:
        raise CheckpointError(f"{folder / 'common.pt'}: missing; it has the run's arguments")
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder}: its common state is no dictionary")
    return MegatronFolder(folder, common, entries, others)


def _newest(path: Path) -> Path:
    """Return the folder iter_N that a path means."""
    newest = path / "latest_checkpointed_iteration.txt"
    folder = path
    if newest.is_file():
        text = read_file(newest, limit=100).decode(errors="replace").strip()
        folder = path / (f"iter_{int(text):07}" if text.isdecimal() else "release")
    if legacy := sorted(folder.glob("mp_rank_*")):
        raise CheckpointError(
            f"{legacy[0]}: a legacy checkpoint, a pickle of one rank. In Megatron, load it and save it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder}: no checkpoint of Megatron: it has no .metadata")
    return folder


def _read_index(
    folder: Path, sizes: dict[str, int]
) -> tuple[Metadata, dict[str, MegatronTensor]]:
    """Return DCP's index, and its checked form of the tensors."""
    where = folder / ".metadata"
    data = read_file(where, limit=_MAX_BYTES)
    try:
        metadata = _Index(io.BytesIO(data)).load()
        tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        # The values of a pickle may be of any type, so the index is read again as JSON is.
        text = tensor_index.render(index_of(Metadata({**tensors}), metadata.storage_data))
        index = parse_json(text, TensorIndex, name=where, values=len(text))
        for name, tensor in index.tensors.items():
            if problem := tensor_index.problem_of(tensor, sizes):
                raise ValueError(f"{name} {problem}")
        # Chunks that share bytes could make tensors of any size.
        used = sum(chunk.num_bytes for of in index.tensors.values() for chunk in of.chunks)
        if used > sum(sizes.values()):
            raise ValueError(f"its tensors take {used:,} bytes, more than the files")
        return metadata, dict(_by_layer(index, metadata))
    # A damaged pickle may raise any error.
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"{where}: damaged: {why}") from error


def _by_layer(index: TensorIndex, metadata: Metadata) -> Iterator[tuple[str, MegatronTensor]]:
    """Yield the tensors with the numbers of their layers."""
    flattened = getattr(metadata, "mcore_data", {})
    for full_name, tensor in index.tensors.items():
        name = re.sub(r"^chained_\d+\.", "", full_name)
        whole = flattened.get(full_name, {}).get("nd_reformulated_orig_global_shape")
        whole = tuple(whole) if whole else None
        stacked = _STACKED.fullmatch(name)
        if stacked is None or not tensor.chunks:
            yield name, MegatronTensor(tensor, whole=whole)
            continue
        # Of stacks that were saved as wholes, each layer is read with all others.
        is_split = all(chunk.sizes[0] == 1 for chunk in tensor.chunks)
        rows = defaultdict(list)
        for chunk in tensor.chunks:
            rows[chunk.offsets[0]].append(chunk._replace(offsets=(0, *chunk.offsets[1:])))
        for layer in range(tensor.size[0]):
            full = f"{stacked[1]}{layer}.{stacked[2]}"
            if is_split:
                row = StoredTensor(tensor.dtype, (1, *tensor.size[1:]), rows[layer])
                yield full, MegatronTensor(row, row=0, whole=whole and (1, *whole[1:]))
            else:
                yield full, MegatronTensor(tensor, row=layer, whole=whole)


def _read_objects(folder: Path, file: str, first: int, num_bytes: int) -> Any:
    """Return plain values that torch saved in a part of a file. Objects of other classes become `Unread`."""
    where = folder / file
    try:
        reader = CheckpointReader(folder, Metadata({}))
        with open_regular(where) as stream:
            info = _StorageInfo(file, first, num_bytes)
            data = reader._slice_file(stream, info).read()
        part = io.BytesIO(data)
        names: list[Any] = torch.serialization.get_unsafe_globals_in_checkpoint(part)
        part.seek(0)
        with torch.serialization.safe_globals([(Unread, name) for name in names]):
            return torch.load(part, weights_only=True, map_location="cpu")
    # A damaged file may raise any error.
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error}".partition("\n")[0], 200)
        raise CheckpointError(f"{where}: damaged: {why}") from error
