"""Entry point of training on pictures with text. Imports no torch before the task is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.config.schema import JobConfig

from .image_text_options import ImageTextOptions as TaskOptions

if TYPE_CHECKING:
    from .image_text import DescribePictures

__all__ = ["TaskOptions", "build_task"]


def build_task(config: JobConfig, options: TaskOptions) -> DescribePictures:
    """Return the task of a job."""
    from .image_text import DescribePictures

    return DescribePictures(config, options)
