"""Say what of Gemma 3 may be split how: as Llama, and its other norms. Those after a layer give plain tensors, which are added."""

from ..common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {
    **LLAMA_PLAN,
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
    "layers.*.post_attention_norm": "token_weights",
    "layers.*.post_ffn_norm": "token_weights",
}
