"""Compute the steps of Lion, Schedule-Free AdamW and SOAP on parameters that FSDP2 or tensor parallelism may have sharded.

Lion and Schedule-Free work element by element, so each rank updates its own part. SOAP multiplies whole matrices: each rank
gathers a gradient, computes the same step, and keeps its part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan.optim.optimizers import parameter_groups


def groups(parameters: Iterable[nn.Parameter], section: Any) -> Any:
    """Return the parameters, matrices with the section's decay and vectors without, at the section's rate."""
    found = parameter_groups(parameters, weight_decay=section.weight_decay)
    return [{**group, "lr": section.lr} for group in found]


# A resumed run then has scalars and factors where the parameters are (torch's convention).
_ON_DEVICE = {"lr": 1e-3, "weight_decay": 0.0, "capturable": True}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Stepper(torch.optim.Optimizer):
    """Call `update` for each parameter with a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Stepper):
    """Move by the sign of a mix of momentum and gradient."""

    def __init__(self, params: Any, *, betas: tuple[float, float]) -> None:
        super().__init__(params, {**_ON_DEVICE, "betas": betas})

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        (beta1, beta2), lr = group["betas"], group["lr"]
        weight, grad, momentum = map(local, (parameter, _grad(parameter), state["momentum"]))
        direction = momentum.lerp(grad, 1 - beta1).sign_()
        weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)


class ScheduleFree(_Stepper):
    """Keep three points: z takes AdamW's steps without momentum, x is its average, and gradients are taken at y between them.

    The model holds y. `eval` sets x, which validation reads; `train` sets y again.
    """

    def __init__(self, params: Any, *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {**_ON_DEVICE, "betas": betas, "eps": eps})
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["z"] = parameter.clone().detach()
            state["square"] = torch.zeros_like(parameter)
            # Of all steps: their number, and the sum of their weights in the average.
            state["steps"], state["total"] = (
                torch.zeros((), device=parameter.device) for _ in range(2)
            )
        (beta1, beta2), lr = group["betas"], group["lr"]
        y, grad, z, square = map(
            local, (parameter, _grad(parameter), state["z"], state["square"])
        )
        state["steps"] += 1
        square.lerp_(grad.square(), 1 - beta2)
        scale = (square / (1 - beta2 ** state["steps"])).sqrt_().add_(group["eps"])
        move = grad / scale + group["weight_decay"] * y
        # Steps of a warm-up weigh less.
        state["total"] += lr**2
        share = lr**2 / state["total"] if lr else 0.0
        x = self._average(y, z, beta1)
        z.sub_(move, alpha=lr)
        x.lerp_(z, share)
        y.copy_(z.lerp(x, beta1))

    @staticmethod
    def _average(y: Tensor, z: Tensor, beta1: float) -> Tensor:
        """Return x, of which y is the part beta1, and z the rest."""
        return (y - (1 - beta1) * z) / beta1

    @torch.no_grad()
    def eval(self) -> None:
        """Set the averages."""
        for parameter, state, group in self._with_state():
            y = local(parameter)
            self._kept.append((y, y.clone()))
            y.copy_(self._average(y, local(state["z"]), group["betas"][0]))

    @torch.no_grad()
    def train(self) -> None:
        """Set the points of the next gradients, bit for bit as they were."""
        for weight, kept in self._kept:
            weight.copy_(kept)
        self._kept.clear()

    def _with_state(self) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state[parameter]:
                    yield parameter, self.state[parameter], group


class SOAP(_Stepper):
    """Run AdamW in the basis in which the averages of G G' and G' G are diagonal. Each rank holds these factors whole.

    The first step only finds the basis.
    """

    def __init__(
        self,
        params: Any,
        *,
        betas: tuple[float, float],
        eps: float,
        basis_freq: int,
        max_dim: int,
    ) -> None:
        super().__init__(params, {**_ON_DEVICE, "betas": betas, "eps": eps})
        self.basis_freq, self.max_dim = basis_freq, max_dim

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            for name in ("mean", "square"):  # the square is that in the basis
                state[name] = torch.zeros_like(parameter)
            state["steps"] = torch.zeros((), device=parameter.device)
        grad, mean, square = map(_whole, (_grad(parameter), state["mean"], state["square"]))
        (beta1, beta2), lr = group["betas"], group["lr"]
        steps = int(state["steps"].item())
        state["steps"] += 1
        if steps:
            # In a basis from gradients before this one: its own would make it diagonal, and turn rounding into steps.
            bases = [state[name].view(dim, dim) for name, dim in self._sides(grad, "basis")]
            mean = mean.lerp(grad, 1 - beta1)
            square = square.lerp(self._turned(grad, bases).square(), 1 - beta2)
            scale = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
            move = self._turned(mean / (1 - beta1**steps), bases) / scale
            move = self._turned(move, [basis.T for basis in bases])
            for name, value in (("mean", mean), ("square", square)):
                local(state[name]).copy_(_part(value, parameter))
            weight = local(parameter).mul_(1 - lr * group["weight_decay"])
            weight.add_(_part(move, parameter), alpha=-lr)
        for name, dim in self._sides(grad, "factor"):
            product = grad @ grad.T if name == "factor0" else grad.T @ grad
            # Flat, since what has the shape of a parameter is taken to be sharded like it.
            factor = state.setdefault(name, torch.zeros_like(product).flatten())
            factor.lerp_(product.flatten(), 1 - beta2)
            if steps % self.basis_freq == 0:
                basis = torch.linalg.eigh(factor.view(dim, dim))[1]
                state[name.replace("factor", "basis")] = basis.flatten()

    def _sides(self, grad: Tensor, what: str) -> list[tuple[str, int]]:
        """Return the names of a matrix's factors or bases, and their sizes. A vector has none, and a long side neither."""
        sides = enumerate(grad.shape if grad.ndim == 2 else ())
        return [(f"{what}{side}", dim) for side, dim in sides if dim <= self.max_dim]

    def _turned(self, matrix: Tensor, bases: list[Tensor]) -> Tensor:
        """Return Q' M R for the bases Q and R of a matrix."""
        for (name, _), basis in zip(self._sides(matrix, ""), bases, strict=True):
            matrix = basis.T @ matrix if name == "0" else matrix @ basis
        return matrix


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "step looks for it"
    return parameter.grad


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of what every rank has whole."""
    if not isinstance(like, DTensor):
        return whole
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
