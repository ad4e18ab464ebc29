"""Draw initial weights that do not depend on the layout: one process, FSDP on 512 ranks and every
mesh between draw the same numbers from the same seed, without communication and without a seed checkpoint.

Each parameter has its own generator, seeded with the run's seed and the parameter's name. Every rank draws
the full tensor and keeps its shard; of parameters stacked by expert it draws its own experts. (DTensor's own generator is no help: on a CPU it gives every shard the
same numbers, and elsewhere they depend on the degrees; see docs/architecture.md.) The numbers
do depend on the device type, whose generators differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .torch_compat import compute_local_shape_and_global_offset

# Names that wrappers put into a parameter's name.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_name(name: str) -> str:
    """Return a parameter's name in the plain model, without what activation checkpointing and compile add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str,
    fill_buffers: Callable[[nn.Module], Any] | None = None,
    buffers_on: torch.device | str | None = None,
) -> None:
    """Give meta parameters and buffers uninitialised memory on `device`, in place, and move other buffers there.
    Buffers go to `buffers_on` if that is given: those of offloaded parameters' modules are used on the accelerator.

    Unlike nn.Module.to_empty, parameters that are shared (tied embeddings) stay shared. Then each module with buffers from meta fills
    them: in its method `reset_buffers()`, or, where it has none, in `fill_buffers(module)`. A model whose buffers were built on the
    CPU, with its parameters on meta, needs neither. Raises ValueError where nothing fills a buffer,
    or `fill_buffers` left one unfilled.
    """
    on_meta = [
        (canonical_name(name), module)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(prefix, recurse=False)
        if buffer.is_meta
    ]
    left = [(name, module) for name, module in on_meta if not hasattr(module, "reset_buffers")]
    if left and fill_buffers is None:
        raise ValueError(
            f"nothing fills the buffers {', '.join(name for name, _ in left)}, which were built on meta: give their modules a "
            "method reset_buffers(), pass fill_buffers=, or build the buffers on the CPU"
        )
    # By identity, so that a parameter shared by two modules is allocated once.
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device),
                    requires_grad=parameter.requires_grad,
                )
            # register_parameter refuses DTensor's half-initialised state; the dictionary is what it fills.
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=buffers_on or device)
            elif buffer is not None:
                module._buffers[name] = buffer.to(buffers_on or device)
    # Only now: a buffer's values may be computed on the device.
    for module in dict.fromkeys(module for _, module in on_meta):
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()  # pyright: ignore
    if left and fill_buffers is not None:
        _fill(left, fill_buffers)


@torch.no_grad()
def _fill(unfilled: list[tuple[str, nn.Module]], fill_buffers: Callable[[nn.Module], Any]) -> None:
    """Let a callback fill buffers; raise ValueError for those that still hold what no model wants."""

    def buffers() -> Iterator[tuple[str, Tensor]]:
        for name, module in unfilled:
            yield name, module.get_buffer(name.rpartition(".")[2])

    # First fill them with values that no model wants, to see afterwards what was left out.
    for _, buffer in buffers():
        buffer.fill_(_unwanted(buffer.dtype))
    for module in dict.fromkeys(module for _, module in unfilled):
        fill_buffers(module)
    left = [
        name
        for name, buffer in buffers()
        # A bool or a complex number has no value that could not be meant.
        if not (buffer.dtype == torch.bool or buffer.is_complex())
        and (
            buffer.isnan() if buffer.is_floating_point() else buffer == _unwanted(buffer.dtype)
        ).any()
    ]
    if left:
        raise ValueError(f"fill_buffers did not fill {', '.join(left)}")


def _unwanted(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype.is_complex or dtype == torch.bool else torch.iinfo(dtype).min


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, std_of: Callable[[str], float | None]) -> None:
    """Draw every parameter from a normal distribution truncated at three standard deviations.

    std_of: standard deviation for a parameter's name; 0.0 sets it to zeros, None to ones. The row of an embedding's `padding_idx` is zeros. Memory: one full parameter at
    a time beyond the model itself.
    """
    modules: list[Any] = [m for m in model.modules() if getattr(m, "padding_idx", None) is not None]
    padding = {id(m.weight): m.padding_idx for m in modules}
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        std = std_of(name)
        if not std:
            parameter.fill_(1.0 if std is None else 0.0)
            continue
        draw = partial(_draw, std=std, device=parameter.device)
        if parameter.ndim < 3:
            full = draw(parameter.shape, seed=derived_seed(seed, name))
            if id(parameter) in padding:
                full[padding[id(parameter)]] = 0
            _keep_shard(parameter, full)
            continue
        # Stacked by expert: this rank's experts one by one, each from its own seed.
        own, (first, *offsets) = parameter, [0] * parameter.ndim
        if isinstance(parameter, DTensor):
            own = parameter.to_local()
            first, *offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )[1]
        for number, matrix in enumerate(own, first):
            whole = draw(parameter.shape[1:], seed=derived_seed(seed, f"{name}.{number}"))
            part = tuple(map(slice, offsets, map(add, offsets, matrix.shape)))
            matrix.copy_(whole[part])


def _draw(shape: Sequence[int], *, std: float, device: torch.device, seed: int) -> Tensor:
    # A generator for each draw: the order of parameters, and what a stage leaves out, change nothing.
    generator = torch.Generator(device=device).manual_seed(seed)
    full = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    return nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)


def _keep_shard(parameter: Tensor, full: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank has the full tensor, nothing is sent.
        full = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)


def derived_seed(seed: int, name: str) -> int:
    """Return the seed of a generator for something that has a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a generator takes 63 bits
