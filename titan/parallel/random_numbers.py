"""Random numbers in forward passes, as of dropout: modules that draw them, and checks of their use."""

from __future__ import annotations

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.dropout import _DropoutNd

from .init_weights import canonical_name

_OTHERS = "module '{}' draws random numbers, and the recomputation would draw others: set preserve_rng_state=True (in a job, activation_checkpoint.preserve_rng_state = true)"


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the host and of a device.

    torch.manual_seed seeds every kind of device, and takes a stack trace for each kind that is not in use. That costs more than
    many a layer of a small model.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def drawing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that draw random numbers in training, by name.

    They are dropout modules, RReLU, and modules with a float attribute above 0 whose name contains "drop" or "jitter".

    Args:
        model: any model.
    """
    return {canonical_name(name): m for name, m in model.named_modules() if _draws(m)}


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rates = (v for name, v in vars(module).items() if "drop" in name or "jitter" in name)
    return isinstance(module, nn.RReLU) or any(type(x) is float and x > 0 for x in rates)


def require_restored(model: nn.Module, *, preserve_rng_state: bool) -> None:
    """Raise ValueError if a module draws random numbers and those of the forward pass are not restored.

    Args:
        model: the model that will be recomputed.
        preserve_rng_state: the recomputation restores the random numbers of the forward pass.

    Raises:
        ValueError: a module, which the message names, draws random numbers that are not restored.
    """
    if not preserve_rng_state and (names := drawing_modules(model)):
        raise ValueError(_OTHERS.format(next(iter(names))))


def require_no_draws(block: nn.Module, name: str) -> None:
    """Register hooks that raise ValueError if the first forward pass of a block draws random numbers on a CPU, in a module or not.

    On other devices, kernels of attention may count as drawing some.

    Args:
        block: block that will be recomputed without the random numbers of the forward pass.
        name: name of the block.
    """
    before: list[torch.Tensor] = []

    def begin(*_: object) -> None:
        if (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not detect_fake_mode()
        ):
            before.append(torch.default_generator.get_state())

    def end(*_: object) -> None:
        if not before:
            return
        for handle in handles:
            handle.remove()
        if not torch.equal(before.pop(), torch.default_generator.get_state()):
            raise ValueError(_OTHERS.format(name))

    handles = [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]


def require_own_part(model: nn.Module, mesh: DeviceMesh) -> None:
    """Register hooks that check that no module draws random numbers for a tensor that all ranks of `mesh` hold.

    The ranks would draw different numbers. A hook raises ValueError, with the module's name, in the forward pass.

    Args:
        model: the model.
        mesh: mesh with the tp axis only.
    """
    for name in drawing_modules(model):

        def check(module: nn.Module, args: tuple[object, ...], name: str = name) -> None:
            x = args[0] if args else None
            if (
                module.training
                and isinstance(x, DTensor)
                and x.placements[-1:] == (Replicate(),)
            ):
                raise ValueError(
                    f"module '{name}' draws random numbers for a tensor that each of the {mesh.size()} tensor-parallel ranks holds, and they would "
                    "differ: let it follow a module whose output is split, such as the last matrix of a block"
                )

        model.get_submodule(name).register_forward_pre_hook(check)
