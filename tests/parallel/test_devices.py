"""Ranks use an accelerator only if it has a backend for communication."""

from __future__ import annotations

import pytest
import torch

from titan.observe.memory import peak_memory
from titan.parallel.init_distributed import usable_accelerator


@pytest.mark.parametrize(("name", "used"), [("mps", False), ("cuda", True), ("xpu", True)])
def test_ranks_use_an_accelerator_that_can_communicate(
    monkeypatch: pytest.MonkeyPatch, name: str, used: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(name))
    assert usable_accelerator() == (torch.device(name) if used else None)
    if not used:  # and nothing asks its allocator
        assert peak_memory().kind == "rss"
