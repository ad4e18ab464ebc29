"""Adam and AdamW that clip and update in one pass over the parameters.

Clipping multiplies all gradients by one factor, which is known only when the norm is. A separate multiplication reads and writes
each gradient once more (8 bytes for a parameter in fp32). Here the update divides by the inverse of the factor. Bytes of an update
for each parameter in fp32, of which 4 are the norm's in all rows:

    multiplication, torch's fused kernel           4 + 8 + 28
    torch's fused kernel, which divides            4 + 32       it writes the divided gradient back

State, its layout and its names are torch's, so a checkpoint of one is one of the other. The numbers of the two differ in the last
bits only. Updates are for each element alone, so that this rank's shards are enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .states import Allocates, adam_state, begin_step, local


class FusedAdam(Allocates, torch.optim.Adam):
    """torch's fused Adam or AdamW, which clips as it updates.

    Attributes:
        divisor: what the next step divides all gradients by, a scalar on their device; None: nothing. It holds for one step.
    """

    def __init__(self, parameters: Iterable[Any], *, decoupled: bool, **options: Any) -> None:
        """Create the optimizer, without state.

        Args:
            parameters: parameters, or groups of them.
            decoupled: decay weights as AdamW does, otherwise as Adam.
            options: as in torch's Adam: lr, betas, eps, weight_decay.
        """
        super().__init__(parameters, fused=True, decoupled_weight_decay=decoupled, **options)
        self.divisor: Tensor | None = None
        self.decoupled = decoupled

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Groups of another implementation lack what this one is.
        own = {"fused": True, "foreach": None, "decoupled_weight_decay": self.decoupled}
        groups = [group | own for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict | {"param_groups": groups})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            # A kernel takes tensors of one kind.
            kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
            for parameter in begin_step(self, group):
                kinds[parameter.device, parameter.dtype].append(parameter)
            for (device, _), parameters in kinds.items():
                self._update(parameters, group, device)
        self.divisor = None
        return loss

    def init_state(self, parameter: Tensor) -> None:
        """Fill the state with zeros, laid out like the parameter."""
        # torch's fused kernels read the step on the device.
        self.state[parameter] = adam_state(parameter, step_on=parameter.device)

    def _update(
        self, parameters: list[Tensor], group: dict[str, Any], device: torch.device
    ) -> None:
        divisor = None if self.divisor is None else self.divisor.to(device, non_blocking=True)
        shards = []
        for parameter in parameters:
            state = self.state[parameter]
            weight, grad, *averages = (
                local(tensor)
                for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            )
            # torch's kernel reads all tensors in one order.
            if grad.stride() != weight.stride():
                grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
            shards.append((weight, grad, *averages))
        weights, grads, averages, squares = map(list, zip(*shards, strict=True))
        steps = [self.state[parameter]["step"] for parameter in parameters]
        update = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        update(
            weights,
            grads,
            averages,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )
