"""Read which operations' results a selectively recomputed block keeps. Imports no torch, as configs are checked with it.

What a block keeps is a list of entries. Each names an operation ("aten.mm") or one of the groups below, and may end in

    /2      keep every second one, in the order they run in a block
    @0,3    keep the first and the fourth
    >host   keep them in host memory

The default list keeps, of a Llama block: q, v, w1 and w2, attention, and what came over the network. It runs k, o, w3 and
everything elementwise again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
    # Not all-gathers: their results are large, and gathering again overlaps with what is recomputed before.
    "network": ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
    # The largest absolute values that float8 scales by: a few numbers each, for a pass over the tensor.
    "scales": ("aten.max", "aten.amax"),
}
DEFAULT_KEEP = ("matmul/2", "attention", "network", "scales")


class SaveListError(ValueError):
    """Report that an entry has no meaning, or that an operation or a module to be kept does not exist. The message is
    for the user."""


class Rule(NamedTuple):
    """Say which results of some operations, counted together, to keep.

    every, places: keep each n-th one, or, if there are any, those at these places from 0. host: keep them in host memory.
    """

    names: tuple[str, ...]
    every: int = 1
    places: frozenset[int] = frozenset()
    host: bool = False

    def keeps(self, place: int) -> bool:
        """Return whether it keeps the operation at this place."""
        return place in self.places if self.places else place % self.every == 0


_ENTRY = re.compile(
    r"(\w+(?:\.\w+)?)(?:/([1-9]\d{0,8})|@(\d{1,8}(?:,\d{1,8})*))?(>host)?", re.ASCII
)
_BLOCKS = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?:(.*)", re.ASCII)


def parse_rule(entry: str) -> Rule:
    """Return what an entry means. Raises SaveListError; only torch knows whether an operation exists."""
    match = _ENTRY.fullmatch(entry)
    if not match or ("." not in match[1] and match[1] not in GROUPS):
        raise SaveListError(
            f'"{entry[:80]}" is no operation such as "aten.mm" and no group ({", ".join(GROUPS)}); either may end in '
            '"/2", in "@0,3", and in ">host"'
        )
    name, every, places, host = match.groups()
    # A group stands for several operations, which are counted together.
    numbers = frozenset(map(int, places.split(","))) if places else frozenset()
    return Rule(GROUPS.get(name, (name,)), int(every or 1), numbers, bool(host))


def parse_blocks(line: str) -> tuple[range, list[str] | None]:
    """Return the blocks and the entries of a line such as "8-15: aten.mm@0,2 attention". None: they keep everything.

    Raises SaveListError.
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
