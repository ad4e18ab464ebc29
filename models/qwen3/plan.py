"""Tensor-parallel plan of Qwen3: Llama's, the experts', and the norms within heads."""

from titan.models.common.plan import MOE_PLAN
from titan.models.common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {
    **LLAMA_PLAN,
    **MOE_PLAN,
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
}
