"""Lists of tensors that replica groups sum together: buckets of gradients, and fragments of a model. Imports no torch.

replica_groups.py and hook.py send them, and cost.py prices them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
_BUCKET_ELEMENTS = 2**24


def in_buckets(items: Iterable[T], num_elements: Callable[[T], int]) -> list[list[T]]:
    """Divide tensors, or stand-ins for them, into lists that are summed together.

    Args:
        items: The tensors or stand-ins.
        num_elements: Function that returns the number of elements of an item.
    """
    buckets: list[list[T]] = [[]]
    for item in items:
        if sum(map(num_elements, buckets[-1])) > _BUCKET_ELEMENTS:
            buckets.append([])
        buckets[-1].append(item)
    return buckets


def in_fragments(units: Sequence[T], count: int) -> list[Sequence[T]]:
    """Divide the units of a model into `count` fragments of similar size, which synchronize in turn."""
    ends = [len(units) * number // count for number in range(count + 1)]
    return [units[a:b] for a, b in pairwise(ends)]
