"""The table [average]. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from titan.config.base import NonNegative, Section


class AverageSection(Section):
    """An exponential moving average of the weights, beside them (titan/contrib/averages/average.py has the formula)."""

    enable: bool = False
    """Keep the average, in float32 and sharded as the weights are. Checkpoints hold it, and pictures or
    other samples are made with it."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Share of the average that a step keeps. The average spans about 1 / (1 - decay) steps. The first
    steps keep less."""
    start_step: NonNegative = 0
    """Up to this step, the average is a copy of the weights."""
    validate_with: bool = True
    """Validate the average. false: the weights."""

    @property
    def bytes_per_parameter(self) -> int:
        """Return the bytes of the average for each parameter, for the memory estimate."""
        return 4 if self.enable else 0
