"""Tensor-parallel plan of gpt-oss: Llama's, the experts', and a sink for each head."""

from titan.models.common.plan import MOE_PLAN
from titan.models.common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {
    **LLAMA_PLAN,
    **MOE_PLAN,
    "layers.*.attention.sinks": "head_vector",
}
