"""Rules of mixtures of experts (docs/moe.md)."""

from __future__ import annotations

from titan.config.errors import Violations
from titan.config.quantize import grouped_section
from titan.config.schema import JobConfig


def check_experts(config: JobConfig) -> Violations:
    """Check the keys that change how experts run."""
    if (degree := config.parallelism.expert_tensor_parallel_degree) != 1:
        yield (
            "expert_tensor_parallel_degree",
            f"{degree} would split the matrices of each expert; use 1: the numbers are the same, and FSDP shards "
            "experts over tensor-parallel ranks, too",
        )
    model = config.model.resolved[0]
    if model is None or model.num_experts:
        return
    if grouped_section(config) is not None:
        yield "model.converters", "there are no experts to convert in this model; remove it"
    asked = config.moe.model_dump(exclude_defaults=True)
    for key in [f"moe.{key}" for key in asked] + ["debug.moe_force_load_balance"] * (
        config.debug.moe_force_load_balance
    ):
        yield key, "has no effect on a model without experts; remove it"
