"""Adam and AdamW that clip and update in one pass over the parameters.

Clipping multiplies all gradients by one factor, which is known only when the norm is. A separate multiplication reads and writes
each gradient once more (8 bytes for a parameter in fp32). Here the update divides by the inverse of the factor. Bytes of an update
for each parameter in fp32, of which 4 are the norm's in all rows:

    multiplication, torch's fused kernel           4 + 8 + 28
    torch's fused kernel, which divides            4 + 32       it writes the divided gradient back
    compiled: one kernel for each large parameter  4 + 28

State, its layout and its names are torch's, so a checkpoint of one is one of the other. The numbers of the three differ in the last
bits only. Updates are for each element alone, so that this rank's shards are enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .states import Allocates, adam_state, begin_step, local

# A shard of that many elements is worth a separate launch and a call from the host. It has rows of this length, so that a compiler
# that knows neither the number of rows nor the address still loads 16 bytes at a time.
_LARGE, _ROW = 2**16, 2**10


class FusedAdam(Allocates, torch.optim.Adam):
    """torch's fused Adam or AdamW, which clips as it updates.

    Attributes:
        divisor: what the next step divides all gradients by, a scalar on their device; None: nothing. It holds for one step.
        backend: backend of torch.compile for large parameters. Empty: they are updated by torch's kernel.
    """

    def __init__(
        self, parameters: Iterable[Any], *, decoupled: bool, backend: str = "", **options: Any
    ) -> None:
        """Create the optimizer, without state.

        Args:
            parameters: parameters, or groups of them.
            decoupled: decay weights as AdamW does, otherwise as Adam.
            backend: see the class.
            options: as in torch's Adam: lr, betas, eps, weight_decay.
        """
        super().__init__(parameters, fused=True, decoupled_weight_decay=decoupled, **options)
        self.divisor: Tensor | None = None
        self.backend, self.decoupled = backend, decoupled

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
        large, rest = [], []
        for parameter in parameters:
            state = self.state[parameter]
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            shards = [local(tensor) for tensor in tensors]
            weight, grad, *_ = shards
            if (
                grad.stride() != weight.stride()
            ):  # torch's kernel reads all tensors in one order
                shards[1] = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
            size = weight.numel()
            is_large = self.backend and size >= _LARGE and size % _ROW == 0
            is_large = is_large and all(shard.is_contiguous() for shard in shards)
            (large if is_large else rest).append((shards, state["step"]))
        if rest:
            shards, steps = zip(*rest, strict=True)
            weights, grads, averages, squares = map(list, zip(*shards, strict=True))
            update = (
                torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            )
            update(
                weights,
                grads,
                averages,
                squares,
                [],
                list(steps),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )
        if large:
            self._update_compiled(large, group, divisor)

    def _update_compiled(
        self,
        large: list[tuple[list[Tensor], Tensor]],
        group: dict[str, Any],
        divisor: Tensor | None,
    ) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        is_decoupled = group["decoupled_weight_decay"]
        # The corrections of averages that began at zero, in fp64: 1 - beta2 has few digits in fp32. On the device, where the steps are.
        steps = torch.stack([step for _, step in large]).double()
        rates = (lr / (1 - beta1**steps)).float().unbind()
        roots = (1 - beta2**steps).sqrt().float().unbind()
        kept = torch.full((), 1 - lr * decay * is_decoupled, device=steps.device)
        if divisor is None:
            divisor = torch.ones((), device=steps.device)
        update = _compiled(
            self.backend, beta1, beta2, group["eps"], 0.0 if is_decoupled else decay
        )
        for (shards, _), rate, root in zip(large, rates, roots, strict=True):
            rows = [shard.view(-1, _ROW) for shard in shards]
            for tensor in rows:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            update(*rows, divisor, kept, rate, root)


@cache
def _compiled(
    backend: str, beta1: float, beta2: float, eps: float, decay: float
) -> Callable[..., None]:
    # Not a partial: torch compiles what is no function as one function, together with other such things in models.
    def update(*tensors: Tensor) -> None:
        _update_rows(*tensors, beta1=beta1, beta2=beta2, eps=eps, decay=decay)

    return torch.compile(update, backend=backend, fullgraph=True)


def _update_rows(
    weight_NR: Tensor,
    grad_NR: Tensor,
    average_NR: Tensor,
    square_NR: Tensor,
    divisor: Tensor,
    kept: Tensor,
    rate: Tensor,
    root: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Update a parameter and its moments in place.

    Args:
        weight_NR: shard of the parameter, (N, R).
        grad_NR: its gradient before clipping, like all tensors with these letters (N, R).
        average_NR: average of gradients.
        square_NR: average of their squares.
        divisor: what gradients are divided by.
        kept: share of the weight that AdamW's decay keeps, 1 - lr * weight_decay.
        rate: lr / (1 - beta1^step).
        root: sqrt(1 - beta2^step).
        beta1: decay of the average.
        beta2: decay of the squares.
        eps: added to the denominator.
        decay: weight decay of Adam, which adds it to the gradient.
    """
    dtype = torch.promote_types(weight_NR.dtype, torch.float32)
    weight, average, square = (x.to(dtype) for x in (weight_NR, average_NR, square_NR))
    grad = grad_NR.to(dtype) / divisor
    if decay:
        grad = grad + decay * weight
    average = torch.lerp(average, grad, 1 - beta1)
    square = beta2 * square + (1 - beta2) * grad * grad
    weight_NR.copy_(kept * weight - rate * average / (square.sqrt() / root + eps))
    average_NR.copy_(average)
    square_NR.copy_(square)
