"""Tensors without numbers, which a simulator makes (torch's FakeTensor), beside real ones."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context in which operations compute, also where a simulator makes fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a simulator's, without numbers."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
