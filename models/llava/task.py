"""Train on pictures with text: each document is a begin token, the patches of a picture, its text and an end token.

Several documents share a row, packed best-fit once for all epochs. Labels of patches and padding are IGNORED, so that the divisor
counts text alone. A hash of its text decides whether a picture is held out for validation, as for documents of text.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.config.model import model_config
from titan.data import DataError, require
from titan.data.base import Samples
from titan.data.best_fit import best_fit
from titan.data.loader import Collate
from titan.data.order import derive_key, permute
from titan.data.packing import Batch
from titan.data.sources import find_files, in_validation
from titan.data.special_tokens import SpecialTokens
from titan.data.text import collate_rows
from titan.loss import IGNORED
from titan.parallel import materialize
from titan.parallel.init_weights import canonical_name
from titan.task import Microbatch, NextToken

from . import TaskOptions, build_model
from .config import LlavaConfig
from .huggingface import IMAGE_MEAN, IMAGE_STD

_ROW = ("images", "image_index_BS")


@dataclass(frozen=True, kw_only=True)
class PictureBatch(Batch):
    """Hold a micro-batch of text with pictures. images: fp32 (B, I, P, C), zeros where a row has fewer. image_index_BS: see `Llava`."""

    ALONG_SEQUENCE: ClassVar[tuple[str, ...]] = (*Batch.ALONG_SEQUENCE, "image_index_BS")

    images: Tensor
    image_index_BS: Tensor

    @classmethod
    def of(cls, batch: Batch, images: Tensor, *, image_token: int) -> PictureBatch:
        """Return packed rows with their pictures, whose patches are `image_token` in the rows."""
        batch.labels_BS[batch.labels_BS == image_token] = IGNORED
        index_BS = image_index(batch.tokens_BS, image_token=image_token)
        return cls(**vars(batch), images=images, image_index_BS=index_BS)


def image_index(tokens_BS: Tensor, *, image_token: int) -> Tensor:
    """Return which of a row's patches stands at each position, int64 (B, S); -1: none."""
    is_patch_BS = tokens_BS == image_token
    return torch.where(is_patch_BS, is_patch_BS.cumsum(dim=1) - 1, -1)


def patches_of(pixels: np.ndarray, config: LlavaConfig) -> np.ndarray:
    """Return the patches of a picture, uint8 (height, width, 3), as fp32 (P, C): rows first, and in each the colours first."""
    side, normal = config.patch_size, (pixels / 255 - IMAGE_MEAN) / IMAGE_STD
    across = config.image_size // side
    cut = normal.reshape(across, side, across, side, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(config.num_patches, -1).astype(np.float32)


@dataclass(frozen=True)
class Pictures:
    """Offer pictures with text, by number. read: returns the file, or the bytes of one, of a picture. text: returns its text."""

    count: int
    read: Callable[[int], Path | bytes]
    text: Callable[[int], str]

    @staticmethod
    def open(options: TaskOptions) -> Pictures:
        """Open what the options name. Raises DataError."""
        where = Path(options.path).expanduser()
        captions = where / "captions.jsonl"
        if not captions.is_file():
            return Pictures._of_parquet(where, options)
        lines = captions.read_text(encoding="utf-8").splitlines()
        try:
            found = [json.loads(line) for line in lines if line.strip()]
            rows = [(where / row[options.image_key], str(row[options.text_key])) for row in found]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{captions}: a line is no JSON object with '{options.image_key}' and '{options.text_key}': {error}"
            ) from error
        return Pictures(len(rows), lambda i: rows[i][0], lambda i: rows[i][1])

    @staticmethod
    def _of_parquet(where: Path, options: TaskOptions) -> Pictures:
        files = [str(file) for file in find_files(str(where), patterns=["*.parquet"])]
        datasets = require("datasets", purpose=f"reading {where}")
        # Mapped from datasets' cache, not read as a whole.
        table = datasets.Dataset.from_parquet(files).data
        for key in (options.image_key, options.text_key):
            if key not in table.column_names:
                known = ", ".join(table.column_names)
                raise DataError(f"{where}: no column '{key}'; its columns are {known}")
        images, texts = table.column(options.image_key), table.column(options.text_key)

        def read(number: int) -> bytes:
            value = images[number].as_py()
            return value["bytes"] if isinstance(value, dict) else value

        return Pictures(len(texts), read, lambda i: texts[i].as_py())

    def pixels(self, number: int, *, side: int) -> np.ndarray:
        """Return a picture in its middle square, uint8 (side, side, 3), as CLIP's preparation has it. Raises DataError."""
        source = self.read(number)
        image = require("PIL.Image", purpose="reading pictures", extra="vision")
        try:
            opened = image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
            opened = opened.convert("RGB")
        except (OSError, ValueError) as error:
            name = f"picture {number}" if isinstance(source, bytes) else source
            raise DataError(f"{name}: cannot be read: {error}") from error
        if opened.size != (side, side):
            scale = side / min(opened.size)
            # The longer side rounds down, as in transformers.
            opened = opened.resize([int(n * scale + 1e-6) for n in opened.size], image.BICUBIC)
            left, top = ((n - side) // 2 for n in opened.size)
            opened = opened.crop((left, top, left + side, top + side))
        return np.asarray(opened)


class PictureSamples(Samples):
    """Give rows of documents with pictures: int64 (B, seq_len + 1) and fp32 (B, I, P, C).

    numbers: those of the split. room: pictures of a row. key: orders the rows of each epoch; None: as they are.
    """

    def __init__(
        self,
        pictures: Pictures,
        numbers: list[int],
        *,
        encode: Callable[[int], list[int]],
        sizes: LlavaConfig,
        seq_len: int,
        room: int,
        special_tokens: SpecialTokens,
        key: int | None,
    ) -> None:
        self.special_tokens = special_tokens
        self._pictures, self._encode, self._sizes = pictures, encode, sizes
        self._length, self._room, self._key = seq_len + 1, room, key
        # A document takes as much as lets no more than `room` of them into a row.
        least = self._length // room
        lengths = [max(least, min(len(encode(n)), self._length)) for n in numbers]
        order = sorted(range(len(numbers)), key=lambda place: -lengths[place])
        rows = best_fit(
            [lengths[place] for place in order], [False] * len(order), capacity=self._length
        )
        self._rows: list[list[int]] = [[] for _ in range(1 + max(rows))]
        for place, row in zip(order, rows, strict=True):
            self._rows[row].append(numbers[place])

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = [self._row(*divmod(int(index), len(self._rows))) for index in indices]
        rows, images = zip(*drawn, strict=True)
        return np.stack(rows), np.stack(images)

    def _row(self, epoch: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        if self._key is not None:
            key = derive_key(self._key, epoch)
            place = int(permute(np.array([place]), length=len(self._rows), key=key)[0])
        sizes = self._sizes
        row = np.full(self._length, IGNORED, dtype=np.int64)
        images = np.zeros((self._room, sizes.num_patches, sizes.patch_dim), dtype=np.float32)
        filled = 0
        for image, number in zip(images, self._rows[place], strict=False):
            ids = self._encode(number)[: self._length]  # a text that is too long loses its end
            row[filled : filled + len(ids)] = ids
            filled += len(ids)
            image[:] = patches_of(self._pictures.pixels(number, side=sizes.image_size), sizes)
        return row, images


class DescribePictures(NextToken):
    """Predict the text that belongs to a picture."""

    options: TaskOptions
    described: float | None = None  # known to rank 0

    @cached_property
    def sizes(self) -> LlavaConfig:
        """Return the model's."""
        return model_config(self.config.model)

    @cached_property
    def pictures(self) -> Pictures:
        """Return all pictures, of both splits. Raises DataError."""
        return Pictures.open(self.options)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Return the tokens around a document."""
        data = self.config.data
        return SpecialTokens.of(self.tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)

    def document(self, number: int) -> list[int]:
        """Return the ids of a picture and its text."""
        text = self.tokenizer.encode(self.pictures.text(number))
        patches = [self.sizes.image_token] * self.sizes.num_patches
        return self.special_tokens.wrap([*patches, *text])

    @cached_property
    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of the pictures of each split."""
        fraction, found = self.config.data.validation_fraction, {"train": [], "validation": []}
        for number in range(self.pictures.count):
            is_held = in_validation(self.pictures.text(number), fraction=fraction)
            found["validation" if is_held else "train"].append(number)
        return found

    def seq_len(self, split: str) -> int:
        """Return the positions of a row."""
        of_validation = self.config.validation.seq_len if split == "validation" else None
        return of_validation or self.config.training.seq_len

    def samples(self, split: str, *, rank: int, world: int) -> Samples:
        numbers, config = self.numbers[split], self.config
        if not numbers:
            raise DataError(
                f"{self.options.path}: no picture for {split}; change data.validation_fraction"
            )
        shuffles = split == "train" and config.data.shuffle
        seq_len = self.seq_len(split)
        return PictureSamples(
            self.pictures,
            numbers,
            encode=self.document,
            sizes=self.sizes,
            seq_len=seq_len,
            room=self.options.images or self.sizes.images_in(seq_len),
            special_tokens=self.special_tokens,
            key=derive_key(config.debug.seed, split, "pictures") if shuffles else None,
        )

    def collate(self, samples: Samples) -> Collate:
        pack_rows = collate_rows(samples, self.config.data)

        def make(drawn: tuple[np.ndarray, np.ndarray], *, first_sample: int) -> PictureBatch:
            rows_BT, images = drawn
            batch = pack_rows(rows_BT, first_sample=first_sample)
            assert isinstance(batch, Batch)
            images = torch.from_numpy(images)
            return PictureBatch.of(batch, images, image_token=self.sizes.image_token)

        return make

    def describe(self) -> str:
        tokenizer = f"{self.tokenizer.kind}, {self.tokenizer.vocab_size:,} tokens"
        return f"{self.pictures.count:,} pictures of {self.options.path}; tokenizer {tokenizer}"

    def fake_batch(self) -> PictureBatch:
        text, sizes = super().fake_batch(), self.sizes
        seq_len = self.config.training.seq_len
        room = self.options.images or sizes.images_in(seq_len)
        shape = (len(text.tokens_BS), room, sizes.num_patches, sizes.patch_dim)
        return PictureBatch(
            **vars(text), images=torch.zeros(shape), image_index_BS=torch.zeros_like(text.tokens_BS)
        )

    def complete(self, batch: Any, *, device: torch.device, is_cut: bool) -> Batch:
        positions_BS = super().complete(batch, device=device, is_cut=is_cut).positions_BS
        return replace(batch, positions_BS=positions_BS)

    def microbatch(self, batch: Any) -> Microbatch:
        text = super().microbatch(batch)
        return replace(
            text, inputs={**text.inputs, **{name: getattr(batch, name) for name in _ROW}}
        )

    def report(self, run: Any, *, loss: float, num_valid: float, measured: float) -> dict[str, Any]:
        columns = {"bits_per_byte": loss / math.log(2) / measured if measured else None}
        return columns | ({"described": self.described} if self.options.samples else {})

    @torch.no_grad()
    def sample(self, run: Any) -> None:
        """Describe held-out pictures, with the likeliest token each time, and write them to samples/step-N.png.

        All ranks gather the weights, and rank 0 computes on one device. `described` is the share of descriptions that are the text.
        """
        numbers = self.numbers["validation"][: self.options.samples]
        if not numbers:
            return
        with torch.device("meta"):
            model = build_model(self.sizes)
        if run.rank == 0:
            materialize(model, device=run.device)
        for name, parameter in run.train_step.model_parts[0].named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if run.rank == 0:
                model.get_parameter(canonical_name(name)).copy_(whole)
        if run.rank:
            return
        sizes = self.sizes
        pixels = [self.pictures.pixels(number, side=sizes.image_size) for number in numbers]
        images = torch.from_numpy(np.stack([patches_of(image, sizes) for image in pixels]))
        found = self._describe(model.eval(), images.to(run.device))
        expected = [self.pictures.text(number) for number in numbers]
        self.described = sum(map(str.__eq__, found, expected)) / len(numbers)
        file = run.run_dir / "samples" / f"step-{run.step}.png"
        file.parent.mkdir(exist_ok=True)
        write_page(file, pixels, found, expected)

    def _describe(self, model: nn.Module, images_NPC: Tensor) -> list[str]:
        """Return a description of each picture."""
        token, stop, count = self.sizes.image_token, self.tokenizer.eos_id, len(images_NPC)
        head = [] if self.special_tokens.bos_id is None else [self.special_tokens.bos_id]
        prompt = torch.tensor([*head, *[token] * self.sizes.num_patches], device=images_NPC.device)
        tokens_NS = prompt.expand(count, -1)
        for _ in range(self.options.max_new_tokens):
            index_NS = image_index(tokens_NS, image_token=token)
            logits = model(tokens_NS, images=images_NPC[:, None], image_index_BS=index_NS)
            tokens_NS = torch.cat([tokens_NS, logits[:, -1:].argmax(dim=-1)], dim=1)
            if (tokens_NS[:, len(prompt) :] == stop).any(dim=1).all():
                break
        texts = [ids[: (*ids, stop).index(stop)] for ids in tokens_NS[:, len(prompt) :].tolist()]
        return [self.tokenizer.decode(ids) for ids in texts]


def write_page(file: Path, pixels: list[np.ndarray], found: list[str], expected: list[str]) -> None:
    """Draw pictures in four columns, each above its description, green if it is the text, else red and above the text."""
    image = require("PIL.Image", purpose="writing pictures", extra="vision")
    draw_on = require("PIL.ImageDraw", purpose="writing pictures", extra="vision").Draw
    width, height, side = 260, 170, 120
    page = image.new("RGB", (4 * width, height * -(-len(pixels) // 4)), "white")
    draw = draw_on(page)
    for number, (picture, text, truth) in enumerate(zip(pixels, found, expected, strict=True)):
        x, y = number % 4 * width + 10, number // 4 * height + 10
        page.paste(image.fromarray(picture).resize((side, side), image.NEAREST), (x, y))
        draw.text((x, y + side + 4), text[:42], fill="darkgreen" if text == truth else "darkred")
        if text != truth:
            draw.text((x, y + side + 18), truth[:42], fill="black")
    page.save(file)
