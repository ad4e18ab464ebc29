"""What of Llama may be split how, as data for titan.parallel.tensor (whose docstring explains the styles)."""

TENSOR_PLAN: dict[str, str] = {
    "tok_embeddings": "vocab_embedding",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "columns",
    "layers.*.attention.wk": "kv_columns",
    "layers.*.attention.wv": "kv_columns",
    "layers.*.attention.wo": "rows",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "columns",
    "layers.*.feed_forward.w3": "columns",
    "layers.*.feed_forward.w2": "rows",
    "norm": "sequence",
    "output": "vocab_output",
}
