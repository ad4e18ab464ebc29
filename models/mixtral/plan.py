"""Tensor-parallel plan of Mixtral: Llama's, and the experts'."""

from ..common.plan import MOE_PLAN
from ..common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {**LLAMA_PLAN, **MOE_PLAN}
