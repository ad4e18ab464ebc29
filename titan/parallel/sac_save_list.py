"""Save list of selective activation checkpointing: the operations whose results a block keeps.

The checks of a job file read it, so it imports no torch. Each entry names an operation ("aten.mm") or one of the groups
below, and may end in

    /2      keep every second call, in the order in which they run in a block
    @0,3    keep the first and the fourth call

An example: the matmuls of a Llama block run in the order q, k, v, o, w1, w3, w2, with the numbers 0 to 6.

    matmul/2            keeps 0, 2, 4, 6: q, v, w1 and w2
    matmul@1,3          keeps k and o

The default list keeps q, v, w1 and w2, attention, and the results of reduce-scatters and all-to-alls. The block runs k, o, w3
and all elementwise operations again. activation.py says how much memory that takes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from titan.base.failure import UserError

GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm", "aten._grouped_mm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_attention_math",
        "torch_attn._varlen_attn",
    ),
    # No all-gathers: their results are large, and a second all-gather overlaps with the recomputation before it.
    "network": ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
    # The largest absolute values, by which float8 scales: a few numbers each, which cost a pass over the tensor.
    "scales": ("aten.max", "aten.amax"),
}
DEFAULT_KEEP = ("matmul/2", "attention", "network", "scales")


class SaveListError(UserError, ValueError):
    """Entry without a meaning, or operation or module that does not exist. The message is for the user."""


class Rule(NamedTuple):
    """The results to keep of some operations, whose calls are counted together.

    Attributes:
        names: names of the operations.
        every: keep each n-th call, beginning with the first. Ignored if there are `places`.
        places: numbers of the calls to keep, from 0.
    """

    names: tuple[str, ...]
    every: int = 1
    places: frozenset[int] = frozenset()

    def keeps(self, place: int) -> bool:
        """Return whether the rule keeps the result of a call.

        Args:
            place: number of the call in the block, from 0.
        """
        return place in self.places if self.places else place % self.every == 0


_ENTRY = re.compile(r"(\w+(?:\.\w+)?)(?:/([1-9]\d{0,8})|@(\d{1,8}(?:,\d{1,8})*))?", re.ASCII)
_BLOCKS = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?:(.*)", re.ASCII)


def parse_rule(entry: str) -> Rule:
    """Return the rule of an entry. Only torch knows whether an operation exists.

    Args:
        entry: text such as "aten.mm@0,3".

    Raises:
        SaveListError: the entry has no meaning.
    """
    match = _ENTRY.fullmatch(entry)
    if not match or ("." not in match[1] and match[1] not in GROUPS):
        raise SaveListError(
            f'"{entry[:80]}" is no operation such as "aten.mm" and no group ({", ".join(GROUPS)}); either may end in '
            '"/2" or in "@0,3"'
        )
    name, every, places = match.groups()
    # A group stands for several operations, which are counted together.
    numbers = frozenset(map(int, places.split(","))) if places else frozenset()
    return Rule(GROUPS.get(name, (name,)), int(every or 1), numbers)


def parse_blocks(line: str) -> tuple[range, list[str] | None]:
    """Return the blocks and the entries of a line such as "8-15: aten.mm@0,2 attention".

    Args:
        line: block numbers, a colon, and entries; "all" keeps everything, and no entry keeps nothing.

    Returns:
        The numbers of the blocks, and the entries, or None if the blocks keep everything.

    Raises:
        SaveListError: the line or an entry has no meaning.
    """
    match = _BLOCKS.fullmatch(line.strip())
    if not match or int(match[1]) > int(match[2] or match[1]):
        raise SaveListError(
            f'"{line[:80]}": write blocks, a colon and what they keep, such as "8-15: aten.mm@0,2 attention"; '
            '"all" for everything, nothing for nothing'
        )
    blocks, entries = range(int(match[1]), int(match[2] or match[1]) + 1), match[3].split()
    for entry in entries if entries != ["all"] else ():
        parse_rule(entry)
    return blocks, None if entries == ["all"] else entries
