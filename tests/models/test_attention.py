"""Cached attention gives what the whole sequence gives."""

from __future__ import annotations

import pytest
import torch

from titan.models.attention import CachedAttention, InnerAttention


@pytest.mark.parametrize(("value_size", "scale"), [(16, None), (12, 0.7)])
def test_cache_equals_whole_sequence(value_size: int, scale: float | None) -> None:
    q, k = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 10, 16)
    v = torch.randn(1, 2, 10, value_size)
    whole = InnerAttention(scale=scale)(q, k, v)
    cached = CachedAttention(InnerAttention(scale=scale))
    parts = [cached(q[:, :, :6], k[:, :, :6], v[:, :, :6])]
    parts += [
        cached(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(6, 10)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)
    with pytest.raises(ValueError, match="one token a call"):
        cached(q[:, :, :2], k[:, :, :2], v[:, :, :2])
