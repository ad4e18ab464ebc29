"""Balance the experts' loads once a step: sum them over ranks, move the routing bias, and keep them
for the next step.

Loads are integers, so their sum, and with it the bias, is the same bits in every layout as long as routes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.models.common.moe import MoE
from titan.parallel.mesh import submesh


class ExpertBiasBalancer:
    """Balance the MoE modules of this rank. moes: by name.

    group: ranks that hold different tokens of a step. loads: of the step that ended last, over all ranks, (layers, E) int64.
    """

    def __init__(self, moes: Mapping[str, MoE], *, group: dist.ProcessGroup | None) -> None:
        self.moes, self.group = dict(moes), group
        self.loads: Tensor | None = None

    @classmethod
    def of(cls, moes: Mapping[str, MoE], mesh: DeviceMesh) -> ExpertBiasBalancer:
        """Return the balance of these modules over the ranks of a mesh that hold different tokens."""
        axes = ("dp_replicate", "dp_shard", "cp", "tp")
        tokens = submesh(mesh, *axes, flatten=True) if moes else None
        return cls(moes, group=None if tokens is None else tokens.get_group())

    def begin(self, *, num_sequences: int, num_tokens: int) -> None:
        """Set what the balance terms of a step are divided by: the size of the global batch."""
        for moe in self.moes.values():
            moe.num_sequences, moe.num_tokens = num_sequences, num_tokens

    @torch.no_grad()
    def sum_loads(self, sum_over_groups: Callable[[Sequence[Tensor]], None]) -> None:
        """Sum the loads of a step over ranks, and over replica groups."""
        if not self.moes:
            return
        # One reduction for all layers.
        self.loads = loads = torch.stack([moe.loads for moe in self.moes.values()])
        if self.group is not None:
            dist.all_reduce(loads, group=self.group)
        sum_over_groups([loads])
        # Also after a step that is refused: the next one counts from 0.
        torch._foreach_zero_([moe.loads for moe in self.moes.values()])

    @torch.no_grad()
    def finish(self, *, accepted: bool) -> None:
        """End a step: move the biases, unless its update was refused."""
        moes, loads = list(self.moes.values()), self.loads
        if accepted and loads is not None:
            torch._foreach_copy_([moe.last_loads for moe in moes], list(loads.unbind()))
            step = moes[0].config.load_balance_coeff
            move_biases([moe.bias for moe in moes], loads, step=step)


def move_biases(biases_E: Sequence[Tensor], loads_LE: Tensor, *, step: float) -> None:
    """Raise the bias of experts with less than the mean load by `step` and lower that of others (arXiv:2408.15664).

    The mean of the moves is taken off: only differences between biases choose an expert.
    """
    if step:
        # In integers: a load equals the mean or it does not.
        total_L1 = loads_LE.sum(-1, keepdim=True)
        moves_LE = step * (total_L1 - loads_LE * loads_LE.shape[-1]).sign().float()
        moves_LE -= moves_LE.mean(-1, keepdim=True)
        # All layers at once: a kernel for each would cost the host more than they do.
        torch._foreach_add_(list(biases_E), list(moves_LE.unbind()))
