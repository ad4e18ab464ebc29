"""What of OPT is split how; docs/parallelism.md lists the styles."""

TENSOR_PLAN = {
    "tok_embeddings.*": "vocab_embedding",
    "layers.*.*norm": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.w[qkv]": "columns",
    "layers.*.attention.wo": "rows",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.up": "columns",
    "layers.*.feed_forward.down": "rows",
    "norm": "sequence",
    "output": "vocab_output",
}
