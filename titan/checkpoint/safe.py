"""Read DCP's .metadata, which is a pickle, without running anything that it says, and check that it describes whole tensors.

A pickle names classes and functions for the reader to look up and call. Here only the operations that DCP writes are known,
names are looked up in a table exactly, and what they name is never called: the result are records of names and values, which
are then checked one by one. Keys are texts or records, whose hash costs nothing (nested tuples can take for ever to
hash, or to print). The tensors themselves are read by torch.load(weights_only=True), see tensors.py. Imports no torch.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import IO, Any

from titan.checkpoint import CheckpointError
from titan.untrusted import is_plain_name, printable

MAX_BYTES = 2**30
_MAX_STACK, _MAX_MARKS = 10_000, 100  # the pickler writes lists and tables in parts of 1,000
_MAX_NAME, _MAX_DIMS = 4096, 8
_MAX_FRAME = 2**20  # the pickler's have 64 KiB
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
_DTYPE = re.compile(r"(?:b?float|u?int|complex)(\d+)\w*|bool")

Size = tuple[int, ...]
Index = tuple[str, Size | None, int | None]  # a tensor's name, a chunk's offsets, its number


@dataclass(frozen=True)
class Stored:
    """A tensor. chunks: offsets and sizes of each."""

    dtype: str
    size: Size
    chunks: list[tuple[Size, Size]]


@dataclass(frozen=True)
class Layout:
    """What a .metadata says. places: file, first byte and number of bytes of each chunk."""

    tensors: dict[str, Stored]
    places: dict[Index, tuple[str, int, int]]


@dataclass(frozen=True)
class _Name:
    """A name of the table, or of a dtype; nothing that could be called."""

    text: str
    is_dtype: bool = False


@dataclass(eq=False)
class _Record:
    """An object that a pickle describes."""

    kind: str
    args: Any
    state: Any = None

    def get(self, name: str, kind: type) -> Any:
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if type(value) is not kind:
            raise TypeError(
                f"{name} of a {self.kind} is of type {type(value).__name__}, not {kind.__name__}"
            )
        return value


class _Unpickler(pickle._Unpickler):
    """Python's own, with the operations that DCP's pickles consist of."""

    # Of the base class, whose types are not published.
    stack: list[Any]
    metastack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    load_mark: Callable[[], None]
    pop_mark: Callable[[], list[Any]]
    _unframer: Any

    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) in _RECORDS:
            return _Name(name)
        if module == "torch" and _DTYPE.fullmatch(name):
            return _Name(name, is_dtype=True)
        raise pickle.UnpicklingError(f"it refers to {module[:80]}.{name[:80]}")

    def _push(self, value: Any) -> None:
        if len(self.stack) > _MAX_STACK:
            raise ValueError("it leaves too many values behind")
        self.append(value)

    def _mark(self) -> None:
        if len(self.metastack) > _MAX_MARKS:
            raise ValueError("values are nested too deeply")
        self.load_mark()

    def _frame(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        if size > _MAX_FRAME:
            raise ValueError(f"it has a frame of {size:,} bytes")
        self._unframer.load_frame(size)

    def _text(self) -> None:
        size = int.from_bytes(self.read(4), "little")
        if size > _MAX_NAME:
            raise ValueError(f"it has a name of {size:,} characters")
        self.append(str(self.read(size), "utf-8"))

    def _global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.append(self.find_class(_text(module), _text(name)))

    def _make(self) -> None:
        """NEWOBJ and REDUCE: a class and its arguments."""
        args, name = self.stack.pop(), self.stack.pop()
        if type(name) is not _Name or name.is_dtype or type(args) is not tuple:
            raise TypeError(f"it calls a {type(name).__name__}")
        self._push(args[0] if name.text == "Size" and args else _Record(name.text, args))

    def _build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is not _Record or record.state is not None:
            raise TypeError(f"it sets attributes of a {type(record).__name__}")
        record.state = state

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        table = self.stack[-1]
        if type(table) is not dict:
            raise TypeError(f"it sets items of a {type(table).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, _Record):
                raise TypeError(f"it has a {type(key).__name__} for a key")
            table[key] = value

    dispatch = {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
            *(pickle.SHORT_BINUNICODE, pickle.EMPTY_TUPLE, pickle.MEMOIZE),
            *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.BINGET, pickle.LONG_BINGET),
        )
    } | {
        pickle.MARK[0]: _mark,
        pickle.FRAME[0]: _frame,
        pickle.BINUNICODE[0]: _text,
        pickle.STACK_GLOBAL[0]: _global,
        pickle.EMPTY_LIST[0]: lambda self: self._push([]),
        pickle.EMPTY_DICT[0]: lambda self: self._push({}),
        pickle.NEWOBJ[0]: _make,
        pickle.REDUCE[0]: _make,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
    }


def read_metadata(stream: IO[bytes], *, name: str) -> Layout:
    """Return what a stream says. Raises CheckpointError, with `name` of the file, for anything but whole tensors."""
    try:
        return _layout(_Unpickler(stream).load())
    except EOFError:
        why = "it ends too early"
    except KeyError as error:  # of `dispatch`, or of a memo
        why = f"it is not a pickle that DCP writes (at {printable(str(error.args[0]), 20)})"
    except Exception as error:  # what a damaged pickle raises knows no bounds
        why = printable(str(error), 300) or type(error).__name__
    raise CheckpointError(f"{name} is refused: {why}")


def check_files(layout: Layout, sizes: Mapping[str, int]) -> None:
    """Raise ValueError where a chunk does not lie in the files of a checkpoint, of which these are the bytes."""
    for (name, _, _), (file, first, length) in layout.places.items():
        if file not in sizes:
            raise ValueError(f'"{name}" lies in {file}, which the manifest does not name')
        if first + length > sizes[file]:
            raise ValueError(f'"{name}" lies past the end of {file}')


def _layout(found: Any) -> Layout:
    _expect(found, "Metadata")
    tensors = {_text(k): _tensor(k, v) for k, v in found.get("state_dict_metadata", dict).items()}
    places = {_index(k): _place(v) for k, v in found.get("storage_data", dict).items()}
    lengths = {(name, offsets): place[2] for (name, offsets, _), place in places.items()}
    for name, tensor in tensors.items():
        if not is_covered(tensor):
            raise ValueError(f'its chunks do not cover "{name}" once')
        match = _DTYPE.fullmatch(tensor.dtype)
        item_bytes = max(int(match[1] or 8) // 8, 1) if match else 1
        for offsets, sizes in tensor.chunks:
            num_bytes = prod(sizes) * item_bytes
            if num_bytes and lengths.get((name, offsets), -1) < num_bytes:
                raise ValueError(f'it does not say where the chunk of "{name}" at {offsets} lies')
    return Layout(tensors, places)


def is_covered(tensor: Stored) -> bool:
    """Whether the chunks hold each element once. A box is the sum of its corners, with alternating signs: so all corners
    except those of the whole cancel out, in any order and in linear time."""
    chunks, size = tensor.chunks, tensor.size
    if any(len(part) != len(size) for chunk in chunks for part in chunk):
        return False
    if not prod(size):
        return True
    cut = [d for d, n in enumerate(size) if any((o[d], s[d]) != (0, n) for o, s in chunks)]
    if not cut:
        return len(chunks) == 1
    corners: Counter[Size] = Counter()
    for weight, boxes in ((1, chunks), (-1, [((0,) * len(size), size)])):
        for offsets, sizes in boxes:
            for ends in product((0, 1), repeat=len(cut)):
                at = (offsets[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
                corners[tuple(at)] += -weight if sum(ends) % 2 else weight
    return not any(corners.values())


def _tensor(name: str, found: Any) -> Stored:
    if type(found) is _Record and found.kind == "BytesStorageMetadata":
        raise ValueError(f'"{name}" is a pickled object, and titan reads tensors only')
    _expect(found, "TensorStorageMetadata")
    properties = _expect(found.get("properties", _Record), "TensorProperties").state
    dtype = properties[0] if type(properties) is tuple and properties else None
    if type(dtype) is not _Name or not dtype.is_dtype:
        raise TypeError(f'"{name}" has no dtype')
    chunks = []
    for chunk in found.get("chunks", list):
        _expect(chunk, "ChunkStorageMetadata")
        chunks.append((_size(chunk.get("offsets", tuple)), _size(chunk.get("sizes", tuple))))
    return Stored(dtype.text, _size(found.get("size", tuple)), chunks)


def _index(found: Any) -> Index:
    _expect(found, "MetadataIndex")
    offset, index = (found.state.get(name) for name in ("offset", "index"))
    if index is not None and type(index) is not int:
        raise TypeError(f"a chunk's number is of type {type(index).__name__}")
    return found.get("fqn", str), None if offset is None else _size(offset), index


def _place(found: Any) -> tuple[str, int, int]:
    _expect(found, "_StorageInfo")
    path, offset, length = (
        found.get(name, kind)
        for name, kind in (("relative_path", str), ("offset", int), ("length", int))
    )
    if not is_plain_name(path):
        raise ValueError(f'it refers to the file "{path:.80}", outside of the checkpoint')
    if not (0 <= offset < 2**63 and 0 <= length < 2**63):
        raise ValueError(f"it refers to bytes that {path:.80} cannot have")
    return path, offset, length


def _expect(found: Any, kind: str) -> _Record:
    if type(found) is not _Record or found.kind != kind or found.state is None:
        what = found.kind if type(found) is _Record else type(found).__name__
        raise TypeError(f"{what} is no {kind}")
    return found


def _size(found: Any) -> Size:
    is_size = type(found) is tuple and len(found) <= _MAX_DIMS
    if not is_size or not all(type(n) is int and 0 <= n < 2**63 for n in found):
        raise TypeError("a size is no tuple of numbers")
    return found


def _text(found: Any) -> str:
    if type(found) is not str or len(found) > _MAX_NAME:
        raise TypeError(f"a {type(found).__name__} is no name")
    return found
