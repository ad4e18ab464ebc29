"""Define an encoder: Llama, whose attention sees tokens on both sides."""

from __future__ import annotations

from titan.models.llama3.model import Llama, LlamaConfig


class Encoder(Llama):
    """Turn token ids into logits of the tokens at the same places."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for block in self.layers.values():
            block.attention.inner_attention.causal = False
