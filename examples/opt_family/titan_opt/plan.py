"""What of OPT is split how; docs/parallelism.md lists the styles."""

TENSOR_PLAN = {
    "tok_embeddings.*": "vocab_embedding",
    "layers.*.*norm": "sequence",
    "layers.*.attention": "gather_input",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward": "gather_input",
    "layers.*.feed_forward.up": "colwise",
    "layers.*.feed_forward.down": "rowwise",
    "norm": "sequence",
    "output": "vocab_output",
}
