"""Say what of Mixtral may be split how: as Llama, and its experts."""

from ..common.plan import MOE_PLAN
from ..common.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {**LLAMA_PLAN, **MOE_PLAN}
