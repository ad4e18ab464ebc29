"""Train by flow matching, on pictures or their latents, and draw pictures (rectified flow, arXiv:2209.03003; the times of
Stable Diffusion 3, arXiv:2403.03206, section 3.1).

A sample has a picture x, noise n and a time t. The model sees (1 - t) x + t n, and predicts the velocity n - x. The loss is the mean
of the squared error over all elements of the global batch. Noise, time, and whether the context is left out belong to the sample's
number, so that every layout, accumulation and resumed run draws the same.

B batch, S patches, T context positions, C channels of a patch, or of what the name says, A axes of a position
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan.config.model import model_config
from titan.config.schema import JobConfig
from titan.data import DataError
from titan.data.base import Samples, TensorBatch
from titan.data.files import walk
from titan.data.loader import Collate
from titan.data.order import derive_key, permute
from titan.parallel.context import unshard_sequence
from titan.task import LossFunction, Microbatch, Task
from titan.untrusted import is_plain_name, parse_json, read_lines

from ..pictures import read_picture
from .config import FluxConfig
from .options import SHAPES, TaskOptions
from .pictures import grid, to_patches, to_pictures, write_png

_HELD_OUT = 20  # every so manieth picture of a folder is for validation
_NUM_DRAWN = 1024  # shapes to validate on
_TIMES = 8  # of validation, in turn


class Rows(NamedTuple):
    """Hold samples as `Samples.get` returns them: pictures or latents (B, channels, height, width) fp32, and their conditions."""

    pictures: np.ndarray
    context_BTC: np.ndarray
    pooled_BC: np.ndarray


@dataclass(frozen=True, kw_only=True)
class FlowBatch(TensorBatch):
    """Hold what a rank trains on. valid_B: int64, 1 for samples that count."""

    ALONG_SEQUENCE = ("patches_BSC", "noise_BSC", "positions_BSA", "context_BTC")

    patches_BSC: Tensor
    noise_BSC: Tensor
    positions_BSA: Tensor
    context_BTC: Tensor
    pooled_BC: Tensor
    time_B: Tensor
    valid_B: Tensor

    def ignore_from(self, row: int) -> None:
        self.valid_B[row:] = 0


# ---- pictures ------------------------------------------------------------------------------------


class FlowSamples(Samples):
    """Give the samples of a split. A subclass has `num_items`, 0 for no end, and returns them by their places."""

    num_items = 0

    def __init__(self, options: TaskOptions, sizes: FluxConfig, *, split: str, seed: int) -> None:
        self.options, self.sizes, self.split, self.seed = options, sizes, split, seed
        self.shape = (options.channels, options.size, options.size)
        if options.source != "shapes" and not options.path:
            raise DataError(f'task.options.path: missing; source = "{options.source}" reads it')
        self.open()

    def open(self) -> None:
        """Look at the files. Raises DataError."""

    @abstractmethod
    def item(self, place: int) -> tuple[np.ndarray, ...]:
        """Return a picture and its conditions, as in `Rows`."""

    @property
    def num_samples(self) -> int | None:
        return self.num_items or None

    def get(self, indices: np.ndarray) -> Rows:
        return Rows(
            *map(np.stack, zip(*(self.item(self._place(int(i))) for i in indices), strict=True))
        )

    def _place(self, index: int) -> int:
        """Return which item a sample is: each epoch of training has its own order."""
        if not self.num_items:
            return index
        epoch, place = divmod(index, self.num_items)
        if self.split == "validation":
            return place
        key = derive_key(self.seed, "pictures", epoch)
        return int(permute(np.array([place]), length=self.num_items, key=key)[0])

    def of_split(self, items: Sequence[Any]) -> list[Any]:
        """Return the split's part of a folder. Raises DataError if it is empty."""
        is_held_out = self.split == "validation"
        part = [item for n, item in enumerate(items) if (n % _HELD_OUT == 0) == is_held_out]
        if not part:
            raise DataError(f"{self.options.path}: too few pictures for the {self.split} split")
        return part

    def conditions(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return context and pooled vectors to draw pictures of, one of each label."""
        context, pooled = zip(*map(self.label, range(count)), strict=True)
        return np.stack(context), np.stack(pooled)

    def label(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a label as context, a one in its channel of the first position, and as a pooled vector."""
        context = np.zeros((self.options.context_len, self.sizes.context_dim), dtype=np.float32)
        pooled = np.zeros(self.sizes.pooled_dim, dtype=np.float32)
        context[0, number] = pooled[number] = 1
        return context, pooled


class Shapes(FlowSamples):
    """Draw light shapes of any size and place, in grey or colours."""

    def open(self) -> None:
        self.num_items = 0 if self.split == "train" else _NUM_DRAWN

    def item(self, place: int) -> tuple[np.ndarray, ...]:
        random = np.random.Generator(np.random.Philox(key=derive_key(self.seed, self.split, place)))
        label = int(random.integers(self.options.classes))
        radius, (x, y) = random.uniform(0.55, 0.8), random.uniform(-0.2, 0.2, size=2)
        size = self.options.size
        rows, columns = np.meshgrid(*[(np.arange(size) + 0.5) * 2 / size - 1] * 2, indexing="ij")
        distance = _distance(SHAPES[label], (columns - x) / radius, (rows - y) / radius) * radius
        inside = np.clip(0.5 - distance * size / 2, 0, 1)  # an edge is a pixel wide
        light = random.uniform(0.5, 1, size=(self.options.channels, 1, 1))
        return ((2 * light * inside - 1).astype(np.float32), *self.label(label))


def _distance(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return about how far points are from the edge of a shape of radius 1, negative inside."""
    far, square = np.hypot(x, y), np.maximum(abs(x), abs(y))
    if shape in ("plus", "cross"):
        if shape == "cross":
            x, y = (x + y) / 2**0.5, (x - y) / 2**0.5
        return np.maximum(np.minimum(abs(x), abs(y)) - 0.3, np.maximum(abs(x), abs(y)) - 1)
    return {
        "disc": far - 1,
        "ring": abs(far - 0.75) - 0.25,
        "square": square - 0.9,
        "frame": abs(square - 0.7) - 0.22,
        "triangle": np.maximum(0.87 * abs(x) - 0.5 * y, y) - 0.6,
        "bars": np.maximum(abs(x) - 0.9, abs(abs(y) - 0.55) - 0.27),
    }[shape]


@dataclass
class _Line:
    """A line of labels.jsonl."""

    file: str
    label: int


class PictureFolder(FlowSamples):
    """Read PNG files, or NPY files of (channels, height, width) from -1 to 1, that labels.jsonl lists: {"file": NAME, "label": NUMBER}."""

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

    def item(self, place: int) -> tuple[np.ndarray, ...]:
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
    """Read a file. Raises DataError."""
    try:
        return reader(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


class Encoded(FlowSamples):
    """Read folders of latents.npy (N, channels, height, width), context.npy (N, T, C) and pooled.npy (N, C), mapped into memory."""

    def open(self) -> None:
        options, sizes = self.options, self.sizes
        shapes = self.shape, (options.context_len, sizes.context_dim), (sizes.pooled_dim,)
        self.files = []
        for latents in sorted(f for f in walk(Path(options.path)) if f.name == "latents.npy"):
            names = [latents.with_name(f"{name}.npy") for name in ("latents", "context", "pooled")]
            arrays = [_read(partial(np.load, mmap_mode="r"), name) for name in names]
            for name, array, shape in zip(names, arrays, shapes, strict=True):
                if array.shape != (len(arrays[0]), *shape):
                    raise DataError(f"{name}: has shape {array.shape}; the job has (N, *{shape})")
            self.files.append(arrays)
        places = [(n, row) for n, arrays in enumerate(self.files) for row in range(len(arrays[0]))]
        self.items = self.of_split(places)
        self.num_items = len(self.items)

    def item(self, place: int) -> tuple[np.ndarray, ...]:
        file, row = self.items[place]
        return tuple(array[row].astype(np.float32) for array in self.files[file])

    def conditions(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return those of the first items."""
        return self.get(np.arange(count))[1:]


_SOURCES = {"shapes": Shapes, "pictures": PictureFolder, "encoded": Encoded}


# ---- the task ------------------------------------------------------------------------------------


class FlowMatching(Task):
    """Predict the velocity between a picture and noise."""

    options: TaskOptions

    def __init__(self, config: JobConfig, options: TaskOptions) -> None:
        super().__init__(config, options)
        self.sizes: FluxConfig = model_config(config.model)

    def samples(self, split: str, *, rank: int, world: int) -> FlowSamples:
        seed = self.config.debug.seed if split == "train" else 0
        return _SOURCES[self.options.source](self.options, self.sizes, split=split, seed=seed)

    def collate(self, samples: Samples) -> Collate:
        assert isinstance(samples, FlowSamples)
        return partial(self._batch, seed=samples.seed, split=samples.split)

    def _batch(self, rows: Rows, *, first_sample: int, seed: int, split: str) -> FlowBatch:
        numbers = range(first_sample, first_sample + len(rows.pictures))
        patches = to_patches(rows.pictures, self.options.patch)
        noise, times, keeps = zip(*(self._draw(seed, split, n) for n in numbers), strict=True)
        keeps_B = np.array(keeps, dtype=np.float32)
        return FlowBatch(
            patches_BSC=torch.from_numpy(patches),
            noise_BSC=torch.from_numpy(np.stack(noise)),
            positions_BSA=self._positions().repeat(len(patches), 1, 1),
            context_BTC=torch.from_numpy(rows.context_BTC * keeps_B[:, None, None]),
            pooled_BC=torch.from_numpy(rows.pooled_BC * keeps_B[:, None]),
            time_B=torch.tensor(times, dtype=torch.float32),
            valid_B=torch.ones(len(patches), dtype=torch.int64),
            first_sample=first_sample,
        )

    def _draw(self, seed: int, split: str, number: int) -> tuple[np.ndarray, float, bool]:
        """Return the noise of a sample, (S, C), its time, and whether it keeps its context."""
        options = self.options
        random = np.random.Generator(np.random.Philox(key=derive_key(seed, split, "flow", number)))
        shape = (options.num_patches, self.sizes.in_channels)
        noise = random.standard_normal(shape, dtype=np.float32)
        if split != "train":
            return noise, (number % _TIMES + 0.5) / _TIMES, True
        is_normal = options.time == "logit_normal"
        time = 1 / (1 + np.exp(-random.standard_normal())) if is_normal else random.random()
        return noise, self._shifted(float(time)), random.random() >= options.dropout

    def _shifted(self, time: float) -> float:
        """Return the time that has as much noise in a larger picture (arXiv:2403.03206, equation 23)."""
        shift = self.options.shift
        return shift * time / (1 + (shift - 1) * time)

    def _positions(self) -> Tensor:
        """Return index 0, row and column of each patch, (S, 3) int64."""
        side = torch.arange(self.options.size // self.options.patch)
        rows, columns = torch.meshgrid(side, side, indexing="ij")
        return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)

    def describe(self) -> str:
        options = self.options
        source = "shapes" if options.source == "shapes" else f"{options.source} of {options.path}"
        size = f"{options.channels} x {options.size} x {options.size}"
        patches = f"{options.num_patches} patches of {options.patch} x {options.patch}"
        return f"{source}, {size} in {patches}, with {options.context_len} context positions"

    def fake_batch(self) -> FlowBatch:
        batch, sizes = self.config.training.local_batch_size, self.sizes
        length = self.options.num_patches
        return FlowBatch(
            patches_BSC=torch.zeros(batch, length, sizes.in_channels),
            noise_BSC=torch.zeros(batch, length, sizes.in_channels),
            positions_BSA=torch.zeros(batch, length, 3, dtype=torch.int64),
            context_BTC=torch.zeros(batch, self.options.context_len, sizes.context_dim),
            pooled_BC=torch.zeros(batch, sizes.pooled_dim),
            time_B=torch.zeros(batch),
            valid_B=torch.zeros(batch, dtype=torch.int64),
        )

    def microbatch(self, batch: FlowBatch) -> Microbatch:
        """Return noisy patches, and velocities with a last channel that is 1 where a sample counts."""
        time_B11 = batch.time_B[:, None, None]
        patches, noise = batch.patches_BSC, batch.noise_BSC
        counts_BS1 = batch.valid_B[:, None, None].expand(*patches.shape[:2], 1).to(patches.dtype)
        inputs = {
            name: getattr(batch, name)
            for name in ("positions_BSA", "context_BTC", "pooled_BC", "time_B")
        }
        if self.sizes.guidance_embed:
            inputs["guidance_B"] = torch.full_like(batch.time_B, self.options.guidance)
        return Microbatch(
            (1 - time_B11) * patches + time_B11 * noise,
            torch.cat([noise - patches, counts_BS1], dim=-1),
            batch.valid_B.sum() * patches[0].numel(),
            inputs,
        )

    def loss(self, mesh: Any, *, output: Any, float8: Any) -> LossFunction:
        return squared_error_sum

    # ---- pictures of the model -------------------------------------------------------------------

    def sample(self, run: Any) -> None:
        """Draw pictures, a column for each label, into samples/step-N.png; latents into .npy. The same on every layout."""
        patches = self.drawn(run.train_step)
        if run.rank == 0:
            file = run.run_dir / "samples" / f"step-{run.step}.png"
            file.parent.mkdir(exist_ok=True)
            draws = self.options.channels in (1, 3)
            self._write(patches, file if draws else file.with_suffix(".npy"))

    def draw(self, model: nn.Module, text: str, *, seed: int, file: Path) -> None:
        """Draw pictures of a label, its number or the name of a shape, or without one a column for each label, into .png or .npy."""
        options, label = self.options, None
        names = SHAPES[: options.classes] if options.source == "shapes" else ()
        what, count = "label of this task", options.classes
        if options.source == "encoded":  # whose encodings are all that the model knows of it
            what, count = "item that is held out", self._conditions().num_items
        if text:
            label = names.index(text) if text in names else int(text) if text.isdecimal() else -1
            if not 0 <= label < count:
                known = f"0 to {count - 1}" + (f" or {', '.join(names)}" if names else "")
                raise DataError(f'--prompt "{text}": no {what}; take {known}')
        if file.suffix not in ((".npy", ".png") if options.channels in (1, 3) else (".npy",)):
            kinds = (
                "latents; end it in .npy"
                if options.channels not in (1, 3)
                else "pictures; end it in .png or .npy"
            )
            raise DataError(f"--output {file}: the model draws {kinds}")
        noise = self._of_noise(seed=seed, label=label).to(next(model.parameters()).device)
        self._write(self._drawn(model, self.microbatch(noise), None), file)

    def _write(self, patches: np.ndarray, file: Path) -> None:
        pictures = to_pictures(patches, self.options)
        if file.suffix == ".npy":
            np.save(file, pictures)
        else:
            write_png(file, grid(pictures, self.options.sample_rows))

    def drawn(self, train_step: Any) -> np.ndarray:
        """Return patches of `sample_rows` pictures of each label, (rows x labels, S, C) fp32. All ranks call it, and all draw all of them."""
        (model,) = train_step.model_parts
        local = train_step.to_local(self._of_noise())
        return self._drawn(model, local, train_step.context)

    def _conditions(self) -> FlowSamples:
        """Return what knows the conditions of pictures to draw. Those of labels need no files."""
        kind = Encoded if self.options.source == "encoded" else Shapes
        return kind(self.options, self.sizes, split="validation", seed=0)

    def _of_noise(self, *, seed: int = 0, label: int | None = None) -> FlowBatch:
        """Return noise at time 1, to draw `sample_rows` pictures of each label or of one: each twice, with its context and without."""
        options = self.options
        which = slice(label, None if label is None else label + 1)
        count = options.classes if label is None else label + 1
        conditions = self._conditions().conditions(count)
        context, pooled = (np.concatenate([c[which]] * options.sample_rows) for c in conditions)
        pictures = np.zeros(
            (len(context), options.channels, options.size, options.size), np.float32
        )
        rows = Rows(pictures, context, pooled)
        batch = self._batch(rows, first_sample=0, seed=seed, split="sample")
        without = {"context_BTC": torch.zeros_like, "pooled_BC": torch.zeros_like}
        double = batch.map(lambda name, x: torch.cat([x, without.get(name, torch.clone)(x)]))
        return replace(double, time_B=torch.ones_like(double.time_B))

    @torch.no_grad()
    def _drawn(self, model: nn.Module, local: Microbatch, cp: Any) -> np.ndarray:
        """Return patches that Euler steps of the guided velocity make of noise (arXiv:2207.12598). cp: context parallelism's mesh, or None."""
        options = self.options
        x_BSC = local.input
        times = [
            self._shifted(n / options.sample_steps) for n in range(options.sample_steps, -1, -1)
        ]
        for time, next_time in pairwise(times):
            inputs = {**local.inputs, "time_B": torch.full_like(local.inputs["time_B"], time)}
            with_context, alone = model(x_BSC, **inputs).float().chunk(2)
            velocity = alone + options.sample_guidance * (with_context - alone)
            x_BSC = x_BSC - (time - next_time) * velocity.repeat(2, 1, 1)
        x_BSC = x_BSC.chunk(2)[0].contiguous()
        if cp is not None:
            parts = [torch.empty_like(x_BSC) for _ in range(cp.size())]
            dist.all_gather(parts, x_BSC, group=cp.get_group())
            balanced = self.config.parallelism.splits_from_both_ends
            x_BSC = unshard_sequence(torch.cat(parts, 1), dim=1, size=cp.size(), balanced=balanced)
        return x_BSC.cpu().numpy()


def squared_error_sum(output_BSC: Tensor, targets_BSC: Tensor) -> Tensor:
    """Return the sum of squared errors, fp32. The last channel of the targets is the weight of a patch."""
    target_BSC, weight_BS1 = targets_BSC[..., :-1], targets_BSC[..., -1:]
    return (F.mse_loss(output_BSC.float(), target_BSC, reduction="none") * weight_BS1).sum()
