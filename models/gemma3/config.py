"""Sizes of Gemma 3's text models (arXiv:2503.19786, table 1, and the models' config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..common.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """Sizes of Gemma 3: the fields of LlamaConfig, with local layers between global ones.

    Attributes:
        window: Number of keys that a query of a local layer sees, its own included. 0: all keys up to its own.
        global_every: Distance of global layers, which see all keys. The first layer is local.
        rope_theta: Base of the rotary frequencies of global layers.
        rope_factor: Divisor of all frequencies of global layers. 0: none.
        rope_local_theta: Base of the rotary frequencies of local layers.
        query_pre_attn_scalar: Scores of queries and keys are divided by its square root.
    """

    vocab_size: int = 262_144
    head_dim: int = 256
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = 10_000.0
    tied_embeddings: bool = True
    window: int = 0
    global_every: int = 6
    query_pre_attn_scalar: int = 256
    num_mtp_modules: int = field(init=False, default=0)

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has a window."""
        return (layer + 1) % self.global_every != 0

    def window_of(self, layer: int) -> int:
        return self.window if self.is_local(layer) else 0

    @property
    def rope_scaling(self) -> None:
        """Return None: Gemma has no scaling of Llama's kind."""

    @property
    def num_block_norm_params(self) -> int:
        """Return the number of parameters of the norms in a block."""
        # Before and after attention and feed-forward, and over the channels of a head.
        return 4 * self.dim + 2 * self.head_dim


def _gemma3(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, **rest: Any
) -> Gemma3Config:
    return Gemma3Config(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn_dim=ffn_dim, **rest
    )


_TINY = {"vocab_size": 2048, "rope_factor": 8.0, "window": 24, "global_every": 3}
# The text parts of models that also see images.
_MULTIMODAL = {"vocab_size": 262_208, "rope_factor": 8.0, "window": 1024}

FLAVORS: dict[str, Gemma3Config] = {
    # titan's own
    "tiny": _gemma3(64, 8, 4, 2, 192, head_dim=32, query_pre_attn_scalar=24, **_TINY),
    "270M": _gemma3(640, 18, 4, 1, 2048, window=512),
    "1B": _gemma3(1152, 26, 4, 1, 6912, window=512),
    "4B": _gemma3(2560, 34, 8, 4, 10240, **_MULTIMODAL),
    "12B": _gemma3(3840, 48, 16, 8, 15360, **_MULTIMODAL),
    "27B": _gemma3(5376, 62, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168, **_MULTIMODAL),
}
