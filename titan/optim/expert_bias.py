"""Balancing of the experts' loads once a step: sum over ranks, move of the routing bias, and loads for the next step.

Loads are integers, so their sum, and with it the bias, is the same bits in every layout as long as routes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.models.common.moe import MoE
from titan.parallel.mesh import submesh


class ExpertBiasBalancer:
    """Balancer of the MoE modules of this rank.

    Attributes:
        counting: modules with terms of the global batch, by name: also indexers of sparse attention.
        moes: those of them with experts.
        group: ranks that hold different tokens of a step. None: no sum over ranks.
        loads: loads of the last step that ended, over all ranks, (layers, E) int64.
    """

    def __init__(self, moes: Mapping[str, Any], *, group: dist.ProcessGroup | None) -> None:
        self.counting, self.group = moes, group
        self.moes = {name: moe for name, moe in moes.items() if "loads" in moe._buffers}
        self.loads: Tensor | None = None

    @classmethod
    def of(cls, moes: Mapping[str, Any], mesh: DeviceMesh) -> ExpertBiasBalancer:
        """Return the balancer of MoE modules over the ranks of a mesh that hold different tokens.

        Args:
            moes: modules of this rank, by name.
            mesh: mesh of the layout.
        """
        axes = ("dp_replicate", "dp_shard", "cp", "tp")
        tokens = submesh(mesh, *axes, flatten=True) if moes else None
        return cls(moes, group=None if tokens is None else tokens.get_group())

    def begin(self, *, num_sequences: float, num_tokens: float) -> None:
        """Set the size of the global batch, by which the balance terms of a step are divided.

        Args:
            num_sequences: sequences of the global batch, over the scale of the loss.
            num_tokens: tokens of the global batch, over the scale of the loss.
        """
        for moe in self.counting.values():
            moe.num_sequences, moe.num_tokens = num_sequences, num_tokens

    @torch.no_grad()
    def sum_loads(self, sum_over_groups: Callable[[Sequence[Tensor]], None]) -> None:
        """Sum the loads of a step over ranks and replica groups.

        Args:
            sum_over_groups: function that sums tensors over replica groups, in place.
        """
        if not self.moes:
            return
        # One reduction for all layers.
        self.loads = loads = torch.stack([moe.loads for moe in self.moes.values()])
        if self.group is not None:
            dist.all_reduce(loads, group=self.group)
        sum_over_groups([loads])
        # Even if the step is refused: the next step counts from 0.
        torch._foreach_zero_([moe.loads for moe in self.moes.values()])

    @torch.no_grad()
    def finish(self, *, accepted: bool) -> None:
        """End a step: move the biases, unless its update was refused."""
        moes, loads = list(self.moes.values()), self.loads
        if accepted and loads is not None and isinstance(moes[0], MoE):
            torch._foreach_copy_([moe.last_loads for moe in moes], list(loads.unbind()))
            step = moes[0].config.load_balance_coeff
            move_biases([moe.bias for moe in moes], loads, step=step)


def move_biases(biases_E: Sequence[Tensor], loads_LE: Tensor, *, step: float) -> None:
    """Raise the bias of experts with less than the mean load by `step`, and lower the others' (arXiv:2408.15664).

    The mean of the moves is subtracted, since only differences between biases affect the choice of experts.

    Args:
        biases_E: bias of each layer, changed in place.
        loads_LE: loads of each layer.
        step: size of a move.
    """
    if step:
        # In integers, so that a load equal to the mean is found exactly.
        total_L1 = loads_LE.sum(-1, keepdim=True)
        moves_LE = step * (total_L1 - loads_LE * loads_LE.shape[-1]).sign().float()
        moves_LE -= moves_LE.mean(-1, keepdim=True)
        # All layers at once: launching a kernel for each would cost more than the kernels.
        torch._foreach_add_(list(biases_E), list(moves_LE.unbind()))
