"""titan's token dispatcher in transformers' experts.

transformers keeps the experts of a layer as 3-D parameters of one module, which is called with each token's experts and weights.
`register` adds titan's way to compute them: tokens are sorted by expert, as in titan's own mixtures, and the module's attribute
`dispatcher` sends them, which expert parallelism replaces.

T tokens, D model, E experts, e experts of this rank, K experts of a token, F width of an expert; N = T K; R tokens that arrived
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from titan.models.common import moe
from titan.models.common.dispatch import count, dispatch, in_chunks, run_experts
from titan.parallel.module_kinds import ExpertModule, is_kind, modules_of
from titan.parallel.traits import BlockTraits

from .attention import is_probing
from .errors import UnsupportedModelError
from .interface import require_known

IMPLEMENTATION = "titan"
_INNER = ("gate_up_proj", "gate_proj", "up_proj")
_USUAL = {*_INNER, "down_proj"}
_USUAL |= {f"{name}_bias" for name in _USUAL}


def register() -> None:
    """Register titan's experts with transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run)


def prepare_experts(model: nn.Module, parts_of: Callable[[str], int]) -> dict[str, Any]:
    """Prepare transformers' experts for dispatch, and return their modules by name.

    A fused matrix that is two matrices on disk becomes two parameters, so that a folder's tensors are rows of parameters.

    Args:
        model: the model.
        parts_of: number of tensors on disk that hold the fused matrix of an expert, by the parameter's name.

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
        experts.route_sources, experts.chunk_tokens = [], 0
        loads_E = torch.empty(experts.total, dtype=torch.int64)
        experts.register_buffer("loads", loads_E, persistent=False)
        for kind, function in (
            ("grouped", _grouped),
            ("combine", _combine),
            ("reset_buffers", lambda module: module.loads.zero_()),
        ):
            setattr(experts, kind, MethodType(function, experts))
        fused = own.get("gate_up_proj")
        if fused is not None and parts_of(f"{name}.gate_up_proj") == 2:
            del experts.gate_up_proj
            for half, part in zip(("gate_proj", "up_proj"), fused.chunk(2, 1), strict=True):
                experts.register_parameter(half, nn.Parameter(part.detach().clone()))
        experts.names = tuple(name for name, p in experts.named_parameters() if p is not None)
        found[name] = experts
    return found


def traits_of_experts(block: nn.Module) -> BlockTraits:
    """Return the functions of a block with experts to compile: all modules but those around the experts, and the products."""
    compiled = [
        f"{name}.forward"
        for name, child in block.named_children()
        if not modules_of(child, ExpertModule)
    ]
    recomputed = []
    for path, module in block.named_modules():
        if is_kind(module, ExpertModule):
            parent = path.rpartition(".")[0]
            beside = [
                name
                for name, m in block.get_submodule(parent).named_children()
                if m is not module
            ]
            compiled += [f"{parent}.{name}.forward" for name in beside if parent]
            recomputed += [f"{path}.grouped", f"{path}.combine"]
    return BlockTraits(
        compiled=(*compiled, *recomputed),
        varying=frozenset(recomputed[::2]),
        recomputed=frozenset(recomputed),
    )


def _run(
    module: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *rest: Any, **others: Any
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, D).

    Args:
        module: experts, with their parameters.
        x_TD: tokens.
        ids_TK: experts of each token, int64.
        weights_TK: their weights.
        rest: arguments that titan does not know, which are refused.
        others: keyword arguments that are refused.
    """
    require_known("experts", type(module).__name__, rest, others)
    if is_probing():
        module.top_k = ids_TK.shape[1]
        return torch.empty_like(x_TD)
    for source in module.route_sources:
        ids_TK = ids_TK if (kept_TK := source.get(module, x_TD)) is None else kept_TK
        source.put(module, ids_TK)

    def run(tokens_ND: Tensor, counts_E: Tensor) -> Tensor:
        return module.dispatcher(tokens_ND, counts_E, compute, lambda: None)

    def compute(tokens_RD: Tensor, counts_e: Tensor) -> Tensor:
        is_grouped = tokens_RD.dtype == torch.bfloat16 and len(tokens_RD) > 0
        products = module.grouped if is_grouped else partial(_one_by_one, module)
        weights = [getattr(module, name) for name in module.names]
        return in_chunks(products, module.chunk_tokens, tokens_RD, counts_e, *weights)

    tokens_TKD = dispatch(x_TD, ids_TK, module.total, run)
    y_TD = _CountLoads.apply(module.combine(tokens_TKD, weights_TK), ids_TK, module)
    return y_TD.to(x_TD.dtype)


class _CountLoads(torch.autograd.Function):
    """Identity on the output of experts, whose backward pass counts their loads: once for each micro-batch, see common/moe.py."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, ids_TK: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(ids_TK)
        ctx.module = module
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ids_TK, *_ = ctx.saved_tensors
        ctx.module.loads += count(ids_TK.reshape(1, -1), ctx.module.total)[0]
        return (*grads, None, None)


def _combine(_: Any, tokens_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    return (tokens_TKD.to(weights_TK.dtype) * weights_TK[..., None]).sum(1)


def _grouped(module: Any, tokens_RD: Tensor, counts_e: Tensor, *weights: Tensor) -> Tensor:
    """Apply each expert to its tokens (R, D), sorted by expert, by one kernel for all experts (bf16 only)."""
    ends_e = counts_e.cumsum(0, dtype=torch.int32)

    def multiply(rows: Tensor, matrices: Tensor) -> Tensor:
        return moe.grouped_mm(rows, matrices, ends_e)

    return _products(module, multiply, tokens_RD, ends_e, weights)


def _one_by_one(module: Any, tokens_RD: Tensor, counts_e: Tensor, *weights: Tensor) -> Tensor:
    """Return the result of `_grouped` expert by expert, in any precision."""
    rows = len(tokens_RD)
    # By that name, the simulator replaces the counts, which it does not have.
    sizes = moe.host_counts(counts_e, num_tokens=rows) if rows else [0] * len(counts_e)

    def multiply(rows: Tensor, matrices: Tensor) -> Tensor:
        parts = zip(rows.split(sizes), matrices.unbind(), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])

    return _products(module, multiply, tokens_RD, counts_e.cumsum(0), weights)


def _products(
    module: Any,
    multiply: Callable[[Tensor, Tensor], Tensor],
    tokens_RD: Tensor,
    ends_e: Tensor,
    weights: Sequence[Tensor],
) -> Tensor:
    given = dict(zip(module.names, weights, strict=True))

    def layer(rows: Tensor, name: str) -> Tensor:
        matrices, bias = given[name], given.get(f"{name}_bias")
        rows = multiply(rows, matrices if module.is_transposed else matrices.mT)
        if bias is None:
            return rows
        numbers = torch.arange(len(rows), dtype=ends_e.dtype, device=ends_e.device)
        return rows + bias[torch.searchsorted(ends_e, numbers, right=True)]

    names = [name for name in module.names if name in _INNER]
    hidden_RF = torch.cat([layer(tokens_RD, name) for name in names], dim=-1)
    hidden_RF = module._apply_gate(hidden_RF) if module.has_gate else module.act_fn(hidden_RF)
    return layer(hidden_RF, "down_proj")
