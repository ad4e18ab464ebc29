"""Optimizer in the backward pass: each parameter is updated, and its gradient freed, as soon as the gradient is complete.

So the gradients of the whole model never exist at once (LOMO, arXiv:2306.09782): with FSDP only those of one block do. The
cost: the global norm is known only after all updates, so gradients cannot be clipped by it.

Hooks run when a gradient is accumulated; FSDP2 calls them with reduced, sharded gradients. The optimizer must update
parameters one by one.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .clipping import (
    local_gradient,
    local_sum_of_squares,
    reduce_squares,
    sharding_groups,
    trained_by_groups,
)


class OptimizerInBackward:
    """Optimizer whose steps run in the backward pass.

    Attributes:
        optimizer: the optimizer.
        active: whether the next backward pass completes the gradients (the last micro-batch) or only adds to them. The
            caller sets it before each pass.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.active = optimizer, False
        self._squares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._update, group))

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        if not self.active:
            return
        # Recorded before the gradient is freed below.
        square = local_sum_of_squares([local_gradient(parameter)])
        self._squares[sharding_groups(parameter)].append(square)
        # The optimizer sees one group of one parameter for a moment.
        all_groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = all_groups
        parameter.grad = None

    def finish(self) -> Tensor:
        """Return the global gradient norm of the step that ended, as `clip_gradients` does. 0: no gradient was used."""
        # Parameters that the last micro-batch did not reach still have gradients, which are applied now.
        everything = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                everything.append(parameter)
                if parameter.grad is not None:
                    self._update(group, parameter)
        self.active = False  # a backward pass between steps updates nothing
        # Squares of parameters with one layout are reduced over the same groups, together, even if this rank has no gradients.
        squares = {}
        for groups, of_groups in trained_by_groups(everything).items():
            none = torch.zeros((), device=of_groups[0].device)
            squares[groups] = torch.stack([none, *self._squares[groups]]).sum()
        self._squares.clear()
        return reduce_squares(squares).sqrt()
