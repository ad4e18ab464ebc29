"""Rates that compare a run with its hardware: TFLOP/s, and utilization over precisions. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from titan.config.quantize import grouped_section, quantize_section
from titan.config.schema import JobConfig

if TYPE_CHECKING:
    from titan.parallel.float8 import Conversion


@runtime_checkable
class StagedSizes(Protocol):
    """Sizes of a model that a job or its phases train in stages, each with other FLOPs.

    Attributes:
        index_width: channels of the queries of all indexers, which choose keys.
    """

    index_width: int

    def trained_by(self, config: JobConfig) -> Any:
        """Return the sizes in the stage of a job, or of one of its phases."""
        ...


def model_tflops(*, tokens_per_s: float, flops_per_token: float, num_ranks: int) -> float:
    """Return TFLOP/s of the model's own operations on each accelerator, without recomputation.

    Args:
        tokens_per_s: throughput of all ranks.
        flops_per_token: FLOPs of a token, forward and backward.
        num_ranks: number of accelerators.
    """
    return tokens_per_s * flops_per_token / num_ranks / 1e12


def flops_per_token(config: JobConfig, sizes: Any, *, causal: bool, length: int = 0) -> int:
    """Return the model's FLOPs per token, forward and backward, as a job or one of its phases trains it.

    Args:
        config: the job, or that of a phase.
        sizes: sizes of the model.
        causal: count only the pairs of queries and keys that a causal mask leaves.
        length: tokens of a sequence. 0: the job's.
    """
    if isinstance(sizes, StagedSizes):
        sizes = sizes.trained_by(config)
    return sizes.flops_per_token(length or config.training.seq_len, causal=causal)


def flops_by_dtype(
    config: JobConfig, sizes: Any, layers: Iterable[Conversion]
) -> dict[str, float]:
    """Return the model's FLOPs per token, forward and backward, by the precision of the matmuls.

    Args:
        config: the job.
        sizes: sizes of the model.
        layers: conversion to 8 bits of each linear layer of the whole model.
    """
    causal = config.metrics.mfu_convention == "causal"
    rest: float = flops_per_token(config, sizes, causal=causal)
    flops: dict[str, float] = {}
    if (linear := quantize_section(config)) is not None and not linear.emulate:
        recipe = linear.recipe_name or "tensorwise"
        # One of the three matmuls may stay in high precision: the gradient of the weight.
        products = 2 if recipe.endswith("gw_hp") else 3
        params = sum(math.prod(layer.shape) for layer in layers if not layer.kept)
        flops["mxfp8" if recipe.startswith("mxfp8") else "float8"] = 2.0 * products * params
    if (grouped := grouped_section(config)) is not None and not grouped[1].emulate:
        recipe, section = grouped
        names = [
            f"layers.{n}.moe.experts" for n in range(sizes.num_blocks) if sizes.is_moe_layer(n)
        ]
        count = sum(any(part in name for part in section.fqns) for name in names)
        params = count * sizes.top_k * sizes.num_expert_params
        flops[recipe] = flops.get(recipe, 0.0) + 6.0 * params
    flops[config.training.compute_dtype] = rest - sum(flops.values())
    return flops


def utilization(
    flops_per_token: Mapping[str, float],
    peak_flops: Mapping[str, float],
    *,
    tokens_per_s: float,
    num_ranks: int,
) -> float | None:
    """Return the utilization of the hardware over all precisions.

    Args:
        flops_per_token: FLOPs of a token by precision.
        peak_flops: peak FLOP/s of an accelerator by precision.
        tokens_per_s: throughput of all ranks.
        num_ranks: number of accelerators.

    Returns:
        Share of the time that the model's matmuls would take at the peak of each precision;
        None without a peak.
    """
    if not all(peak_flops.get(dtype) for dtype in flops_per_token):
        return None
    ideal_s = sum(flops / peak_flops[dtype] for dtype, flops in flops_per_token.items())
    return tokens_per_s / num_ranks * ideal_s
