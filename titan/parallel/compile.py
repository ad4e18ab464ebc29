"""Regional compilation: torch.compile for each block, so that equal blocks share one compiled program.

Compiling block by block costs one compilation for all blocks of a shape, whatever the depth of the model, and keeps
FSDP's gathering, which sits between blocks, out of the compiled graphs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def apply_compile(
    model: nn.Module,
    *,
    container: str = "layers",
    backend: str = "inductor",
    fullgraph: bool = True,
) -> None:
    """Compile every block in `model.<container>` (a ModuleDict or ModuleList), in place; names do not change.

    fullgraph: an error, rather than slower code, where a block cannot be compiled whole. Compilation happens in
    the first forward and backward pass.
    """
    for block in model.get_submodule(container).children():
        block.compile(backend=backend, fullgraph=fullgraph)


def detach_collective(module: nn.Module | None) -> None:
    """Make `module` return a plain tensor rather than a collective that is still under way.

    torch 2.13 and 2.15 lose the gradient of a vocabulary-parallel embedding without a word where its output, such a
    tensor, goes straight into a compiled block: its unwrapping there forgets requires_grad (pytorch PR 179849).
    A copy is a plain tensor. tests/parity compares every gradient under compile x TP and would see it come back.
    """
    if module is None:  # a pipeline stage without it
        return

    def copy(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.clone()

    module.register_forward_hook(copy)
