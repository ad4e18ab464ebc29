"""Compute the matrix products of linear layers in 8 bits (float8, MXFP8), by torchao. Weights and
optimizer stay as they are.

A float8 layer (arXiv:2209.05433) casts its three products' operands as it multiplies them: x to x s with s = 448 / max |x|,
and divides by the scales afterwards. What shares a scale is the recipe:

    tensorwise             the whole tensor (the fastest); of it FSDP and TP can gather 8 bits instead of 16
    rowwise                each row of the left, each column of the right operand: an outlier costs its own row only
    rowwise_with_gw_hp     the same, the product for the weight's gradient in high precision (the most exact)
    mxfp8_cublas[_rceil]   each 32 values in a row (OCP MX), the scale a power of two rounded down [up]

Layers are converted before the model is split: TP and FSDP must find a weight that knows how to cast itself. Emulated, the same
casts are followed by a product in fp32: slow, but the same numbers to rounding, on any device. A float8 all-gather wraps
weights in a tensor subclass of torchao's; `plain` takes it off again, so that checkpoints know nothing of it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

# The oldest compute capability that multiplies so: Ada, Hopper, Blackwell; MI300 (gfx942), MI350 (gfx950).
_NVIDIA = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
_AMD = {"tensorwise": (9, 4), "rowwise": (9, 4), "mxfp8": (9, 5)}
_FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*_FLOAT8, "mxfp8_cublas", "mxfp8_cublas_rceil")
# A name in filter_fqns, as in TorchTitan: leave layers alone that are too small to gain, by torchao's measurements.
_SMALL = "auto_filter_small_kn"


class Float8Error(ValueError):
    """Report that float8 cannot be had here. The message is for the user."""


@dataclass(frozen=True)
class Conversion:
    """Say what became of a linear layer. shape: (out, in). kept: why it is in high precision, or ""
    if it is converted."""

    name: str
    shape: tuple[int, int]
    kept: str = ""


def apply_float8(
    model: nn.Module,
    *,
    recipe: str = "tensorwise",
    filter_fqns: Sequence[str] | None = None,
    emulate: bool = False,
    fsdp_all_gather: bool = False,
    keep: Mapping[str, str] | None = None,
    tensor_plan: Mapping[str, str] | None = None,
    tp: int = 1,
    num_kv_heads: int = 1,
) -> list[Conversion]:
    """Convert the linear layers of `model` in place, before it is split, and say what became of each. Raises Float8Error.

    Args:
        recipe: how values are scaled (docs/memory.md).
        filter_fqns: parts of names to leave alone. None: the output layer, whose rounding would go straight into the loss. By torchao's
            advice it is the last linear layer, unless a ModuleList or ModuleDict of blocks holds it.
        emulate: compute in the model's precision, with rounded values.
        fsdp_all_gather: FSDP gathers weights in float8 (tensorwise). Under tensor parallelism call `precompute_scales` before the first
            forward pass of every step then, or each rank's part has a separate scale.
        keep: names of more layers to leave alone, and why.
        tensor_plan, tp, num_kv_heads: how `apply_tp` will split the layers, since a rank's part must divide by 16 (MXFP8: 32).
    """
    if recipe not in RECIPES:
        raise Float8Error(f"there is no recipe {recipe}, but {', '.join(RECIPES)}")
    if fsdp_all_gather and recipe != "tensorwise":
        raise Float8Error(f"recipe {recipe} cannot be gathered in float8, only tensorwise can")
    convert = _converter(recipe, emulate=emulate, fsdp_all_gather=fsdp_all_gather)
    multiple = 32 if _is_mx(recipe) else 16
    # A weight that two modules share cannot be converted in one of them.
    places = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    output = _output_layer(model) if filter_fqns is None else ""
    filter_fqns = filter_fqns or ()
    is_small = _small_filter(recipe) if _SMALL in filter_fqns else None
    report = []
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        style = next((s for p, s in (tensor_plan or {}).items() if fnmatchcase(name, p)), "")
        named = next((part for part in filter_fqns if part in name), None)
        rows, columns = _local_shape(layer, style=style, tp=tp)
        # What the user asked for first, then what cannot be converted, then what does not pay.
        kept = ""
        if named is not None:
            kept = f'filter_fqns has "{named}"'
        elif output and name == output:
            kept = "the output layer: its rounding would go straight into the loss"
        elif keep and name in keep:
            kept = keep[name]
        elif type(layer) is not nn.Linear:
            kept = f"what {type(layer).__name__} adds to nn.Linear would be lost"
        elif places[id(layer.weight)] > 1:
            kept = "shares its weight with another module"
        elif style == "kv_colwise" and num_kv_heads % tp:
            kept = f"{tp} tensor-parallel ranks are more than {num_kv_heads} key/value heads"
        elif style == "whole":
            kept = "every rank computes all of it, on few rows"
        elif rows % multiple or columns % multiple:
            kept = f"{rows} x {columns}{' on a rank' * (tp > 1)} does not divide by {multiple}"
        elif is_small and is_small(layer, name):
            kept = f"too small to gain ({_SMALL})"
        report.append(Conversion(name, (layer.out_features, layer.in_features), kept))
    convert(model, {c.name for c in report if not c.kept})
    return report


def _output_layer(model: nn.Module) -> str:
    """Return the name of the last linear layer, or "" where that is in a list of blocks."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    parts = names[-1].split(".") if names else []
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return (
        "" if any(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in above) else ".".join(parts)
    )


def require_hardware(recipe: str, device: torch.device) -> None:
    """Raise Float8Error unless `device` multiplies in the precision of `recipe`."""
    kind = "mxfp8" if _is_mx(recipe) else "tensorwise" if recipe == "tensorwise" else "rowwise"
    needed, have = (_AMD if torch.version.hip else _NVIDIA)[kind], "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= needed:
            return
        have = f"{torch.cuda.get_device_name(device)} with {capability[0]}.{capability[1]}"
    raise Float8Error(
        f"recipe {recipe} needs a GPU of compute capability {needed[0]}.{needed[1]} or later, and this is {have}; "
        "set emulate = true to compute the same numbers slowly, or take the converter out of model.converters"
    )


def precompute_scales(model: nn.Module) -> None:
    """Find the scales of all weights that FSDP gathers in float8, in one reduction rather than one for each.

    Called before a forward pass, and not after the optimizer step: so no way of changing weights (a resumed run, another
    optimizer) leaves an old scale behind. Weights that are still gathered are up to date and passed over.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


@torch.no_grad()
def plain(tensor: Tensor) -> Tensor:
    """Return the same memory without torchao's wrapper, if it has one, also inside a DTensor."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "_precomputed_scale"):
        return tensor
    if not isinstance(tensor, DTensor):
        return local._tensor
    # Not by from_local, which would copy an offloaded weight to the mesh's device.
    return DTensor(local._tensor, tensor._spec, requires_grad=False)  # pyright: ignore


def table(report: Iterable[Conversion], *, recipe: str, emulated: bool, compiled: bool) -> str:
    """Describe which layers were converted, a line for each kind of layer: `layers.*.attention.wq`, how many, their shape, why not."""
    # Equal layers of all blocks are one line.
    kinds = Counter(dataclasses.replace(c, name=re.sub(r"\.\d+\.", ".*.", c.name)) for c in report)
    done = sum(count for kind, count in kinds.items() if not kind.kept)
    width = max((len(kind.name) for kind in kinds), default=0)
    lines = [
        f"  {kind.name:<{width}}  {count:>4} of {' x '.join(map(str, kind.shape)):<14}"
        + (f"high precision: {kind.kept}" if kind.kept else "converted")
        for kind, count in kinds.items()
    ]
    how = ", emulated" if emulated else ""
    if not (emulated or compiled):
        how = " (not compiled: each cast is several kernels, and the whole mostly slower than bf16)"
    total = sum(kinds.values())
    return "\n".join([f"{recipe}{how}: {done} of {total} linear layers converted", *lines])


# ---- for titan.parallel.tensor -----------------------------------------------------------------


def is_tensorwise(module: nn.Module) -> bool:
    """Return whether a module is a float8 layer with one scale for each tensor."""
    config = getattr(module, "config", None)
    cast = getattr(config, "cast_config_input", None)
    return cast is not None and cast.scaling_granularity.value == "tensorwise"


def cast_before_gather(module: nn.Module, mesh: DeviceMesh) -> Callable[[DTensor], DTensor] | None:
    """Return what casts the input that the layers in `module` share, so that it is gathered in float8; None unless all of its matrices
    belong to tensorwise layers."""
    layers = [m for m in module.modules() if is_tensorwise(m)]
    matrices = {id(p) for p in module.parameters() if p.ndim > 1}
    # Other matrices in the module need the input in high precision.
    if not layers or matrices != {id(m.weight) for m in layers}:
        return None
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    _gather_bytes(mesh)
    layer: Any = layers[0]
    dtype = layer.config.cast_config_input.target_dtype
    return lambda x: hp_tensor_to_float8_dynamic(  # pyright: ignore
        x, dtype, layer.linear_mm_config, gemm_input_role=GemmInputRole.INPUT
    )


def rows_style(mesh: DeviceMesh, *, sequence_dim: int) -> ParallelStyle:
    """Return a RowwiseParallel whose output's gradient is cast before it is gathered over the sequence."""
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    _gather_bytes(mesh)
    return Float8RowwiseParallel(output_layouts=Shard(sequence_dim))


def _gather_bytes(mesh: DeviceMesh) -> None:
    """Send bytes, since gloo has no float8: let torchao's all-gather send the same bits as bytes."""
    if mesh.device_type != "cpu":
        return
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    def gather(op: Any, args: Any, kwargs: Any = None) -> Tensor:
        x = args[0]
        # The same bits, as a type that gloo knows.
        bits = op(x._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {}))
        data = torch.ops._c10d_functional.wait_tensor(bits).view(x._data.dtype)
        return Float8TrainingTensor(
            data, x._scale, x._orig_dtype, x._linear_mm_config, x._gemm_input_role
        )

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = gather


# ---- torchao -----------------------------------------------------------------------------------


def quiet_torchao(*, has_kernels: bool) -> None:
    """Keep torchao from warnings when it is imported. has_kernels: load its own kernels, which may not fit this torch."""
    if not has_kernels:
        os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
        logging.getLogger("torchao").setLevel(logging.ERROR)  # says that it skips them
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's enums, deprecated


def _is_mx(recipe: str) -> bool:
    return recipe.startswith("mxfp8")


def _local_shape(layer: nn.Linear, *, style: str, tp: int) -> tuple[int, int]:
    rows, columns = layer.out_features, layer.in_features
    if style in ("colwise", "kv_colwise", "gather_colwise", "vocab_output"):
        return rows // tp, columns
    return (rows, columns // tp) if style.startswith("rowwise") else (rows, columns)


def _converter(
    recipe: str, *, emulate: bool, fsdp_all_gather: bool
) -> Callable[[nn.Module, set[str]], Any]:
    """Return the function that converts the named layers of a model in place; they keep their weights."""
    quiet_torchao(has_kernels=not emulate)
    try:
        if _is_mx(recipe):
            return _mx_converter(recipe, emulate=emulate)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise Float8Error(
            f"recipe {recipe} needs torchao 0.18 or later ({error}): pip install 'titan-pretrain[float8]'"
        ) from error
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        enable_fsdp_float8_all_gather=fsdp_all_gather,
    )
    return lambda model, names: convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in names
    )


def _mx_converter(recipe: str, *, emulate: bool) -> Callable[[nn.Module, set[str]], Any]:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    up, down = ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR
    settings = {
        "kernel_preference": KernelPreference.EMULATED if emulate else KernelPreference.AUTO,
        "scale_calculation_mode": up if recipe.endswith("rceil") else down,
    }

    def convert(model: nn.Module, names: set[str]) -> None:
        for name in names:
            parent, _, child = name.rpartition(".")
            old: Any = model.get_submodule(name)
            new = MXFP8Linear(old.in_features, old.out_features, device="meta", **settings)
            new.weight, new.bias = old.weight, old.bias
            model.get_submodule(parent).register_module(child, new)

    return convert


def _small_filter(recipe: str) -> Callable[[nn.Module, str], bool]:
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    converts = _auto_filter_for_recipe(recipe, [])
    return lambda layer, name: not converts(layer, name)
