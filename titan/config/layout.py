"""Layout of a world of ranks: the degree of each axis of the mesh, and the pipeline stages.

world size = pp x dp_replicate x dp_shard x cp x tp, and a step of global_batch_size sequences is
local_batch_size x data-parallel ranks x accumulation. titan/checks/layout_rules.py has the rules
that depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from titan.parallel.stage_split import StageSplit, split_stages
from titan.parallel.traits import ends_of

from .schema import JobConfig

# Axes of the mesh and the keys of their degrees, outermost first.
AXES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, and the number of forward passes in an optimizer step (`accumulation`)."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    accumulation: int

    @property
    def dp(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())

    @property
    def degrees(self) -> dict[str, int]:
        """Return the degree of each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}


def degrees_of(config: JobConfig) -> dict[str, int]:
    """Return the degree of each axis, as the job has it."""
    return {
        axis: getattr(config.parallelism, key.rpartition(".")[2]) for axis, key in AXES.items()
    }


def layout_of(config: JobConfig, world_size: int) -> Layout:
    """Return the layout of a job's first phase, without a check."""
    degrees, training = degrees_of(config), config.training
    if degrees["dp_shard"] == -1:  # stands for all ranks that the other axes leave
        degrees["dp_shard"] = world_size // -prod(degrees.values())
    dp = degrees["dp_replicate"] * degrees["dp_shard"] * config.groups.num_groups
    accumulation = training.global_batch_size // max(1, training.local_batch_size * dp)
    return Layout(**degrees, accumulation=max(1, accumulation))


def mesh_of(config: JobConfig, layout: Layout) -> str:
    """Describe a job's mesh: its axes longer than 1, and EP."""
    ranks, ep = (
        layout.degrees.items(),
        config.parallelism.expert_parallel_degree,
    )
    mesh = " x ".join(f"{axis} {n}" for axis, n in ranks if n > 1) or "one rank"
    return mesh + f", ep {ep}" * (ep > 1)


def stage_split(config: JobConfig, *, num_layers: int, **changes: int) -> StageSplit:
    """Compute the pipeline stages of a job.

    Args:
        config: the job.
        num_layers: blocks of the model.
        **changes: other values for some keys of [parallelism], or for local_batch_size.

    Raises:
        ValueError: stages, schedule and batch do not fit each other.
        OSError: the schedule's CSV file cannot be read.
    """
    section = config.parallelism.model_copy(update=changes)
    sizes = config.model.known_sizes
    batch = changes.get("local_batch_size", config.training.local_batch_size)
    return split_stages(
        num_layers,
        num_ranks=section.pipeline_parallel_degree,
        num_microbatches=batch // section.pipeline_parallel_microbatch_size,
        schedule=section.pipeline_parallel_schedule,
        csv=section.pipeline_parallel_schedule_csv,
        layers_per_stage=section.pipeline_parallel_layers_per_stage,
        first_less=section.pipeline_parallel_first_stage_less_layers,
        # Each multi-token prediction module replaces a layer of the last stage. The key accounts for its output layer together
        # with the model's own.
        last_less=section.pipeline_parallel_last_stage_less_layers + sizes.num_mtp_modules,
        modules=section.module_fqns_per_model_part,
        ends=ends_of(sizes),
    )


def keeps_gathered(config: JobConfig, layout: Layout) -> bool:
    """Return whether FSDP keeps gathered parameters for the backward pass (ZeRO-2)."""
    policy = config.parallelism.fsdp_reshard_after_forward
    usual = layout.pp > 1 or layout.dp_shard * layout.cp == 1
    return policy == "never" or (policy == "default" and usual)
