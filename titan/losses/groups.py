"""Loss by groups of tokens, such as the sources of a blend: sums that are added up beside the loss of a step.

The number of a token's group is in the upper half of its label. So it takes every path of labels, such as the shards of context
parallelism and the microbatches of a pipeline, and no token's loss is kept.

C tokens of a chunk, G groups and one more for tokens of no group, whose number is -1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan.losses.vocabulary import IGNORED

_SHIFT = 32  # bits of a label without its group


def with_groups(labels: Tensor, groups: Tensor | int) -> Tensor:
    """Return labels, int64 of any shape, that hold the numbers of their groups."""
    return labels + groups * 2**_SHIFT


class GroupSums:
    """Sums of each group over the calls of the loss in a step or a validation.

    Attributes:
        names: names of the groups.
        count: number of groups. 0: there are none, and nothing is computed.
        sums: nothing without groups, else one tensor, fp64 (G + 1, 2): summed loss in nats and number of valid tokens.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names, self.count = names, len(names)
        self.sums: list[Tensor] = []

    def expect(self, count: int) -> None:
        """Count so many groups from the next `begin` on, whether they have names or not."""
        self.count = count

    def begin(self, device: torch.device) -> None:
        """Begin at zero."""
        # fp64 holds any number of tokens, and adds without an error that shows beside an fp32 loss.
        self.sums = []
        if self.count:
            self.sums.append(torch.zeros(self.count + 1, 2, dtype=torch.float64, device=device))

    def split(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels alone, and their groups: 0 for labels without one."""
        groups = (labels - IGNORED) >> _SHIFT
        return with_groups(labels, -groups), groups

    def add(self, losses_C: Tensor, groups_C: Tensor, is_valid_C: Tensor) -> None:
        """Add tokens."""
        numbers_C2 = torch.stack([losses_C.detach().double(), is_valid_C.double()], dim=1)
        for sums_G2 in self.sums:
            # The order of the sum is fixed on every device, as that of `index_add_` is not.
            sums_G2.index_put_((groups_C,), numbers_C2, accumulate=True)

    def columns(self, sums: Sequence[float], *, prefix: str) -> dict[str, float]:
        """Return the mean loss and the tokens of each group that has tokens, as columns of metrics.jsonl.

        Args:
            sums: the sums on the host, flat.
            prefix: begins the names of the columns.
        """
        found = {}
        for name, loss, tokens in zip(self.names, sums[::2], sums[1::2], strict=False):
            if tokens:
                found[f"{prefix}_loss/{name}"] = loss / tokens
                found[f"{prefix}_tokens/{name}"] = int(tokens)
        return found
