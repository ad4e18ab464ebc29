"""Build the model of a job before it is laid out, and say what its pipeline stages send each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.config.model import family as import_family
from titan.config.model import model_config
from titan.config.phases import longest_sequence
from titan.config.schema import JobConfig
from titan.loss import leave_output_to_loss
from titan.parallel.float8 import Conversion
from titan.parallelize import (
    convert_to_float8,
    default_dtype,
    freeze,
    has_output_in_loss,
    torch_dtype,
)
from titan.task_loss import require_output_last


def build_whole_model(config: JobConfig, mesh: DeviceMesh) -> tuple[Any, list[Conversion]]:
    """Return the model of all stages, on meta and not laid out, and its layers that compute in 8 bits."""
    family, sizes = import_family(config.model.name), model_config(config.model)
    # On meta a model of any size costs nothing; memory is allocated after it is sharded.
    with torch.device("meta"), default_dtype(torch_dtype(config.training.dtype)):
        model = family.build_model(sizes)
        # Rotations of all positions are computed once for the run, where the family can.
        if (reserve := getattr(model, "reserve_positions", None)) is not None:
            reserve(max(longest_sequence(config), config.validation.seq_len or 0))
    # Before the split: which layers are converted is decided for the whole model.
    float8 = convert_to_float8(
        model,
        config=config,
        mesh=mesh,
        tensor_plan=family.TENSOR_PLAN,
        num_kv_heads=sizes.n_kv_heads,
    )
    freeze(model, config.model.freeze)
    if has_output_in_loss(config):
        leave_output_to_loss(model.output)
        require_output_last(model)
    return model, float8


def sent_by_stage(
    config: JobConfig, tp: int, dim: int, input: Tensor, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return what a pipeline stage sends to the next, on meta: a residual stream (B, S / tp, D), and embeddings of further tokens after it."""
    rows, length = input.shape[:2]
    if (further := inputs.get("further_targets_BSM")) is not None:
        rows *= 1 + further.shape[-1]
    dtype = torch_dtype(config.training.compute_dtype)
    return torch.empty(rows, length // tp, dim, dtype=dtype, device="meta")
