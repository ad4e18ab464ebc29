"""Tensor-parallel plan of OLMoE: Llama's, the experts', and norms over the heads of all ranks."""

from ..common.plan import MOE_PLAN
from ..common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {
    **LLAMA_PLAN,
    **MOE_PLAN,
    "layers.*.attention.q_norm": "width_norm",
    "layers.*.attention.k_norm": "width_norm",
}
