"""Sizes of Mistral 7B (arXiv:2310.06825, table 1, and the models' config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Sizes of Mistral: the fields of LlamaConfig, with a window in all layers.

    Attributes:
        window: Number of keys that a query sees, its own included. 0: all keys up to its own.
    """

    n_kv_heads: int = 8
    vocab_size: int = 32_000
    rope_theta: float = 10_000.0
    window: int = 0

    def window_of(self, layer: int) -> int:
        return self.window


_7B: Any = {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 14336}

FLAVORS: dict[str, MistralConfig] = {
    # titan's own, as Llama's of that name
    "tiny": MistralConfig(
        dim=64, n_layers=8, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=2048, window=24
    ),
    "7B-v0.1": MistralConfig(**_7B, window=4096),
    # Without a window, as v0.2, and with a larger vocabulary.
    "7B-v0.3": MistralConfig(**_7B, vocab_size=32_768, rope_theta=1_000_000.0),
}
