"""Pictures with text, the task of vision-language models.

A document is a begin token, the patches of a picture, its text and an end token. Several documents share a sequence, packed best-fit
once for all epochs. Labels of patches and padding are IGNORED, so that the divisor of the loss counts text alone. A hash of its text
decides whether a picture is held out for validation, as for documents of text.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from titan.base.run_writer import run_files
from titan.base.untrusted import InputError, open_regular, read_lines
from titan.config.plug_ins import load_plug_in, plug_ins
from titan.data import DataError, require
from titan.data.base import Samples, TensorBatch
from titan.data.best_fit import best_fit
from titan.data.files import PARQUET, find_files
from titan.data.loader import Collate
from titan.data.order import derive_key, permute
from titan.data.packing import Batch
from titan.data.reading import field, read_row
from titan.data.sources import in_validation
from titan.data.special_tokens import SpecialTokens, begin_ids
from titan.data.text import collate_rows
from titan.losses.loss import IGNORED
from titan.numerics.digests import whole
from titan.parallel import materialize
from titan.parallel.init_weights import canonical_name
from titan.tasks.base import Microbatch, SampleContext
from titan.tasks.next_token import NextToken
from titan.tools.generation import Generator
from titan.tools.pictures import read_picture

from .config import LlavaConfig
from .huggingface import IMAGE_MEAN, IMAGE_STD
from .image_text_options import ImageTextOptions
from .model import Llava

_DRAWN = 24  # at most, of the pictures that are described


@dataclass(frozen=True, kw_only=True)
class PictureBatch(Batch):
    """A micro-batch of text with pictures.

    Attributes:
        images: patches (B, I, P, C) fp32, zeros where a sequence has fewer pictures.
        image_index_BS: as for `Llava`.
    """

    ALONG_SEQUENCE: ClassVar[tuple[str, ...]] = (*Batch.ALONG_SEQUENCE, "image_index_BS")

    images: Tensor
    image_index_BS: Tensor

    @classmethod
    def of(cls, batch: Batch, images: Tensor, *, image_token: int) -> PictureBatch:
        """Return packed sequences with their pictures, whose patches are `image_token` in the sequences."""
        batch.labels_BS[batch.labels_BS == image_token] = IGNORED
        index_BS = image_index(batch.tokens_BS, image_token=image_token)
        return cls(**vars(batch), images=images, image_index_BS=index_BS)


def image_index(tokens_BS: Tensor, *, image_token: int) -> Tensor:
    """Return the index of the patch at each position, int64 (B, S), -1 where there is text."""
    is_patch_BS = tokens_BS == image_token
    return torch.where(is_patch_BS, is_patch_BS.cumsum(dim=1) - 1, -1)


def patches_of(pixels: ndarray, config: LlavaConfig) -> ndarray:
    """Return the patches of a picture, from uint8 (height, width, 3) to fp32 (P, C): row by row, the colours of a patch first."""
    side, normal = config.patch_size, (pixels / 255 - IMAGE_MEAN) / IMAGE_STD
    across = config.image_size // side
    cut = normal.reshape(across, side, across, side, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(config.num_patches, -1).astype(np.float32)


@dataclass(frozen=True)
class Pictures:
    """Texts, each with the file of its picture below `root`, or with the bytes of its picture as a value of Arrow."""

    root: Path
    texts: list[str]
    files: Sequence[Any]

    @staticmethod
    def open(options: ImageTextOptions) -> Pictures:
        """Open the data of a job.

        Raises:
            DataError: they cannot be read.
        """
        where, keys = Path(options.path).expanduser(), (options.text_key, options.image_key)
        captions = where / "captions.jsonl"
        if not captions.is_file():
            files, _ = find_files(str(where), endings=PARQUET)
            datasets = require("datasets", purpose=f"reading {where}")
            # Mapped from datasets' cache, not read as a whole.
            table = datasets.Dataset.from_parquet([str(file) for file in files]).data
            if missing := {*keys} - {*table.column_names}:
                known = ", ".join(table.column_names)
                raise DataError(f"{where}: no column '{min(missing)}'; its columns are {known}")
            texts, images = map(table.column, keys)
            return Pictures(where, texts.to_pylist(), images)
        try:
            numbered = [(f"{captions}:{n}", line) for n, line in read_lines(captions)]
        except InputError as error:
            raise DataError(str(error)) from error
        lines = [(read_row(line.encode(), where=place), place) for place, line in numbered]
        rows = [tuple(field(row, key, where=place) for key in keys) for row, place in lines]
        return Pictures(where, [text for text, _ in rows], [where / name for _, name in rows])

    def pixels(self, number: int, *, side: int) -> ndarray:
        """Return the middle square of a picture, uint8 (side, side, 3), as CLIP prepares it.

        Raises:
            DataError: the picture cannot be read.
        """
        source, image = (
            self.files[number],
            require("PIL.Image", purpose="pictures", extra="vision"),
        )
        try:
            if isinstance(source, Path):
                file = open_regular(source, within=self.root)
            else:
                value = source.as_py()
                file = io.BytesIO(value["bytes"] if isinstance(value, dict) else value)
            with file:
                opened = read_picture(file, "RGB")
        except Exception as error:  # many kinds, of files that anyone may have written
            where = source if isinstance(source, Path) else f"{self.root}, picture {number}"
            raise DataError(f"{where}: cannot be read: {error}") from error
        if opened.size != (side, side):
            scale = side / min(opened.size)
            # The longer side rounds down, as in transformers.
            opened = opened.resize([int(n * scale + 1e-6) for n in opened.size], image.BICUBIC)
            left, top = ((n - side) // 2 for n in opened.size)
            opened = opened.crop((left, top, left + side, top + side))
        return np.asarray(opened)


class PictureSamples(Samples):
    """Dataset of packed documents with pictures: int64 (B, S + 1) and fp32 (B, I, P, C), in another order each epoch."""

    def __init__(
        self, task: DescribePictures, numbers: list[int], *, seq_len: int, key: int | None
    ) -> None:
        """Pack the documents.

        Args:
            task: the task.
            numbers: numbers of the pictures.
            seq_len: length of a sequence.
            key: key of the epochs' orders; None: the order is always the same.
        """
        self.special_tokens = task.special_tokens
        self._task, self._length, self._key = task, seq_len + 1, key
        # The least length of a document, so that at most `room` documents fit into a sequence.
        least = self._length // task.room(seq_len)
        lengths = {n: max(least, min(len(task.document(n)), self._length)) for n in numbers}
        longest_first = sorted(numbers, key=lambda number: -lengths[number])
        rows = best_fit(
            [lengths[n] for n in longest_first], [False] * len(numbers), capacity=self._length
        )
        self._rows: list[list[int]] = [[] for _ in range(1 + max(rows))]
        for number, row in zip(longest_first, rows, strict=True):
            self._rows[row].append(number)

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    def get(self, indices: ndarray) -> tuple[ndarray, ndarray]:
        sizes, length = self._task.sizes, self._length
        rows_BT = np.full((len(indices), length), IGNORED, dtype=np.int64)
        shape = (len(indices), self._task.room(length - 1), sizes.num_patches, sizes.patch_dim)
        images = np.zeros(shape, dtype=np.float32)
        for row_T, images_IPC, index in zip(rows_BT, images, indices.tolist(), strict=True):
            epoch, place = divmod(index, len(self._rows))
            if self._key is not None:
                key, places = derive_key(self._key, epoch), np.array([place])
                place = int(permute(places, length=len(self._rows), key=key)[0])
            filled = 0
            for image_PC, number in zip(images_IPC, self._rows[place], strict=False):
                ids = self._task.document(number)[
                    :length
                ]  # a text that is too long loses its end
                row_T[filled : filled + len(ids)] = ids
                filled += len(ids)
                image_PC[:] = self._task.patches(number)
        return rows_BT, images


class DescribePictures(NextToken):
    """Prediction of the text that belongs to a picture."""

    options: ImageTextOptions
    described: float | None = None  # known to rank 0

    @cached_property
    def pictures(self) -> Pictures:
        """Return the pictures of both splits. Raises DataError."""
        return Pictures.open(self.options)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Return the tokens around a document."""
        data = self.config.data
        return SpecialTokens.of(self.tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)

    def room(self, seq_len: int) -> int:
        """Return the number of pictures that a sequence has room for."""
        return self.options.images or self.sizes.images_in(seq_len)

    def document(self, number: int) -> list[int]:
        """Return the ids of a picture and its text."""
        text = self.tokenizer.encode(self.pictures.texts[number])
        return self.special_tokens.wrap(
            [self.sizes.image_token] * self.sizes.num_patches + text
        )

    def patches(self, number: int) -> ndarray:
        """Return a picture, fp32 (P, C)."""
        pixels = self.pictures.pixels(number, side=self.sizes.image_size)
        return patches_of(pixels, self.sizes)

    @cached_property
    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of the pictures of each split."""
        fraction, found = self.config.data.validation_fraction, {"train": [], "validation": []}
        for number, text in enumerate(self.pictures.texts):
            is_held = in_validation(text, fraction=fraction)
            found["validation" if is_held else "train"].append(number)
        return found

    def dataset(self, split: str, *, rank: int, world: int) -> Samples:
        numbers, config = self.numbers[split], self.config
        if not numbers:
            fix = "change data.validation_fraction"
            raise DataError(f"{self.options.path}: no picture for {split}; {fix}")
        is_training = split == "train"
        own_length = None if is_training else config.validation.seq_len
        shuffles = is_training and config.data.shuffle
        key = derive_key(config.debug.seed, "pictures") if shuffles else None
        seq_len = own_length or config.training.seq_len
        return PictureSamples(self, numbers, seq_len=seq_len, key=key)

    def collate(self, samples: Samples) -> Collate:
        pack_rows = collate_rows(samples, self.config.data)

        def make(drawn: tuple[ndarray, ndarray], *, first_sample: int) -> PictureBatch:
            rows_BT, images = drawn
            batch: Any = pack_rows(rows_BT, first_sample=first_sample)
            token = self.sizes.image_token
            return PictureBatch.of(batch, torch.from_numpy(images), image_token=token)

        return make

    def _inputs(self, images: Tensor, tokens_BS: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs beside the tokens: pictures, and the patch at each position."""
        index_BS = image_index(tokens_BS, image_token=self.sizes.image_token)
        return {"images": images.to(tokens_BS.device), "image_index_BS": index_BS}

    def describe(self) -> str:
        tokenizer = f"{self.tokenizer.kind}, {self.tokenizer.vocab_size:,} tokens"
        return f"{len(self.pictures.texts):,} pictures of {self.options.path}; tokenizer {tokenizer}"

    def fake_batch(self) -> PictureBatch:
        text, sizes = super().fake_batch(), self.sizes
        room = self.room(self.config.training.seq_len)
        shape = (len(text.tokens_BS), room, sizes.num_patches, sizes.patch_dim)
        return PictureBatch(
            **vars(text),
            images=torch.zeros(shape),
            image_index_BS=torch.zeros_like(text.tokens_BS),
        )

    def random_batch(self, seed: int) -> TensorBatch:
        """Return random text, with a picture at the beginning of every other sequence."""
        samples: Any = SimpleNamespace(special_tokens=SpecialTokens(None, 1))
        rows_BT, token = self.random_rows(seed), self.sizes.image_token
        rows_BT[rows_BT == token] = 2
        rows_BT[::2, : self.sizes.num_patches] = token
        random = np.random.default_rng(seed)
        images = random.random(self.fake_batch().images.shape, dtype=np.float32)
        return self.collate(samples)((rows_BT, images), first_sample=0)

    def complete(self, batch: Any, *, device: torch.device, is_cut: bool) -> Batch:
        positions_BS = super().complete(batch, device=device, is_cut=is_cut).positions_BS
        return replace(batch, positions_BS=positions_BS)

    def microbatch(self, batch: Any) -> Microbatch:
        text = super().microbatch(batch)
        pictures = {"images": batch.images, "image_index_BS": batch.image_index_BS}
        return replace(text, inputs={**text.inputs, **pictures})

    def report(
        self, run: SampleContext, *, loss: float, num_valid: float, measured: float
    ) -> dict[str, Any]:
        columns = {"bits_per_byte": loss / math.log(2) / measured if measured else None}
        return columns | ({"described": self.described} if self.options.samples else {})

    def prompt_with(self, file: Path, text: str) -> tuple[list[int], Callable[[Tensor], Any]]:
        """Return a prompt with the picture of a file: at the image token's name in the text, or before the text.

        Raises:
            DataError: the text names several pictures, or the file cannot be read.
        """
        tokenizer, token = self.tokenizer, self.sizes.image_token
        names = [
            name for name, i in tokenizer.special_ids.items() if i == token and name in text
        ]
        if names:
            ids = tokenizer.encode_rendered(text)[0]
            if ids.count(token) != 1:
                raise DataError(f"--prompt: takes one {names[0]}, of the one picture")
        else:
            ids = [token, *tokenizer.encode(text)]
        place = ids.index(token)
        ids[place : place + 1] = [token] * self.sizes.num_patches
        begin = begin_ids(tokenizer, add_bos=self.config.data.add_bos)
        pixels = Pictures(file.parent, [text], [file]).pixels(0, side=self.sizes.image_size)
        images = torch.from_numpy(patches_of(pixels, self.sizes))[None, None]
        return [*(begin or ()), *ids], partial(self._inputs, images)

    @torch.no_grad()
    def generate(self, run: SampleContext) -> None:
        """Describe held-out pictures greedily.

        All ranks gather the weights, and rank 0 computes alone. `described` becomes the share of descriptions that equal the text. An
        entry point `captions` of the group `titan.pictures` draws them into samples/step-N.png.
        """
        numbers = self.numbers["validation"][: self.options.samples]
        if not numbers:
            return
        with torch.device("meta"):
            model = Llava(self.sizes)
        if run.rank == 0:
            materialize(model, device=run.device)
        for name, parameter in run.train_step.model_parts[0].named_parameters():
            value = whole(parameter)
            if run.rank == 0:
                model.get_parameter(canonical_name(name)).copy_(value)
        if run.rank:
            return
        images = torch.from_numpy(np.stack([self.patches(number) for number in numbers]))
        found = self._describe(model.eval(), images.to(run.device))
        expected = [self.pictures.texts[number] for number in numbers]
        self.described = sum(map(str.__eq__, found, expected)) / len(numbers)
        pixels = [self.pictures.pixels(n, side=self.sizes.image_size) for n in numbers[:_DRAWN]]
        for entry in plug_ins("titan.pictures"):
            if entry.name == "captions":
                draw = load_plug_in(entry)
                run_files(run.run_dir).make(
                    f"samples/step-{run.step}.png",
                    lambda file, draw=draw: draw(file, pixels, found, expected),
                )

    def _describe(self, model: nn.Module, images_NPC: Tensor) -> list[str]:
        """Return a description of each picture."""
        head = [] if self.special_tokens.bos_id is None else [self.special_tokens.bos_id]
        prompt = [*head, *[self.sizes.image_token] * self.sizes.num_patches]
        most, stop = self.options.max_new_tokens, {self.tokenizer.eos_id}
        generator = Generator(model=model, max_new_tokens=most, stop=stop)
        inputs = partial(self._inputs, images_NPC[:, None])
        found = generator.complete([prompt] * len(images_NPC), inputs_of=inputs)
        return [self.tokenizer.decode(ids) for ids in found]
