"""Buckets of gradients that replica groups sum together. Imports no torch.

replica_groups.py sends them, and cost.py prices them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
_BUCKET_ELEMENTS = 2**24


def in_buckets(items: Iterable[T], num_elements: Callable[[T], int]) -> list[list[T]]:
    """Divide tensors, or stand-ins for them, into lists that are summed together.

    Args:
        items: the tensors or stand-ins.
        num_elements: function that returns the number of elements of an item.
    """
    buckets: list[list[T]] = [[]]
    for item in items:
        if sum(map(num_elements, buckets[-1])) > _BUCKET_ELEMENTS:
            buckets.append([])
        buckets[-1].append(item)
    return buckets
