"""Tensor-parallel plan of LLaVA: Llama's for the decoder, and the patches of a picture as the encoder's sequence."""

from titan.models.common.plan import TENSOR_PLAN as LLAMA

TENSOR_PLAN: dict[str, str] = {
    "vision.embed": "cut_sequence",
    "vision.norm": "token_weights",  # a plain tensor: the residual stream begins with it
    "vision.layers.*.*_norm": "sequence",
    "vision.layers.*.attention": "gather_input",
    "vision.layers.*.attention.w[qkv]": "colwise",
    "vision.layers.*.attention.wo": "rowwise",
    "vision.layers.*.feed_forward": "gather_input",
    "vision.layers.*.feed_forward.w1": "colwise",
    "vision.layers.*.feed_forward.w2": "rowwise",
    "projector": "gather_input",
    "projector.w1": "colwise",
    "projector.w2": "rowwise",
    "projector.place": "place",
    **LLAMA,
}
