"""Tensor-parallel plan of Gemma 3: Llama's, and the additional norms.

Norms after attention and feed-forward return plain tensors, which are added to the residual stream.
"""

from ..common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {
    **LLAMA_PLAN,
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
    "layers.*.post_attention_norm": "token_weights",
    "layers.*.post_ffn_norm": "token_weights",
}
