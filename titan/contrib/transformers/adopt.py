"""Adoption of transformers' modules by `TransformersModel`, under titan's names.

The blocks of Qwen3, for example, are the list `model.layers`. They become the children of `layers`.
`model.embed_tokens` becomes `tok_embeddings`, `lm_head` becomes `output`, and the other modules
beside the path to the blocks keep their names, such as `model.norm` as `norm`. In their old places
are stand-ins (stand_ins.py), through which transformers' forward pass finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .errors import UnsupportedModelError
from .stand_ins import Blocks, StandIn

_TAKEN = ("layers", "hf", "base", "config")  # other attributes of the model


@dataclass
class Ends:
    """Names of the modules with parameters outside of the blocks.

    Attributes:
        first: before the blocks.
        last: after the blocks.
    """

    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)


def adopt(model: Any, hf: Any) -> Ends:
    """Make all modules of transformers' model children of titan's.

    Args:
        model: the `TransformersModel`.
        hf: transformers' model.

    Returns:
        The names of the children with parameters, without the blocks.

    Raises:
        UnsupportedModelError: titan cannot lay out the model.
    """
    place, blocks = _find_blocks(hf)
    ends = _move(model, hf, place.split("."), blocks)
    model.layers.update({str(n): block for n, block in enumerate(blocks)})
    model.hf_names["layers."] = f"{place}."
    _require_own_parameters(model.layers)
    model.on_all_stages = tuple(
        name for name, child in model.named_children() if not _has_parameters(child)
    )
    _sort(model, ends)
    return ends


def _find_blocks(hf: Any) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks that is nearest to the top, with its name."""
    number = getattr(hf.config, "num_hidden_layers", None)
    kind = type(hf).__name__
    if number is None:
        parts = "has several parts; its text model is a family too"
        raise UnsupportedModelError(f"{hf.config.model_type} {parts}")
    found = [
        (name, module)
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    if not found:
        raise UnsupportedModelError(f"{kind} has no list of {number} blocks")
    if hf.get_input_embeddings() is None or hf.get_output_embeddings() is None:
        lacks = "has no output layer, or no embedding of tokens, as a class ...ForCausalLM has"
        raise UnsupportedModelError(f"{kind} {lacks}")
    return min(found, key=lambda pair: pair[0].count("."))


def _move(model: Any, hf: Any, path: list[str], blocks: nn.ModuleList) -> Ends:
    """Move the modules beside the path to the blocks, and put stand-ins in their places."""
    ends = Ends()
    renamed = {
        hf.get_input_embeddings(): "tok_embeddings",
        hf.get_output_embeddings(): "output",
    }
    owner, prefix = hf, ""
    for depth, step in enumerate(path, start=1):
        if own := [*owner._parameters, *owner._buffers]:
            raise UnsupportedModelError(f"{type(owner).__name__} itself has {own[0]}")
        # Only the owner of the blocks has modules before them. Those that follow it, such as the
        # output layer, are after them.
        before = ends.first if depth == len(path) else ends.last
        for name, child in list(owner.named_children()):
            if name == step:
                before = ends.last
                continue
            ours = renamed.get(child, name)
            if ours in model._modules or ours in _TAKEN:
                ours = f"{prefix}{name}".replace(".", "_")
            model.hf_names[f"{ours}."] = f"{prefix}{name}."
            delattr(owner, name)
            setattr(owner, name, StandIn(model, ours))
            model.add_module(ours, child)
            if _has_parameters(child):
                before.append(ours)
        inner = getattr(owner, step)
        if inner is blocks:
            delattr(owner, step)
            setattr(owner, step, Blocks(model, blocks))
        owner, prefix = inner, f"{prefix}{step}."
    for name, what in (("tok_embeddings", "embedding"), ("output", "output layer")):
        if name not in model._modules:
            raise UnsupportedModelError(f"its {what} is inside of another module")
    return ends


def _require_own_parameters(layers: nn.Module) -> None:
    """Raise UnsupportedModelError if two blocks share a parameter."""
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        other = owners.setdefault(parameter, name)
        if other.split(".")[0] != name.split(".")[0]:
            raise UnsupportedModelError(
                f"layers.{other} and layers.{name} are one parameter, and titan gives each block its own"
            )


def _sort(model: Any, ends: Ends) -> None:
    """Sort the children in the order of their use: of tied parameters, the first name counts."""
    ends.last.sort(key=lambda name: name == "output")
    order = ["tok_embeddings", *ends.first, "layers", *ends.last]
    for name in dict.fromkeys([*order, *model._modules]):
        model._modules[name] = model._modules.pop(name)
    ends.first.sort(key=lambda name: name != "tok_embeddings")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
