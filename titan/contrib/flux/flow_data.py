"""Datasets of flow matching: folders of pictures, and folders of encoded pictures and texts.

T context positions, C channels of a context position or of the pooled vector
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from titan.base.untrusted import is_plain_name, parse_json, read_lines
from titan.config.plug_ins import load_plug_in, plug_ins
from titan.data import DataError
from titan.data.base import Samples
from titan.data.files import walk
from titan.data.order import derive_key, permute
from titan.tools.pictures import read_picture

from .config import FluxConfig
from .flow_options import FlowOptions

_HELD_OUT = 20  # every 20th picture of a folder is for validation


class Rows(NamedTuple):
    """Samples: pictures or latents (B, channels, height, width) fp32, and their conditions."""

    pictures: ndarray
    context_BTC: ndarray
    pooled_BC: ndarray


class FlowSamples(Samples):
    """Dataset of a split. A subclass sets `num_items`, 0 for an endless one, and returns an item by its index."""

    num_items = 0

    def __init__(
        self, options: FlowOptions, sizes: FluxConfig, *, split: str, seed: int
    ) -> None:
        self.options, self.sizes, self.split, self.seed = options, sizes, split, seed
        self.shape = (options.channels, options.size, options.size)
        if options.source in _SOURCES and not options.path:
            raise DataError(f'task.options.path: missing; source = "{options.source}" reads it')
        self.open()

    def open(self) -> None:
        """Open the files, or raise DataError."""

    def item(self, place: int) -> tuple[ndarray, ...]:
        """Return a picture and its conditions, as in `Rows`. A subclass must define it: this one raises NotImplementedError."""
        raise NotImplementedError

    @property
    def num_samples(self) -> int | None:
        return self.num_items or None

    def get(self, indices: ndarray) -> Rows:
        return Rows(
            *map(np.stack, zip(*(self.item(self._place(int(i))) for i in indices), strict=True))
        )

    def _place(self, index: int) -> int:
        """Return the item of a sample. Each epoch of training has its own order."""
        if not self.num_items:
            return index
        epoch, place = divmod(index, self.num_items)
        if self.split == "validation":
            return place
        key = derive_key(self.seed, "pictures", epoch)
        return int(permute(np.array([place]), length=self.num_items, key=key)[0])

    def of_split(self, items: Sequence[Any]) -> list[Any]:
        """Return the split's part of a folder, or raise DataError if it is empty."""
        is_held_out = self.split == "validation"
        part = [item for n, item in enumerate(items) if (n % _HELD_OUT == 0) == is_held_out]
        if not part:
            raise DataError(f"{self.options.path}: too few pictures for the {self.split} split")
        return part

    def conditions(self, count: int) -> tuple[ndarray, ndarray]:
        """Return context and pooled vectors of the first labels, to draw pictures of."""
        context, pooled = zip(*map(self.label, range(count)), strict=True)
        return np.stack(context), np.stack(pooled)

    def label(self, number: int) -> tuple[ndarray, ndarray]:
        """Return a label as context, one-hot in the first position, and as a one-hot pooled vector."""
        context = np.zeros((self.options.context_len, self.sizes.context_dim), dtype=np.float32)
        pooled = np.zeros(self.sizes.pooled_dim, dtype=np.float32)
        context[0, number] = pooled[number] = 1
        return context, pooled


@dataclass
class _Line:
    """A line of labels.jsonl."""

    file: str
    label: int


class PictureFolder(FlowSamples):
    """Folder of pictures with their labels.

    The pictures are PNG files, or NPY files of (channels, height, width) from -1 to 1. The lines of labels.jsonl list them:
    {"file": NAME, "label": NUMBER}.
    """

    def open(self) -> None:
        self.folder = Path(self.options.path)
        name = self.folder / "labels.jsonl"
        lines = read_lines(name, within=self.folder)
        items = [parse_json(line, _Line, name=f"{name}:{number}") for number, line in lines]
        for item in items:
            if not is_plain_name(item.file) or not 0 <= item.label < self.options.classes:
                raise DataError(
                    f"{name}: {item} has no label below {self.options.classes}, or a path"
                )
        self.items = self.of_split(items)
        self.num_items = len(self.items)

    def item(self, place: int) -> tuple[ndarray, ...]:
        line = self.items[place]
        file = self.folder / line.file
        if file.suffix.lower() == ".npy":
            picture = _read(np.load, file)
        else:
            mode = "L" if self.options.channels == 1 else "RGB"
            picture = np.asarray(_read(partial(read_picture, mode=mode), file))
            picture = np.atleast_3d(picture).transpose(2, 0, 1) / 127.5 - 1
        if picture.shape != self.shape:
            raise DataError(f"{file}: has shape {picture.shape}; the task has {self.shape}")
        return (picture.astype(np.float32), *self.label(line.label))


def _read(reader: Callable[[Path], Any], file: Path) -> Any:
    """Return the contents of a file, or raise DataError."""
    try:
        return reader(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


class Encoded(FlowSamples):
    """Folders of latents.npy (N, channels, height, width), context.npy (N, T, C) and pooled.npy (N, C), mapped into memory."""

    def open(self) -> None:
        options, sizes = self.options, self.sizes
        shapes = self.shape, (options.context_len, sizes.context_dim), (sizes.pooled_dim,)
        self.files = []
        for latents in sorted(f for f in walk(Path(options.path)) if f.name == "latents.npy"):
            names = [
                latents.with_name(f"{name}.npy") for name in ("latents", "context", "pooled")
            ]
            arrays = [_read(partial(np.load, mmap_mode="r"), name) for name in names]
            for name, array, shape in zip(names, arrays, shapes, strict=True):
                if array.shape != (len(arrays[0]), *shape):
                    raise DataError(
                        f"{name}: has shape {array.shape}; the job has (N, *{shape})"
                    )
            self.files.append(arrays)
        places = [
            (n, row) for n, arrays in enumerate(self.files) for row in range(len(arrays[0]))
        ]
        self.items = self.of_split(places)
        self.num_items = len(self.items)

    def item(self, place: int) -> tuple[ndarray, ...]:
        file, row = self.items[place]
        return tuple(array[row].astype(np.float32) for array in self.files[file])

    def conditions(self, count: int) -> tuple[ndarray, ndarray]:
        """Return the conditions of the first items."""
        return self.get(np.arange(count))[1:]


_SOURCES: dict[str, type[FlowSamples]] = {"pictures": PictureFolder, "encoded": Encoded}


def open_samples(
    options: FlowOptions, sizes: FluxConfig, *, split: str, seed: int
) -> FlowSamples:
    """Return the dataset of a split, of titan or of a package's entry point in the group `titan.pictures`.

    Raises:
        DataError: the source is not installed, or cannot be read.
    """
    source = _SOURCES.get(options.source)
    if source is None:
        entries = {entry.name: entry for entry in plug_ins("titan.pictures")}
        if options.source not in entries:
            raise DataError(f'task.options.source: "{options.source}" is not installed')
        source = load_plug_in(entries[options.source])
    return source(options, sizes, split=split, seed=seed)
