"""Write a small Llama as Hugging Face publishes them: `python tests/support/tiny_llama.py FOLDER`.

Its sizes are those of titan's flavor "tiny". It stands for a downloaded model on the pages of the documentation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN = 2048, 64, 8, 4, 2, 192


def write(folder: Path) -> None:
    random = np.random.default_rng(0)
    kv_dim = DIM // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (DIM, DIM),
        "self_attn.k_proj": (kv_dim, DIM),
        "self_attn.v_proj": (kv_dim, DIM),
        "self_attn.o_proj": (DIM, DIM),
        "mlp.gate_proj": (HIDDEN, DIM),
        "mlp.up_proj": (HIDDEN, DIM),
        "mlp.down_proj": (DIM, HIDDEN),
        "input_layernorm": (DIM,),
        "post_attention_layernorm": (DIM,),
    }
    tensors = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    tensors |= {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM)}
    tensors |= {"model.norm.weight": (DIM,)}
    folder.mkdir(parents=True)
    save_file(
        {
            name: np.ones(shape, np.float32)
            if len(shape) == 1
            else 0.02 * random.standard_normal(shape, np.float32)
            for name, shape in tensors.items()
        },
        folder / "model.safetensors",
    )
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": HIDDEN,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
