"""Matmuls of linear layers in 8 bits (float8, MXFP8), by torchao. Weights and optimizer do not change.

A float8 layer (arXiv:2209.05433) casts the operands of its three matmuls when it multiplies them: x to x s with s = 448 / max |x|.
It divides the result by the scales. The recipe says which values share a scale:

    tensorwise             the whole tensor (the fastest); FSDP and TP can all-gather 8 bits instead of 16
    rowwise                each row of the left and each column of the right operand: an outlier affects its own row only
    rowwise_with_gw_hp     the same, with the weight's gradient in high precision (the most exact)
    mxfp8_cublas[_rceil]   32 neighbours in a row (OCP MX); the scale is a power of two, rounded down [up]

An example, tensorwise: for x = [0.5, -2, 1], s = 448 / 2 = 224, and the layer multiplies [112, -448, 224].

Layers are converted before the model is split: TP and FSDP must find a weight that can cast itself. An emulated layer makes
the same casts, followed by a matmul in fp32: slow, but on any device the same numbers, up to rounding. For a float8 all-gather,
torchao wraps weights in a tensor subclass; `plain` removes it, so that checkpoints do not contain it.
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

from titan.base.failure import UserError

from .module_kinds import Float8Layer, is_kind

# The oldest compute capability with such matmuls: Ada, Hopper, Blackwell; MI300 (gfx942), MI350 (gfx950).
_NVIDIA = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
_AMD = {"tensorwise": (9, 4), "rowwise": (9, 4), "mxfp8": (9, 5)}
_FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*_FLOAT8, "mxfp8_cublas", "mxfp8_cublas_rceil")
# A name in filter_fqns, as in TorchTitan: leave layers alone that are too small to gain speed, by torchao's measurements.
_SMALL = "auto_filter_small_kn"
_OWN_PARTS = ("local_tokens", "partial", "colwise_part")  # styles on plain tensors


class Float8Error(UserError, ValueError):
    """Float8 that this device or installation cannot do. The message is for the user."""


@dataclass(frozen=True)
class Conversion:
    """Result of the conversion of one linear layer.

    Attributes:
        name: name of the layer.
        shape: its output and input features.
        kept: reason why the layer stays in high precision. "" if it was converted.
        is_uneven: whether FSDP gathers it in high precision, since its ranks do not divide the rows.
    """

    name: str
    shape: tuple[int, int]
    kept: str = ""
    is_uneven: bool = False


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
    fsdp_ranks: int = 1,
) -> list[Conversion]:
    """Convert the linear layers of `model` in place, before it is split. Return a result for each.

    Args:
        model: the model.
        recipe: name of the scaling (docs/memory.md).
        filter_fqns: parts of names of layers to leave alone. None: the output layer, whose rounding would affect the loss directly;
            as torchao advises, that is the last linear layer, unless it is in a ModuleList or ModuleDict of blocks.
        emulate: compute in the model's precision, with rounded values.
        fsdp_all_gather: FSDP all-gathers weights in float8 (tensorwise). Under tensor parallelism, call `precompute_scales` before
            the first forward pass of every step, or each rank's part gets its own scale.
        keep: names of more layers to leave alone, with reasons.
        tensor_plan: plan of `apply_tp`, since 16 (MXFP8: 32) must divide a rank's part of a layer.
        tp: number of tensor-parallel ranks.
        num_kv_heads: number of key/value heads.
        fsdp_ranks: number of ranks over which FSDP shards a weight. torchao gathers equal parts only: a matrix whose rows these ranks do
            not divide computes in float8, and is gathered in its own dtype.

    Raises:
        Float8Error: the recipe is unknown, cannot be gathered in float8, needs another torchao, or converts no layer.
    """
    if recipe not in RECIPES:
        raise Float8Error(f"there is no recipe {recipe}, but {', '.join(RECIPES)}")
    if fsdp_all_gather and recipe != "tensorwise":
        raise Float8Error(f"recipe {recipe} cannot be gathered in float8, only tensorwise can")
    multiple = 32 if _is_mx(recipe) else 16
    # A weight that two modules share cannot be converted in one of them.
    places = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    output = _output_layer(model) if filter_fqns is None else ""
    filter_fqns = filter_fqns or ()
    gains = None
    if _SMALL in filter_fqns:
        from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

        gains = _auto_filter_for_recipe(recipe, [])
    report = []
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        style, _, number = _style(name, tensor_plan or {}).partition(":")
        heads = int(number) if number.isdecimal() else num_kv_heads
        rows, columns = _local_shape(layer, style=style, tp=tp)
        # First the user's wishes, then layers that cannot be converted, then layers that would not gain speed.
        kept = ""
        if named := [part for part in filter_fqns if part in name]:
            kept = f'filter_fqns has "{named[0]}"'
        elif output and name == output:
            kept = "the output layer: its rounding would go straight into the loss"
        elif keep and name in keep:
            kept = keep[name]
        elif type(layer) is not nn.Linear:
            kept = f"what {type(layer).__name__} adds to nn.Linear would be lost"
        elif places[id(layer.weight)] > 1:
            kept = "shares its weight with another module"
        elif style == "kv_colwise" and heads % tp:
            kept = f"{tp} tensor-parallel ranks are more than {heads} key/value heads"
        elif style == "whole":
            kept = "every rank computes all of it, on few rows"
        elif style in _OWN_PARTS and tp > 1:
            kept = "tensor-parallel ranks compute parts of it apart, and would scale each part by itself"
        elif rows % multiple or columns % multiple:
            kept = f"{rows} x {columns}{' on a rank' * (tp > 1)} does not divide by {multiple}"
        elif gains and not gains(layer, name):
            kept = f"too small to gain ({_SMALL})"
        uneven = fsdp_all_gather and not kept and rows % fsdp_ranks != 0
        report.append(Conversion(name, (layer.out_features, layer.in_features), kept, uneven))
    _convert(model, report, recipe, emulate=emulate, fsdp_all_gather=fsdp_all_gather)
    return report


def _convert(
    model: nn.Module,
    report: Sequence[Conversion],
    recipe: str,
    *,
    emulate: bool,
    fsdp_all_gather: bool,
) -> None:
    converted = {c.name for c in report if not c.kept}
    if not converted:
        reasons = "; ".join(f"{c.name}: {c.kept}" for c in report[:3]) or "it has no nn.Linear"
        raise Float8Error(
            f"recipe {recipe} converts no layer of {type(model).__name__} ({reasons})"
        )
    uneven = {c.name for c in report if c.is_uneven}
    for names, gathers in ((converted - uneven, fsdp_all_gather), (uneven, False)):
        if names:
            _converter(recipe, emulate=emulate, fsdp_all_gather=gathers)(model, names)


def _style(name: str, plan: Mapping[str, str]) -> str:
    """Return the tensor-parallel style of a module, or the one around it that decides about all inside."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        around = ".".join(parts[:depth])
        style = next((s for p, s in plan.items() if fnmatchcase(around, p)), "")
        if style and (around == name or style in _OWN_PARTS):
            return style
    return ""


def _output_layer(model: nn.Module) -> str:
    """Return the name of the last linear layer, or "" if it is in a list of blocks."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    parts = names[-1].split(".") if names else []
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return (
        ""
        if any(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in above)
        else ".".join(parts)
    )


def require_hardware(recipe: str, device: torch.device) -> None:
    """Raise Float8Error unless `device` multiplies in the precision of `recipe`.

    Args:
        recipe: name of the scaling.
        device: device of the model.

    Raises:
        Float8Error: the device is too old, or has no such matmuls.
    """
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
    """Compute the scales of all weights that FSDP all-gathers in float8, in one reduction.

    Call it before a forward pass, not after the optimizer step. No change of the weights (a resumed run, another optimizer) can
    then leave an old scale behind. Weights that are still gathered are up to date, and are skipped.

    Args:
        model: model after FSDP.

    Raises:
        ValueError: no layer of the model is gathered in float8.
    """
    if not gathers_float8(model):
        raise ValueError(
            f"no layer of {type(model).__name__} is gathered in float8: apply_float8(fsdp_all_gather=True) makes such layers"
        )
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def gathers_float8(model: nn.Module) -> bool:
    """Return whether FSDP all-gathers a weight of the model in float8.

    Args:
        model: any model.
    """
    configs = filter(None, map(_config_of, model.modules()))
    return any(config.enable_fsdp_float8_all_gather for config in configs)


def _config_of(module: Any) -> Any:
    """Return the Float8LinearConfig of a float8 layer, and None for another module."""
    is_layer = isinstance(module, nn.Linear) and is_kind(module, Float8Layer)
    return module.config if is_layer else None


@torch.no_grad()
def plain(tensor: Tensor) -> Tensor:
    """Return the same memory without torchao's wrapper, if there is one, also inside a DTensor.

    Args:
        tensor: any tensor.
    """
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "_precomputed_scale"):
        return tensor
    if not isinstance(tensor, DTensor):
        return local._tensor
    # Not by from_local, which would copy an offloaded weight to the mesh's device.
    return DTensor(local._tensor, tensor._spec, requires_grad=False)


def table(report: Iterable[Conversion], *, recipe: str, emulated: bool, compiled: bool) -> str:
    """Return a table of the conversion, with a line for each kind of layer: name, count, shape, reason.

    Args:
        report: results of `apply_float8`.
        recipe: name of the scaling.
        emulated: layers compute in high precision.
        compiled: blocks will be compiled.
    """
    # Equal layers of all blocks are one line.
    kinds = Counter(
        dataclasses.replace(c, name=re.sub(r"\.\d+\.", ".*.", c.name)) for c in report
    )
    done = sum(count for kind, count in kinds.items() if not kind.kept)
    width = max((len(kind.name) for kind in kinds), default=0)
    lines = [
        f"  {kind.name:<{width}}  {count:>4} of {' x '.join(map(str, kind.shape)):<14}"
        + (f"high precision: {kind.kept}" if kind.kept else "converted")
        + ", gathered in high precision: FSDP's ranks do not divide its rows" * kind.is_uneven
        for kind, count in kinds.items()
    ]
    how = ", emulated" if emulated else ""
    if not (emulated or compiled):
        how = " (not compiled: each cast is several kernels, and the whole mostly slower than bf16)"
    total = sum(kinds.values())
    return "\n".join([f"{recipe}{how}: {done} of {total} linear layers converted", *lines])


# ---- for titan.parallel.tensor -----------------------------------------------------------------


def is_tensorwise(module: nn.Module) -> bool:
    """Return whether a module is a float8 layer with one scale for each tensor.

    Args:
        module: any module.
    """
    config = _config_of(module)
    return bool(config) and config.cast_config_input.scaling_granularity.value == "tensorwise"


def cast_before_gather(module: nn.Module, mesh: DeviceMesh) -> Callable[[DTensor], Any] | None:
    """Return a function that casts the input of the layers in `module`, to be all-gathered in float8.

    Args:
        module: module whose layers share an input.
        mesh: mesh with the tp axis only.

    Returns:
        The function, or None unless all matrices of the module belong to tensorwise layers.
    """
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
    return lambda x: hp_tensor_to_float8_dynamic(
        x, dtype, layer.linear_mm_config, gemm_input_role=GemmInputRole.INPUT
    )


def rows_style(mesh: DeviceMesh, *, sequence_dim: int) -> ParallelStyle:
    """Return a RowwiseParallel that casts its output's gradient before it is all-gathered over the sequence.

    Args:
        mesh: mesh with the tp axis only.
        sequence_dim: dimension of the sequence.
    """
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    _gather_bytes(mesh)
    return Float8RowwiseParallel(output_layouts=Shard(sequence_dim))


def _gather_bytes(mesh: DeviceMesh) -> None:
    """Make torchao's all-gather send float8 values as bytes on a CPU, since gloo has no float8."""
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
    """Suppress the warnings of torchao's import.

    Args:
        has_kernels: load torchao's own kernels, which may not fit this torch.
    """
    if not has_kernels:
        os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
        logging.getLogger("torchao").setLevel(logging.ERROR)  # it logs that it skips them
    logging.getLogger("torch.utils._pytree").setLevel(
        logging.ERROR
    )  # torchao's enums, deprecated


def _is_mx(recipe: str) -> bool:
    return recipe.startswith("mxfp8")


def _local_shape(layer: nn.Linear, *, style: str, tp: int) -> tuple[int, int]:
    rows, columns = layer.out_features, layer.in_features
    if "colwise" in style or style == "vocab_output":
        return rows // tp, columns
    return (rows, columns // tp) if style.startswith("rowwise") else (rows, columns)


def _converter(
    recipe: str, *, emulate: bool, fsdp_all_gather: bool
) -> Callable[[nn.Module, set[str]], Any]:
    """Return a function that converts the named layers of a model in place. The layers keep their weights."""
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
