"""Say what of Mixtral may be split how: as Llama, and its experts."""

from ..llama3.plan import MOE_PLAN
from ..llama3.plan import TENSOR_PLAN as LLAMA_PLAN

TENSOR_PLAN: dict[str, str] = {**LLAMA_PLAN, **MOE_PLAN}
