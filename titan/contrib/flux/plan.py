"""Tensor-parallel plan of Flux: a style for each module, as data.

The docstring of titan.parallel.tensor explains the styles. Activations are replicated, and so are the modules that act on
them or on the time: embedder, output layer, modulations and norms. Heads and feed-forward layers are split.
"""

TENSOR_PLAN: dict[str, str] = {
    "tok_embeddings.*": "whole",
    "layers.*.modulation": "whole",
    "layers.*.heads": "whole_input",
    "layers.*.joint": "whole_input",
    "layers.*.w[qkv]": "colwise",
    "layers.*.[qk]_norm": "head_norm",
    "layers.*.w1": "colwise",
    "layers.*.joint.w[o2]": "rowwise_part",
    "layers.*.w[o2]": "rowwise_whole",
    "norm.modulation": "whole",
    "output": "whole",
}
