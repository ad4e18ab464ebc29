"""Random numbers in forward passes, such as those of dropout: which modules draw some, and where that cannot be right."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.dropout import _DropoutNd

from .init_weights import canonical_name


def drawing_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that draw random numbers in training, as far as their class or an attribute says so: dropout, or a
    number above 0 whose name has "drop" in it."""
    return [canonical_name(name) for name, m in model.named_modules() if _draws(m)]


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rates = (value for name, value in vars(module).items() if "drop" in name)
    return isinstance(module, nn.RReLU) or any(type(x) is float and x > 0 for x in rates)


def require_restored(model: nn.Module, *, preserve_rng_state: bool) -> None:
    """Raise ValueError, with its name, for a module that draws random numbers if those of the forward pass are not restored."""
    if not preserve_rng_state and (names := drawing_modules(model)):
        raise ValueError(
            f"module '{names[0]}' draws random numbers, and the recomputation would draw others: set preserve_rng_state=True"
        )


def require_own_part(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError, in the forward pass and with its name, for a module that draws random numbers for a tensor that all ranks of `mesh`
    hold: they would draw different ones."""
    for name in drawing_modules(model):

        def check(module: nn.Module, args: tuple[object, ...], name: str = name) -> None:
            x = args[0] if args else None
            if module.training and isinstance(x, DTensor) and x.placements[-1:] == (Replicate(),):
                raise ValueError(
                    f"module '{name}' draws random numbers for a tensor that each of the {mesh.size()} tensor-parallel ranks holds, and they would "
                    "differ: let it follow a module whose output is split, such as the last matrix of a block"
                )

        model.get_submodule(name).register_forward_pre_hook(check)
