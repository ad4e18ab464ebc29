"""tensors.json: the tensors of a checkpoint, and the file and bytes of each of their chunks.

DCP keeps the same in .metadata, which is a pickle, and unpickling a file can run anything that the file says. So titan
writes the index as JSON too and reads only that. A reader checks that the index describes whole tensors: the chunks of
a tensor contain each of its elements exactly once, and each chunk fits into a file that the manifest names. No torch is
imported here, because `titan verify` needs none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from titan.base.untrusted import Count, InputError, is_plain_name, parse_json, printable
from titan.checkpoint import CheckpointError
from titan.checkpoint.formats import require_known, unreadable
from titan.checkpoint.storage import Location, join, read_file

NAME = "tensors.json"
_MAX_BYTES = 2**30
_DTYPE = re.compile(r"(?:b?float|u?int|complex)(\d+)\w*|bool")
# Tensors here have fewer than 8 dimensions. `is_covered` visits 2^dimensions corners of a chunk.
Size = Annotated[tuple[Count, ...], Field(max_length=8)]


class Chunk(NamedTuple):
    """A box of a tensor, and its place on disk: `num_bytes` of `file` from byte `first` on."""

    offsets: Size
    sizes: Size
    file: str
    first: Count
    num_bytes: Count


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: torch's name of the dtype, such as "bfloat16".
        size: shape of the tensor.
        chunks: boxes that tile the tensor.
    """

    dtype: str
    size: Size
    chunks: list[Chunk]


@dataclass(frozen=True)
class TensorIndex:
    """Contents of tensors.json."""

    tensors: dict[str, StoredTensor]
    format: Literal[1] = 1


def render(index: TensorIndex) -> bytes:
    """Return the bytes of tensors.json, one line for each tensor."""
    lines = [f"{json.dumps(name)}: {json.dumps(vars(t))}" for name, t in index.tensors.items()]
    body = ",\n".join(lines)
    return f'{{"format": {index.format}, "tensors": {{\n{body}\n}}}}\n'.encode()


def read_index(folder: Location, sizes: Mapping[str, int]) -> TensorIndex:
    """Read the index of a checkpoint.

    Args:
        folder: folder of the step.
        sizes: bytes of each file of the step.

    Raises:
        CheckpointError: the index is missing, or does not describe whole tensors in these files.
    """
    where = join(folder, NAME)
    try:
        # A chunk takes more bytes in its file than in the index, so this limit bounds the memory of parsing.
        text = read_file(where, limit=min(2**20 + sum(sizes.values()), _MAX_BYTES))
        require_known(text, file=where)
        index = parse_json(text, TensorIndex, name=where, values=len(text))
    except OSError as error:
        raise unreadable(where, error) from error
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(error) from error
    # Check everything that a reader relies on before it reads a byte of a tensor.
    for name, tensor in index.tensors.items():
        if problem := problem_of(tensor, sizes):
            raise CheckpointError(f'{where}: "{printable(name, 200)}" {problem}')
    return index


def problem_of(tensor: StoredTensor, sizes: Mapping[str, int]) -> str:
    """Return the problem of a tensor, or "" if it has none."""
    dtype = _DTYPE.fullmatch(tensor.dtype)
    if dtype is None:
        return f"has an unknown dtype, {printable(tensor.dtype, 40)}"
    if not is_covered(tensor):
        return "is not covered once by its chunks"
    # Convert bits to bytes. bool has no digits, and takes one byte.
    item_bytes = max(int(dtype[1] or 8) // 8, 1)
    for chunk in tensor.chunks:
        if not is_plain_name(chunk.file):
            return f"refers to {printable(chunk.file, 80)}, outside of the checkpoint"
        if chunk.file not in sizes:
            return f"refers to {chunk.file}, which the manifest does not name"
        if chunk.first + chunk.num_bytes > sizes[chunk.file]:
            return f"reaches past the end of {chunk.file}"
        if chunk.num_bytes < prod(chunk.sizes) * item_bytes:
            return f"has too few bytes at {chunk.offsets}"
    return ""


def is_covered(tensor: StoredTensor) -> bool:
    """Return whether the chunks contain each element of a tensor exactly once.

    The indicator of a box is a sum over its corners with alternating signs. If the chunks tile the tensor, all corners
    cancel except the tensor's own corners. This takes linear time, in whatever order the chunks are.
    """
    size = tensor.size
    chunks: list[Any] = [(c.offsets, c.sizes) for c in tensor.chunks]
    if any(len(part) != len(size) for chunk in chunks for part in chunk):
        return False
    # A tensor without elements needs no chunks.
    if not prod(size):
        return True
    # Dimensions along which no chunk is cut need no corners.
    cut = [d for d, n in enumerate(size) if any((o[d], s[d]) != (0, n) for o, s in chunks)]
    if not cut:
        return len(chunks) == 1
    corners: Counter[tuple[int, ...]] = Counter()
    # Add all chunks with weight 1 and the whole tensor with -1. A tiling leaves nothing.
    for weight, boxes in ((1, chunks), (-1, [((0,) * len(size), size)])):
        for offsets, sizes in boxes:
            for ends in product((0, 1), repeat=len(cut)):
                at = (offsets[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
                corners[tuple(at)] += -weight if sum(ends) % 2 else weight
    return not any(corners.values())
