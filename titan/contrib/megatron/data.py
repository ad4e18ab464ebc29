"""Reader of Megatron's token files: PREFIX.bin holds ids, and PREFIX.idx says where sequences and documents begin.

The format is that of megatron/core/datasets/indexed_dataset.py. The index has 34 bytes of header (magic, version, code of the
dtype, number of sequences, number of document marks), then an int32 length and an int64 byte offset for each sequence, then
int64 document marks: the number of each document's first sequence, and the number of all sequences. Here are two documents, of
3 and of 2 + 4 tokens of 2 bytes:

    lengths 3 2 4    offsets 0 6 10    document marks 0 1 3

The ids are mapped without a copy, and no id is added. The end-of-text id marks where documents end, as
for Megatron's own masks. The last documents are held out for validation, as Megatron's --split does.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from titan.data import DataError
from titan.data.shard_samples import SampleOptions
from titan.data.shards import Index, Shard, TokenShards
from titan.data.sources import Documents
from titan.data.special_tokens import SpecialTokens

_HEADER = 34  # bytes
# Ids of signed types are read as unsigned, so that a negative one is above every vocabulary.
_DTYPES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 8: "<u2"}
_CHECKED = 10_000  # documents, evenly spaced, whose last id is looked at


class MegatronTokens(TokenShards):
    """Tokens of one split."""

    def __init__(self, path: str, options: SampleOptions) -> None:
        """Map the files and choose the documents of the split.

        Args:
            path: prefix of the files.
            options: options of the job.

        Raises:
            DataError: the files are damaged, or no end-of-text id marks their documents.
        """
        eos_id, data = options.tokenizer.eos_id, options.data
        tokens, ends = read_files(path)
        last = tokens[ends[1 :: len(ends) // _CHECKED + 1] - 1]
        unmarked = np.count_nonzero(last != eos_id)
        if unmarked and (data.document_mask or data.packing == "best_fit"):
            raise DataError(
                f"{path}.bin: {unmarked} of {len(last)} documents do not end with the tokenizer's end-of-text id, {eos_id}; "
                'tokenize with --append-eod, or set data.document_mask = false and data.packing = "cut"'
            )
        border = ends[-1 - round((len(ends) - 1) * data.validation_fraction)]
        is_train = options.split == "train"
        tokens = tokens[:border] if is_train else tokens[border:]
        starts = ends[:-1][(ends[:-1] < border) == is_train]
        self._document_begins = starts - starts[:1]
        self._shards = [Shard(file="a-0.bin", documents=len(starts))]
        self.folder, self.split, self.num_tokens = Path(path), options.split, len(tokens)
        # Only conversations and the cache of packed rows ask for the rest.
        # pyrefly: ignore[missing-argument]
        self.index = Index.model_construct(key=str(describe(path).identity))
        self.special_tokens = SpecialTokens(None, eos_id)
        self._num_ids = options.tokenizer.vocab_size
        # A split without documents has no file.
        self._maps = [tokens][: len(tokens)]
        self.ends = np.array([len(tokens)])[: len(tokens)]

    def _begins(self, number: int) -> np.ndarray:
        return self._document_begins


def describe(path: str) -> Documents:
    """Return the identity of Megatron's token files: names, sizes and times. They hold no text.

    Args:
        path: their prefix.

    Raises:
        DataError: a file is missing.
    """
    files = [Path(f"{path}.{ending}").expanduser() for ending in ("idx", "bin")]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"{file} is no file; give the prefix of both files, without .bin and .idx. Each part of a blend is one of "
                '[[data.sources]] with type = "megatron", path and weight'
            )
    stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return Documents(
        name=f"{path} (ids, no text)", identity=["megatron", stats], read=lambda: iter(())
    )


def read_files(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Map Megatron's token files.

    Args:
        path: their prefix.

    Returns:
        All ids, uint[tokens], and where documents end, int64[documents + 1]. The first is 0.

    Raises:
        DataError: the files are damaged, or of a kind that is not read.
    """
    # pyrefly: ignore[not-iterable]
    (index, size, _), (data, num_bytes, _) = describe(path).identity[1]
    with Path(index).open("rb") as file:
        head = file.read(_HEADER)
    if size < _HEADER or not head.startswith(b"MMIDIDX\x00\x00"):
        raise DataError(f"{index} does not begin as an index of Megatron's token files")
    version, code, num_sequences, num_marks = struct.unpack("<9xQBQQ", head)
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{index} has version {version} and dtype code {code}; titan reads version 1, and ids of 1, 2 or 4 bytes (codes 1 2 3 4 8)"
        )
    expected = _HEADER + 12 * num_sequences + 8 * num_marks
    if size == expected + num_sequences > expected:
        raise DataError(
            f"{index} has modes of sequences: it is multimodal, and titan reads text"
        )
    if size != expected or not num_sequences or not num_marks:
        raise DataError(
            f"{index} has {size} bytes, and should have {expected} for {num_sequences} sequences and {num_marks} document marks: "
            "it is empty or damaged"
        )
    lengths = np.memmap(index, "<u4", "r", _HEADER, num_sequences)
    numbers = np.memmap(index, "<i8", "r", _HEADER + lengths.nbytes)
    offsets, marks = numbers[:num_sequences], numbers[num_sequences:]
    width = int(_DTYPES[code][-1])
    ends = np.append(0, lengths.cumsum(dtype=np.int64))
    begins = np.append(offsets, num_bytes)
    wrong = np.flatnonzero(begins != ends * width)
    if wrong.size or not num_bytes:
        number = [*wrong, 0][0]
        raise DataError(
            f"{data} has {num_bytes} bytes and does not fit its index: sequence {number} of {num_sequences} begins at byte "
            f"{begins[number]}, and the one before ends at {ends[number] * width}; one file is damaged"
        )
    if marks[0] or marks[-1] != num_sequences or (np.diff(marks) < 0).any():
        raise DataError(
            f"{index}: document marks should rise from 0 to {num_sequences}: it is damaged"
        )
    return np.memmap(data, _DTYPES[code], "r").view(np.ndarray), ends[marks]
