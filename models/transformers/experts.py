"""titan's token dispatcher in transformers' experts.

transformers keeps the experts of a layer as 3-D parameters of one module, which is called with each token's experts and weights.
`register` adds titan's way to compute them: tokens are sorted by expert, as in titan's own mixtures, and the module's attribute
`dispatcher` sends them, which expert parallelism replaces.

T tokens, D model, E experts, e experts of this rank, K experts of a token, F width of an expert; N = T K; R tokens that arrived
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan.parallel.token_order import host_counts, permute

from ..common.moe import Spread, count, grouped_mm, run_experts
from .attention import is_probing
from .errors import UnsupportedModelError

IMPLEMENTATION = "titan"
_USUAL = {"gate_up_proj", "gate_proj", "up_proj", "down_proj"}
_USUAL |= {f"{name}_bias" for name in _USUAL}


def register() -> None:
    """Register titan's experts with transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run)


def prepare_experts(model: nn.Module, parts_of: Callable[[str], int]) -> dict[str, Any]:
    """Prepare transformers' experts for dispatch, and return their modules by name.

    A fused matrix that is two matrices on disk becomes two parameters, so that a folder's tensors are rows of parameters.

    Args:
        model: The model.
        parts_of: Number of tensors on disk that hold the fused matrix of an expert, by the parameter's name.

    Raises:
        UnsupportedModelError: a module with 3-D parameters is not what transformers' interface for experts defines.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not any(p.ndim == 3 for p in own.values()) or isinstance(
            module, nn.modules.conv._ConvNd
        ):
            continue
        if not hasattr(module, "is_transposed") or own.keys() - _USUAL:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) has 3-D parameters that transformers' interface for experts does not know"
            )
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(f"{name} normalizes the output of each expert")
        experts: Any = module
        experts.dispatcher, experts.total, experts.top_k = run_experts, len(own["down_proj"]), 0
        fused = own.get("gate_up_proj")
        if fused is not None and parts_of(f"{name}.gate_up_proj") == 2:
            del experts.gate_up_proj
            for half, part in zip(("gate_proj", "up_proj"), fused.chunk(2, 1), strict=True):
                experts.register_parameter(half, nn.Parameter(part.detach().clone()))
        found[name] = experts
    return found


def _run(module: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, D).

    Args:
        module: Experts, with their parameters.
        x_TD: Tokens.
        ids_TK: Experts of each token, int64.
        weights_TK: Their weights.
    """
    if is_probing():
        module.top_k = ids_TK.shape[1]
        return torch.empty_like(x_TD)
    order_N = ids_TK.flatten().argsort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    counts_E = count(ids_TK.reshape(1, -1), module.total)[0]

    def compute(tokens_RD: Tensor, counts_e: Tensor) -> Tensor:
        return _products(module, tokens_RD, counts_e)

    tokens_ND: Any = Spread.apply(x_TD, order_N, inverse_N, ids_TK.shape[1])
    tokens_ND = module.dispatcher(tokens_ND, counts_E, compute, lambda: None)
    tokens_TKD = permute(tokens_ND, inverse_N, order_N).view(*ids_TK.shape, -1)
    y_TD = (tokens_TKD.to(weights_TK.dtype) * weights_TK[..., None]).sum(1)
    return y_TD.to(x_TD.dtype)


def _products(module: Any, tokens_RD: Tensor, counts_e: Tensor) -> Tensor:
    """Apply each expert to its tokens (R, D), which are sorted by expert: in one kernel in bf16, else expert by expert."""
    is_grouped = tokens_RD.dtype == torch.bfloat16 and len(tokens_RD) > 0
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    sizes = [0] * len(counts_e)
    if not is_grouped and len(tokens_RD):
        sizes = host_counts(counts_e, num_tokens=len(tokens_RD))

    def multiply(rows: Tensor, name: str) -> Tensor:
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
        weight = weight if module.is_transposed else weight.mT
        if is_grouped:
            rows = grouped_mm(rows, weight, ends_e)
        else:
            parts = zip(rows.split(sizes), weight.unbind(), strict=True)
            rows = torch.cat([part @ matrix for part, matrix in parts])
        if bias is None:
            return rows
        numbers = torch.arange(len(rows), dtype=ends_e.dtype, device=ends_e.device)
        return rows + bias[torch.searchsorted(ends_e, numbers, right=True)]

    names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
    names = names if module.has_gate else ("up_proj",)
    hidden_RF = torch.cat([multiply(tokens_RD, name) for name in names], dim=-1)
    hidden_RF = module._apply_gate(hidden_RF) if module.has_gate else module.act_fn(hidden_RF)
    return multiply(hidden_RF, "down_proj")
