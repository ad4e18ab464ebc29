"""Sizes of the Llama 3 family (arXiv:2407.21783 and the model cards of 3.1 and 3.2). Imports no torch."""

from __future__ import annotations

from titan.models.common.config import LlamaConfig, flavors_by

_sizes = "dim n_layers n_heads n_kv_heads ffn_dim"
_llama = flavors_by(_sizes, LlamaConfig)
_small = flavors_by(f"{_sizes} vocab_size", LlamaConfig, rope_theta=10_000.0)
FLAVORS: dict[str, LlamaConfig] = {
    # titan's own. 8 layers, so that every pipeline schedule has a stage for each rank.
    "tiny": _llama(64, 8, 4, 2, 192, vocab_size=2048),
    # The demo's: learns from bytes on two CPU cores in two minutes.
    "demo": _small(192, 4, 6, 2, 512, 264),
    # Writes whole words after a minute on two CPU cores, with a vocabulary of its text.
    "1M": _small(128, 2, 2, 1, 384, 2048),
    "10M": _small(320, 6, 5, 5, 896, 2048),
    # TorchTitan v0.2.2's, which scales the frequencies of this one too
    "debugmodel": _llama(256, 6, 16, 16, 768, vocab_size=2048, rope_factor=8.0),
    # For research on one GPU, as wide and deep as GPT-2 small and medium, with room for its tokenizer's 50,257 ids
    "125M": _small(768, 12, 12, 12, 2048, 50_304, tied_embeddings=True),
    "350M": _small(1024, 24, 16, 16, 2816, 50_304, tied_embeddings=True),
    # Llama 3.2
    "1B": _llama(2048, 16, 32, 8, 8192, rope_factor=32.0, tied_embeddings=True),
    "3B": _llama(3072, 28, 24, 8, 8192, rope_factor=32.0, tied_embeddings=True),
    # Llama 3.1 and, with rope_factor = 0 (the first release), 3
    "8B": _llama(4096, 32, 32, 8, 14336, rope_factor=8.0),
    "70B": _llama(8192, 80, 64, 8, 28672, rope_factor=8.0),
    "405B": _llama(16384, 126, 128, 8, 53248, rope_factor=8.0),
}
