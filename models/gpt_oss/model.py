"""gpt-oss's differences from Llama: sinks, windows and biases in attention, and YaRN.

Its experts are those of models/common/moe.py with `moe_biases` and `swiglu_limit`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan.models.common.attention import InnerAttention, Sinks
from titan.models.common.rotary import yarn_frequencies
from titan.models.llama3.model import Attention as LlamaAttention
from titan.models.llama3.model import Llama

from .config import GptOssConfig


class Attention(LlamaAttention):
    """Llama's attention with biases of all projections, and a sink for each head."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config)
        for matrix in (self.wq, self.wk, self.wv, self.wo):
            matrix.bias = nn.Parameter(torch.empty(matrix.out_features))
        self.sinks = Sinks(config.n_heads)
        self.inner_attention = InnerAttention(scale=config.softmax_scale)


class GptOss(Llama):
    """Decoder of gpt-oss, from token ids to logits. Biases and sinks are initialized like matrices, as in TorchTitan."""

    config: GptOssConfig

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config, attention=Attention)

    def frequencies(self, device: torch.device) -> Tensor:
        return yarn_frequencies(self.config, self.config.head_dim, device, truncate=False)
