"""Shards of this rank and optimizer states that are laid out like the parameters, shared by all optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallel.float8 import plain


class Allocates:
    """Mixin of an optimizer that can create the states of its parameters before their first step."""

    param_groups: list[dict[str, Any]]
    state: Any  # of torch.optim.Optimizer

    def init_state(self, parameter: Tensor) -> None:
        """Fill the state of a parameter with zeros, laid out like it."""
        raise NotImplementedError

    def allocate(self) -> None:
        """Create the missing states."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.init_state(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, without its cast of every state to the weights' precision.

        Args:
            state_dict: the saved state.
        """
        super().load_state_dict(state_dict)  # pyrefly: ignore[missing-attribute]
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for i, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                # "step" stays on the host.
                if name != "step":
                    self.state[parameter][name] = value.to(parameter.device)


def adam_state(parameter: Tensor, *, step_on: torch.device | str) -> dict[str, Tensor]:
    """Return Adam's state of a parameter before its first step.

    Args:
        parameter: the parameter.
        step_on: device of the step count.
    """
    return {
        "step": torch.zeros((), device=step_on),
        "exp_avg": torch.zeros_like(plain(parameter)),
        "exp_avg_sq": torch.zeros_like(plain(parameter)),
    }


def begin_step(optimizer: Allocates, group: dict[str, Any]) -> list[Tensor]:
    """Return a group's parameters that have gradients, after creating missing states and counting the step.

    Args:
        optimizer: the optimizer.
        group: one of its parameter groups.
    """
    parameters = [p for p in group["params"] if p.grad is not None]
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.init_state(parameter)
    if parameters:
        torch._foreach_add_([optimizer.state[p]["step"] for p in parameters], 1)
    return parameters


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's shard, sharing its memory (under no_grad)."""
    assert tensor is not None
    tensor = plain(tensor)
    # Not a Parameter, whose shape torch.compile would take for a constant.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
