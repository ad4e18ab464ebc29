"""Initial weights that do not depend on the layout.

One process, FSDP on 512 ranks and every mesh between them draw the same numbers from the same seed, without communication and
without a seed checkpoint.

Each parameter has its own generator, seeded with the run's seed and the parameter's name. Every rank draws the full tensor and
keeps its shard; of a parameter that is stacked by expert, it draws its own experts only. DTensor's own generator would not
do: on a CPU it gives every shard the same numbers, and elsewhere the numbers depend on the degrees (docs/architecture.md). The
numbers depend on the device type, since generators differ.
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

from .module_kinds import FillsBuffers, is_kind
from .torch_compat import compute_local_shape_and_global_offset

# Names that wrappers put into a parameter's name.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_name(name: str) -> str:
    """Return a parameter's name in the plain model, without the parts that activation checkpointing and compile add.

    Args:
        name: name of a parameter or module.
    """
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
    """Allocate meta parameters and buffers on `device`, in place, uninitialised, and move other buffers there.

    Unlike in nn.Module.to_empty, shared parameters (tied embeddings) stay shared. Then each module with former meta buffers
    fills them: in its method `reset_buffers()`, or in `fill_buffers(module)` if it has none. A model needs neither if its buffers
    were built on the CPU, with its parameters on meta.

    Args:
        model: the model.
        device: device of the parameters.
        fill_buffers: fills the buffers of a module without `reset_buffers()`.
        buffers_on: device of buffers, if it differs: the modules of offloaded parameters use them on the accelerator.

    Raises:
        ValueError: nothing fills a buffer, or `fill_buffers` did not fill one.
    """
    on_meta = [
        (canonical_name(name), module)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(prefix, recurse=False)
        if buffer.is_meta
    ]
    left = [(name, module) for name, module in on_meta if not is_kind(module, FillsBuffers)]
    if left and fill_buffers is None:
        raise ValueError(
            f"nothing fills the buffers {', '.join(name for name, _ in left)}, which were built on meta: give their modules a "
            "method reset_buffers(), pass fill_buffers=, or build the buffers on the CPU"
        )
    # The key is the identity, so that a parameter shared by two modules is allocated once.
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
    # Buffers are filled last, since their values may be computed on the device.
    for module in dict.fromkeys(module for _, module in on_meta):
        if is_kind(module, FillsBuffers):
            module.reset_buffers()
    if left and fill_buffers is not None:
        _fill(left, fill_buffers)


@torch.no_grad()
def _fill(
    unfilled: list[tuple[str, nn.Module]], fill_buffers: Callable[[nn.Module], Any]
) -> None:
    """Fill buffers by a callback. Raise ValueError if one keeps a value that no model wants."""

    def buffers() -> Iterator[tuple[str, Tensor]]:
        for name, module in unfilled:
            yield name, module.get_buffer(name.rpartition(".")[2])

    # First fill them with values that no model wants, to find afterwards the buffers that the callback left out.
    for _, buffer in buffers():
        buffer.fill_(_unwanted(buffer.dtype))
    for module in dict.fromkeys(module for _, module in unfilled):
        fill_buffers(module)
    left = [
        name
        for name, buffer in buffers()
        # Every value of a bool or a complex number may be a model's.
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
def initialize(
    model: nn.Module,
    *,
    seed: int,
    std_of: Callable[[str], float | Callable[[int], Tensor] | None],
) -> None:
    """Draw every parameter from a normal distribution, truncated at three standard deviations.

    The row of an embedding's `padding_idx` is zeros. It needs memory for one full parameter at a time beyond the model itself.

    Args:
        model: the model, after `materialize`.
        seed: the run's seed.
        std_of: returns the standard deviation for a parameter's name. 0.0 sets zeros, None sets ones, and a function
            returns the whole parameter for a seed.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    padding = {id(m.weight): m.padding_idx for m in tables if m.padding_idx is not None}
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        std = std_of(name)
        if not std:
            parameter.fill_(1.0 if std is None else 0.0)
            continue
        if callable(std):
            _keep_shard(parameter, std(derived_seed(seed, name)).to(parameter.device))
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
    # One generator for each draw, so that the order of parameters and the parameters on other stages do not matter.
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
    """Return the seed of the generator for a name.

    Args:
        seed: the run's seed.
        name: name of a parameter, for example.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a generator takes 63 bits
