"""Tensor-parallel plan of Llama: a style for each module, as data.

The docstring of titan.parallel.tensor explains the styles.
"""

TENSOR_PLAN: dict[str, str] = {
    "tok_embeddings": "vocab_embedding",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather_input",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "kv_colwise",
    "layers.*.attention.wv": "kv_colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_input",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "vocab_output",
    **dict.fromkeys(("layers.*.enorm", "layers.*.hnorm", "layers.*.head_norm"), "sequence"),
    "layers.*.eh_proj": "token_weights",
    # Norms of each head's queries and keys, as in Qwen3, and sinks, as in gpt-oss
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
    "layers.*.attention.sinks": "head_vector",
    # Blocks with experts, which expert parallelism and FSDP split
    "layers.*.moe": "tokens",
    "layers.*.moe.router.gate": "token_weights",
    "layers.*.moe.experts": "experts",
    "layers.*.moe.shared_experts": "gather_input",
    "layers.*.moe.shared_experts.w1": "colwise",
    "layers.*.moe.shared_experts.w3": "colwise",
    "layers.*.moe.shared_experts.w2": "rowwise",
}
