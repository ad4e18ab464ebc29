"""Faults on purpose, for tests and drills: what TITAN_FAULT asks for happens in a run that is otherwise as ever.

TITAN_FAULT=nan:SAMPLE      the step that trains on this sample (a global number) computes NaN, on the rank that has it
TITAN_FAULT=spike:SAMPLE    ... a loss and gradients far off
TITAN_FAULT=flip:RANK:STEP  before this step, one bit of one weight flips on one rank
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from titan.config.environment import FAULT
from titan.optim.adam import local

_FACTORS = {"nan": float("nan"), "spike": 1e3}


class Fault:
    """`parts`: this rank's modules, the last of which ends the model or its pipeline stage."""

    def __init__(self, text: str, *, parts: Sequence[nn.Module], rank: int) -> None:
        if not FAULT.fullmatch(text):
            raise ValueError(
                f"TITAN_FAULT={text}: expected nan:SAMPLE, spike:SAMPLE or flip:RANK:STEP"
            )
        kind, *numbers = text.split(":")
        self.kind, self.numbers, self.parts, self.rank = (
            kind,
            [int(n) for n in numbers],
            parts,
            rank,
        )
        self.strikes = False
        if kind in _FACTORS:
            parts[-1].register_forward_hook(self._scale)

    @staticmethod
    def from_environment(*, parts: Sequence[nn.Module], rank: int) -> Fault | None:
        text = os.environ.get("TITAN_FAULT")
        return Fault(text, parts=parts, rank=rank) if text else None

    def before_step(self, step: int, samples: Sequence[range]) -> None:
        """samples: this rank's share of those the step trains on."""
        if self.kind == "flip":
            if self.numbers == [self.rank, step]:
                self._flip()
            return
        self.strikes = any(self.numbers[0] in part for part in samples)

    def _scale(self, module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output * _FACTORS[self.kind] if self.strikes and module.training else output

    @torch.no_grad()
    def _flip(self) -> None:
        weight = local(next(self.parts[0].parameters())).view(-1)[:1].view(torch.uint8)
        weight[0] ^= 1
