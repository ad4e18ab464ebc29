"""The model of a job before it is laid out, and the tensors that its pipeline stages exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan.base.untrusted import InputError
from titan.config.model import tensor_plan_of
from titan.losses.loss import defer_lm_head
from titan.parallel.float8 import Conversion, Float8Error, apply_float8
from titan.parallel.module_kinds import (
    GroupedExperts,
    ReservesPositions,
    is_kind,
    modules_of,
)
from titan.step.parallelize import (
    default_dtype,
    freeze,
    torch_dtype,
)
from titan.step.resolved import ResolvedJob


def build_whole_model(job: ResolvedJob) -> tuple[Any, list[Conversion]]:
    """Return the model of all stages, on meta and without a layout, and its layers that compute in 8 bits."""
    config = job.config
    # On meta a model of any size costs nothing; memory is allocated after it is sharded.
    with torch.device("meta"), default_dtype(torch_dtype(config.training.dtype)):
        model = job.family.build_model(job.sizes)
        # Rotations of all positions are computed once for the run, where the family can.
        if is_kind(model, ReservesPositions):
            model.reserve_positions(job.longest_sequence)
    # Before the split: which layers are converted is decided for the whole model.
    float8 = convert_to_float8(model, job)
    freeze(model, config.model.freeze)
    if job.techniques.output_in_loss:
        defer_lm_head(model.output)
    require_output_last(model, deferred=job.techniques.output_in_loss)
    return model, float8


def convert_to_float8(model: nn.Module, job: ResolvedJob) -> list[Conversion]:
    """Convert linear layers to float8 or MXFP8 if the job asks for it. Return the conversions.

    Raises:
        Float8Error: the layers, the schedule or the hardware do not fit the recipe.
    """
    techniques, tp = job.techniques, job.layout.tp
    if techniques.grouped is not None:
        fqns = techniques.grouped[1].fqns
        experts = modules_of(model, GroupedExperts)
        if not any(part in name for name in experts for part in fqns):
            raise Float8Error(
                f"no experts have a name with {' or '.join(fqns)}; there are {', '.join(experts) or 'none'}"
            )
    section = techniques.quantize
    if section is None:
        return []
    in_loss = {"output": "tensor-parallel ranks share it within the loss (loss.chunk_output)"}
    return apply_float8(
        model,
        recipe=section.recipe_name or "tensorwise",
        filter_fqns=section.filter_fqns,
        emulate=section.emulate,
        keep=in_loss if techniques.output_in_loss and tp > 1 else {},
        fsdp_all_gather=techniques.gathers_float8,
        tensor_plan=tensor_plan_of(model, job.family),
        tp=tp,
        num_kv_heads=job.sizes.n_kv_heads,
        fsdp_ranks=job.layout.dp_shard * job.layout.cp,
    )


def require_output_last(model: Any, *, deferred: bool) -> None:
    """Make a model raise InputError if its forward pass returns no tensor, or computes with its output layer's.

    Args:
        model: the model.
        deferred: whether the loss applies the output layer.
    """
    handed: list[Any] = []
    name = type(model).__name__  # FSDP changes it
    if deferred:
        model.output.register_forward_hook(lambda _, __, x: handed.append(x))

    def check(_: nn.Module, __: Any, result: Any) -> None:
        if not isinstance(result, Tensor):
            raise InputError(
                f"{name}.forward returned {_kind_of(result)}: titan needs a tensor alone, which the loss takes"
            )
        if handed and handed.pop() is not result:
            raise InputError(
                f"{name} computes with what its output layer returns, as for a soft cap, and the loss applies that layer "
                "itself: set loss.chunk_output = false"
            )

    model.register_forward_hook(check)


def _kind_of(result: Any) -> str:
    """Return the type of a model's output, and of its parts, for a message."""
    kind = type(result).__name__
    if isinstance(result, Mapping):
        return f"a {kind} of {', '.join(map(repr, result))}"
    if isinstance(result, list | tuple):
        return f"a {kind} of {', '.join(type(part).__name__ for part in result)}"
    return f"a {kind}"


def sent_by_stage(job: ResolvedJob, input: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that a pipeline stage sends to the next one, on meta.

    It is the residual stream (B, S / tp, D), followed along B by the embeddings of multi-token prediction.
    """
    rows, length = input.shape[:2]
    if (further := inputs.get("mtp_targets_BSM")) is not None:
        rows *= 1 + further.shape[-1]
    dtype = torch_dtype(job.config.training.compute_dtype)
    return torch.empty(rows, length // job.layout.tp, job.sizes.dim, dtype=dtype, device="meta")
