"""Forward passes that score texts: which rank has which text, and the length of each pass. Imports no torch.

The module's docstring of scoring.py has an example. `titan sim --run` counts the passes of evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence

UNIT = 32  # a rank's part of a sequence is a multiple of this


def plan_passes(
    inputs: Sequence[int], max_length: int, *, batch: int, world: int, unit: int
) -> list[tuple[list[int], int]]:
    """Plan the forward passes of all ranks. The docstring of scoring.py has an example.

    The length of a pass is `max_length`, halved as long as the longest text fits: there are few shapes, and all axes divide
    them.

    Args:
        inputs: number of inputs of each text.
        max_length: longest length, in tokens.
        batch: texts in one forward pass of a rank.
        world: data-parallel ranks.
        unit: number that divides a length.

    Returns:
        For each pass, the numbers of its texts, longest first, and the length that they are padded to.
    """
    order = sorted(range(len(inputs)), key=lambda n: -inputs[n])
    size = min(batch, -(-len(inputs) // world)) * world
    passes = []
    for group in (order[n : n + size] for n in range(0, len(inputs), size)):
        length = max_length
        while length % (2 * unit) == 0 and length // 2 >= inputs[group[0]]:
            length //= 2
        passes.append((group, length))
    return passes
