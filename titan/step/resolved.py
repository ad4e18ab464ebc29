"""The resolved job: everything that follows from a checked config, a layout and a task.

The trainer, the simulator and the tests resolve a job once, and hand it down. So no module derives sizes, phases or techniques a
second time, and all of them agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from titan.config.base import completed
from titan.config.layout import Layout, mesh_of, stage_split
from titan.config.model import family
from titan.config.phases import Phase, longest_sequence, phases_of
from titan.config.quantize import grouped_section, quantize_section
from titan.config.schema import (
    Float8Section,
    GroupedFloat8Section,
    JobConfig,
    MXSection,
)
from titan.config.task import OptionDefaults
from titan.parallel.schedules import splits_backward
from titan.parallel.stage_split import StageSplit
from titan.tasks import task_of
from titan.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """The techniques that apply to a job, where a section alone does not say so.

    Attributes:
        loss_parallel: tensor-parallel ranks keep their vocabulary shards of the logits for the loss.
        output_in_loss: the loss applies the output layer itself, chunk by chunk (titan/losses/loss.py).
        splits_backward: the pipeline schedule computes gradients of inputs and of weights at different times.
        quantize: the section of linear layers that compute in 8 bits.
        grouped: recipe and section of experts that compute in 8 bits.
        gathers_float8: FSDP gathers weights in float8.
        precomputes_scales: scales of float8 weights are computed for all layers at once, before the forward pass.
        keeps_weights: gathered weights stay from a forward pass to its backward pass (ZeRO-2).
        compiles_blocks: blocks are compiled.
    """

    loss_parallel: bool
    output_in_loss: bool
    splits_backward: bool
    quantize: Float8Section | MXSection | None
    grouped: tuple[str, GroupedFloat8Section] | None
    gathers_float8: bool
    precomputes_scales: bool
    keeps_weights: bool
    compiles_blocks: bool


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """A checked job with everything that follows from it.

    Attributes:
        config: all sections of the job.
        family: package of the model's family, with `build_model` and `TENSOR_PLAN`.
        sizes: the model's sizes, as its family defines them.
        layout: degrees of the mesh axes.
        phases: the phases of the run, at least one.
        task: what the model is trained on.
        techniques: the techniques that apply.
    """

    config: JobConfig
    family: ModuleType
    sizes: Any
    layout: Layout
    phases: tuple[Phase, ...]
    task: Task
    techniques: Techniques

    @cached_property
    def own_phases(self) -> tuple[Phase, ...]:
        """Return the phases that this layout trains."""
        mesh = mesh_of(self.config, self.layout)
        return tuple(phase for phase in self.phases if phase.mesh == mesh)

    @cached_property
    def splits(self) -> dict[int, StageSplit]:
        """Return the pipeline stages and the schedule of each phase that this layout trains, by its number."""
        num_layers = self.sizes.n_layers
        return {p.number: stage_split(p.config, num_layers=num_layers) for p in self.own_phases}

    @cached_property
    def longest_sequence(self) -> int:
        """Return the length in tokens of the longest sequence of training and validation."""
        return max(longest_sequence(self.config), self.config.validation.seq_len or 0)


def resolve_job(
    config: JobConfig, layout: Layout, *, device: str, task: Task | None = None
) -> ResolvedJob:
    """Return a job with everything that follows from it.

    Args:
        config: the job. It must have passed titan.checks.rules, which report a user's mistakes.
        layout: of `titan.config.layout.resolve_layout`.
        device: type of the device, such as "cuda", which decides the precision that the job leaves open.
        task: the task to train on; None: the job's.
    """
    config = config.on_device(device)
    task = task or task_of(config)
    return ResolvedJob(
        config=config,
        family=family(config.model.name),
        sizes=task.sizes,
        layout=layout,
        phases=tuple(phases_of(config, world_size=layout.world_size)),
        task=task,
        techniques=_techniques(config, layout, task),
    )


def _techniques(config: JobConfig, layout: Layout, task: Task) -> Techniques:
    parallel, num_shards = config.parallelism, layout.dp_shard * layout.cp
    splits = parallel.pipeline_parallel_degree > 1 and splits_backward(
        parallel.pipeline_parallel_schedule, csv=parallel.pipeline_parallel_schedule_csv
    )
    quantize, grouped = quantize_section(config), grouped_section(config)
    # A task's own loss gets whole logits, unless its class says that it can take more.
    loss_parallel = not parallel.disable_loss_parallel and task.loss_can("knows_shards")
    applies_output = config.loss.chunk_output and task.loss_can("applies_output")
    gathers_float8 = (
        isinstance(quantize, Float8Section)
        and quantize.enable_fsdp_float8_all_gather
        and num_shards > 1
    )
    # With a pipeline, microbatches follow each other: gathering again for each would cost more. On one rank nothing is gathered,
    # and a second cast would cost more than the memory is worth.
    keeps = parallel.pipeline_parallel_degree > 1 or num_shards == 1
    return Techniques(
        loss_parallel=loss_parallel,
        output_in_loss=(
            applies_output
            and completed(task.options, OptionDefaults).predicts_tokens
            and loss_parallel
        ),
        splits_backward=splits,
        quantize=quantize,
        grouped=grouped,
        gathers_float8=gathers_float8,
        # Under TP always: FSDP alone would take the maximum of a rank's shard, and the numbers would depend on the layout.
        precomputes_scales=gathers_float8
        and (
            config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
            or layout.tp > 1
        ),
        keeps_weights={"always": False, "never": True}.get(
            parallel.fsdp_reshard_after_forward, keeps
        ),
        compiles_blocks=config.compile.enable and "model" in config.compile.components,
    )
