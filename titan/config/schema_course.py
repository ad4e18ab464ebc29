"""Sections about the course of a run: its phases. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import LIMIT, Positive, PositiveOrAuto, Section


class PhaseSection(Section):
    """Phase of the run: settings in force from a step or a number of tokens on.

    The first phase needs no table, since it has the job's own settings. docs/optimizers.md has the details.
    """

    from_step: Annotated[int | None, Field(ge=2, le=LIMIT)] = None
    """First step of the phase. Steps count from 1."""
    from_tokens: Annotated[int | None, Field(ge=1, le=2**62)] = None
    """In place of from_step: the phase begins with the first step that begins after so many tokens."""
    global_batch_size: Positive | None = None
    """As training.global_batch_size. Several phases make a ramp."""
    local_batch_size: Positive | None = None
    """As training.local_batch_size."""
    seq_len: Positive | None = None
    """As training.seq_len. It must divide the longest length of the job, or be that length."""
    data_parallel_replicate_degree: Positive | None = None
    """As parallelism.data_parallel_replicate_degree. Any degree may change: between two layouts the run
    saves, builds its program again in the same processes, and loads."""
    data_parallel_shard_degree: PositiveOrAuto | None = None
    """As parallelism.data_parallel_shard_degree."""
    context_parallel_degree: Positive | None = None
    """As parallelism.context_parallel_degree, for example 8 for a phase of long sequences."""
    tensor_parallel_degree: Positive | None = None
    """As parallelism.tensor_parallel_degree."""
    pipeline_parallel_degree: Positive | None = None
    """As parallelism.pipeline_parallel_degree. Schedule and stages are those of [parallelism]."""
    expert_parallel_degree: Positive | None = None
    """As parallelism.expert_parallel_degree."""
    weights: list[Annotated[float, Field(ge=0, le=1e12)]] | None = None
    """Weights of data.sources, in their order. A weight of 0 leaves a source out in this phase."""
    lr_factor: Annotated[float | None, Field(ge=0)] = None
    """Learning rate of the phase's first step, as a share of optimizer.lr. Unset: the rate goes on from
    where the schedule before it is. Any of the three keys of the rate begins a new schedule, which lasts
    until another phase begins one, or to the end of the run."""
    decay_type: Literal["constant", "linear", "sqrt", "cosine"] | None = None
    """Shape of the schedule. Unset: "linear" with min_lr_factor, "constant" without."""
    min_lr_factor: Annotated[float | None, Field(ge=0)] = None
    """Rate at the end of the schedule, one step after its last, as a share of optimizer.lr. Unset: 0, if
    decay_type is a decay."""

    @property
    def sets_rate(self) -> bool:
        """Return whether the phase begins a new schedule of the learning rate."""
        own = (self.lr_factor, self.decay_type, self.min_lr_factor)
        return any(value is not None for value in own)
