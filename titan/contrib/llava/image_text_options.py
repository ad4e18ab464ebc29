"""Options of training on pictures with text. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .config import LlavaConfig


@dataclass(frozen=True)
class ImageTextOptions:
    """Options of training on pictures with text.

    Attributes:
        path: a folder with captions.jsonl, whose lines have `image` (a file, relative to the folder) and `text`; or a Parquet file, or
            a folder of Parquet files.
        image_key: name of the field or column of pictures.
        text_key: name of the field or column of texts.
        images: number of pictures that a sequence has room for; 0: the most that fit.
        samples: number of held-out pictures to describe at each validation.
        max_new_tokens: longest description, in tokens.
    """

    # No sources of text; of [data] what says how documents share rows.
    reads_text: ClassVar[bool] = False
    data_keys: ClassVar[tuple[str, ...]] = (
        "add_bos",
        "add_eos",
        "document_mask",
        "reset_positions",
        "shuffle",
        "validation_fraction",
    )
    # What a run may change when it resumes: none of these is the model's.
    may_change: ClassVar[tuple[str, ...]] = (
        "path",
        "image_key",
        "text_key",
        "images",
        "samples",
        "max_new_tokens",
    )

    path: str = ""
    image_key: str = "image"
    text_key: str = "text"
    images: int = 0
    samples: int = 0
    max_new_tokens: int = 64

    def shrink(self) -> dict[str, Any]:
        """Return the keys of a small job: as many pictures as fit."""
        return {"task.options": {"images": 0, "samples": 0}}

    def missing(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each file that this machine lacks."""
        if not Path(self.path).expanduser().exists():
            yield (
                "task.options.path",
                f"'{self.path}' does not exist; scripts/draw_shapes.py draws the demo's pictures there",
            )

    def problems(self, config: Any, sizes: LlavaConfig) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each problem with a job of this task."""
        if not self.path:
            yield "task.options.path", "missing: a folder with captions.jsonl, or Parquet files"
        if config.validation.enable and not config.data.validation_fraction:
            yield "data.validation_fraction", "missing: 0.1 holds out every tenth picture"
        patches, tp = sizes.num_patches, config.parallelism.tensor_parallel_degree
        lengths = {"training.seq_len": config.training.seq_len}
        if config.validation.enable and config.validation.seq_len:
            lengths["validation.seq_len"] = config.validation.seq_len
        for key, length in lengths.items():
            if not (room := sizes.images_in(length)):
                yield (
                    key,
                    f"{length} has no room for {patches} patches and a word; use {patches + 64}",
                )
            elif self.images > room:
                yield (
                    "task.options.images",
                    f"{key} {length} has room for {room}; use at most {room}",
                )
        if sizes.image_size % sizes.patch_size:
            message = f"{sizes.patch_size} does not divide the image_size {sizes.image_size}"
            yield "model.overrides.patch_size", message
        if sizes.image_token >= sizes.vocab_size:
            message = f"{sizes.image_token} is not below the vocab_size {sizes.vocab_size}"
            yield "model.overrides.image_token", message
        for name in ("vision_heads", "vision_ffn_dim"):
            if (value := getattr(sizes, name)) % tp:
                message = f"{tp} does not divide the model's {name} {value}"
                yield "parallelism.tensor_parallel_degree", message
        if sizes.vision_dim % sizes.vision_heads:
            message = f"{sizes.vision_heads} does not divide the vision_dim {sizes.vision_dim}"
            yield "model.overrides.vision_heads", message
        if sizes.num_mtp_modules:
            yield "model.overrides.num_mtp_modules", "is for text alone; use 0"
        if self.samples and config.parallelism.pipeline_parallel_degree > 1:
            yield "task.options.samples", "a pipeline's ranks cannot describe pictures; use 0"
