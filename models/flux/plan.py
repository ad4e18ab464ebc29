"""Say what of Flux may be split how, as data for titan.parallel.tensor (whose docstring explains the styles).

Activations are whole on each rank, and so is what works on them or on the time: the ends, modulations and norms. Heads and
feed-forward layers are split.
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
