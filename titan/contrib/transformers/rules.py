"""Rules of [sparse_attention]. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from titan.config.errors import RuleViolation
from titan.config.layout import stage_split
from titan.config.schema import JobConfig
from titan.parallel.schedules import SplitError

from .config import TransformersConfig
from .section import SparseAttentionSection


def check_sparse_attention(config: JobConfig) -> Iterator[RuleViolation]:
    """Check the stages against the phases, the optimizer and the model, and where a pipeline is cut."""
    job: Any = config
    section, sizes = job.sparse_attention, config.model.known_sizes
    if not isinstance(sizes, TransformersConfig) or not sizes.index_width:
        if section != SparseAttentionSection() and sizes.n_layers:
            yield (
                "stages",
                "the model has no indexer that titan knows; remove [sparse_attention]",
            )
        return
    stages, number = section.stages, 1 + len(config.phase)
    if len(stages) > number:
        yield (
            "stages",
            f"names {len(stages)} stages, and the job has {number} phases; begin each with a [[phase]]",
        )
    if "indexer" in stages and not section.loss_coeff:
        yield "loss_coeff", "is 0, and nothing would learn in the stage indexer; set it above 0"
    if {*stages} != {"joint"} and config.steps_in_backward:
        yield "stages", "freezes parameters; set optimizer.early_step_in_backward = false"
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    kinds = json.loads(sizes.source.hf).get("indexer_types") or []
    modules: list[list[str]] = []
    with suppress(ValueError, SplitError):  # other rules report it
        modules = stage_split(config, num_layers=sizes.n_layers).modules
    for stage, names in enumerate(modules[1:], 1):
        first = next((name for name in names if name.startswith("layers.")), "layers.0")
        layer = int(first.partition(".")[2])
        if kinds and kinds[layer] == "shared":
            full = max(n for n in range(layer) if kinds[n] == "full")
            yield (
                "parallelism.module_fqns_per_model_part",
                f"pipeline stage {stage} would begin with layers.{layer}, which reads the choice of layers.{full}: begin it with "
                f"layers.{full} or another layer whose indexer_types is full",
            )
