"""The table [sparse_attention]. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from titan.config.base import Section

Stages = Annotated[list[Literal["dense", "indexer", "joint"]], Field(min_length=1)]


class SparseAttentionSection(Section):
    """Training of models whose layers choose their keys by an indexer (docs/models.md)."""

    by_phase: ClassVar[tuple[str, ...]] = ("stages",)

    loss_coeff: Annotated[float, Field(ge=0)] = 0.001
    """Factor of the indexer's loss: the KL divergence, in nats for each token, from the mean attention of the heads to the
    indexer's scores. The job's loss does not contain it. 0: the indexer does not learn."""
    stages: Stages = ["joint"]
    """Stage of each phase, in their order. The last one goes on. "dense": attention sees all keys, and the indexer is frozen.
    "indexer": it sees all keys, and all but the indexer is frozen. "joint": it sees the chosen keys, and all is trained."""
