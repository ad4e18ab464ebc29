"""Any causal language model of Hugging Face's `transformers` package, as a family: `model.name = "transformers"`.

The module is transformers' own. titan derives everything else from it: the tensor-parallel plan, the pipeline's ends, sizes and
counts. `config.py` describes a model, `model.py` wraps it, `plan.py` derives its plan, and `experts.py` and `attention.py`
replace transformers' experts and attention by titan's. There are no named sizes: `model.hf_path` or `model.architecture` name a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import TransformersConfig
from .resolve import resolve
from .shrink import shrink

if TYPE_CHECKING:
    from .model import TransformersModel

__all__ = ["FLAVORS", "TENSOR_PLAN", "TransformersConfig", "build_model", "resolve", "shrink"]

FLAVORS: dict[str, Any] = {}
TENSOR_PLAN: dict[str, str] = {}  # of each model, in its attribute `tensor_plan`


def build_model(config: TransformersConfig) -> TransformersModel:
    """Return the module of a model; build it under `torch.device("meta")` to allocate nothing."""
    from .model import TransformersModel

    return TransformersModel(config.source)
