"""Provide LLaVA 1.5: a picture's patches, encoded and projected, stand for tokens of a Llama. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .config import FLAVORS, LlavaConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Llava
    from .task import DescribePictures

__all__ = ["FLAVORS", "TENSOR_PLAN", "LlavaConfig", "TaskOptions", "build_model", "build_task"]


def build_model(config: LlavaConfig) -> Llava:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Llava

    return Llava(config)


@dataclass(frozen=True)
class TaskOptions:
    """Say which pictures with text to train on.

    path: a folder with captions.jsonl, whose lines have `image` (a file, relative to the folder) and `text`; or a Parquet file, or
    a folder of them. image_key, text_key: names of these fields or columns. images: pictures that a row has room for; 0: as many as
    fit. samples: held-out pictures to describe at each validation, with at most max_new_tokens tokens.
    """

    # No sources of text; of [data] what says how documents share rows.
    reads_text: ClassVar[bool] = False
    data_keys: ClassVar[tuple[str, ...]] = (
        *(
            "add_bos",
            "add_eos",
            "document_mask",
            "reset_positions",
            "shuffle",
            "validation_fraction",
        ),
    )

    path: str = ""
    image_key: str = "image"
    text_key: str = "text"
    images: int = 0
    samples: int = 0
    max_new_tokens: int = 64

    def problems(self, config: Any, sizes: LlavaConfig) -> Iterator[tuple[str, str]]:
        """Yield what the job must change, as key and message."""
        if not self.path:
            yield "task.options.path", "missing: a folder with captions.jsonl, or Parquet files"
        elif not Path(self.path).expanduser().exists():
            yield "task.options.path", f"'{self.path}' does not exist"
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
        if self.samples and config.parallelism.pipeline_parallel_degree > 1:
            yield "task.options.samples", "a pipeline's ranks cannot describe pictures; use 0"


def build_task(config: Any, options: TaskOptions) -> DescribePictures:
    """Return the task."""
    from .task import DescribePictures

    return DescribePictures(config, options)
