"""Hooks on the outputs of all modules of a model, plain or compiled, for recorder.py and replay.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titan.parallel.compile import is_compiled
from titan.parallel.init_weights import canonical_name

See = Callable[[str, nn.Module, Any, Any], Any]
"""Called with the name of a module in the plain model, the module, its arguments and its output. It returns a new output, or None."""


def hook_outputs(
    module: nn.Module, see: See, name: str = "", *, first: bool = False
) -> list[Callable[[], None]]:
    """Hook a module and those within. Modules within compiled code are left out: a hook would become part of its program.

    Args:
        module: the module.
        see: called with each output.
        name: name of the module in the model.
        first: whether it is called before hooks that exist, such as those of a layout.

    Returns:
        Functions that remove the hooks, to be called in reverse.
    """
    plain, compiled = canonical_name(name), module._compiled_call_impl
    if compiled is not None:

        def call(*args: Any, **kwargs: Any) -> Any:
            out = compiled(*args, **kwargs)
            changed = see(plain, module, args, out)
            return out if changed is None else changed

        state = module.__dict__
        state["_compiled_call_impl"] = call
        return [lambda: state.update(_compiled_call_impl=compiled)]
    found: list[Callable[[], None]] = []
    if not is_compiled(module):
        for child, inner in module.named_children():
            found += hook_outputs(inner, see, f"{name}.{child}" if name else child, first=first)
    hook = module.register_forward_hook(
        lambda m, args, out: see(plain, m, args, out), prepend=first
    )
    return [*found, hook.remove]


def is_recomputation() -> bool:
    """Return whether a forward pass that runs now belongs to a backward pass."""
    return torch._C._current_graph_task_id() != -1
