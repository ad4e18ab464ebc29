"""Masked language modelling (BERT, arXiv:1810.04805) as a task in a separate package, with an encoder for it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.models.llama3 import FLAVORS, TENSOR_PLAN, LlamaConfig

if TYPE_CHECKING:
    from .model import Encoder
    from .task import MaskedTokens

__all__ = ["FLAVORS", "TENSOR_PLAN", "TaskOptions", "build_model", "build_task"]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Say what is masked.

    share: of the tokens, drawn for each sample (0.3 in ModernBERT, arXiv:2412.13663). mask_id: the token in their place.
    """

    share: float = 0.3
    mask_id: int = 263

    def problems(self, config: Any, sizes: Any) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each problem with a job."""
        if not 0 < self.share < 1:
            yield "task.options.share", f"must be between 0 and 1, got {self.share:g}"
        if self.mask_id >= sizes.vocab_size:
            yield (
                "task.options.mask_id",
                f"{self.mask_id} is beyond the vocabulary of {sizes.vocab_size}",
            )


def build_model(config: LlamaConfig) -> Encoder:
    """Return the module for a size."""
    from .model import Encoder

    return Encoder(config)


def build_task(config: Any, options: TaskOptions) -> MaskedTokens:
    """Return the task of a job."""
    from .task import MaskedTokens

    return MaskedTokens(config, options)
