"""Parameter names of `transformers`' LlamaForCausalLM. Only names differ: layouts of the tensors are the same,
since `rotate` in model.py pairs channels as transformers does (halves, not neighbours)."""

from __future__ import annotations

import re

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def hf_name(name: str, *, block: dict[str, str] = BLOCK) -> str:
    """Name in transformers of one of our parameters. Raises KeyError for a name that is not the family's.

    block: names within a block; a family that builds on this one adds its own.
    """
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{block[match[2]]}.weight"
