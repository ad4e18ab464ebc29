"""Tensor-parallel plan of DeepSeek.

Each rank computes the latents of its tokens. Heads are split over the ranks. Experts have the same styles as in other families.
"""

from titan.models.common.plan import TENSOR_PLAN as COMMON_PLAN

TENSOR_PLAN: dict[str, str] = {
    **{pattern: style for pattern, style in COMMON_PLAN.items() if ".attention" not in pattern},
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.wq": "gather_colwise",
    "layers.*.attention.wq_a": "sequence",
    "layers.*.attention.q_norm": "sequence",
    "layers.*.attention.wq_b": "gather_colwise",
    "layers.*.attention.wkv_a": "sequence",
    "layers.*.attention.kv_norm": "sequence",
    "layers.*.attention.wkv_b": "gather_colwise",
    "layers.*.attention.shared_keys": "gather_shared",
    "layers.*.attention.wo": "rowwise",
}
