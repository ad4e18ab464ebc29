"""Hugging Face folders of models of `transformers`: names of tensors on disk, and config.json.

In memory transformers stacks experts and fuses some of their matrices. Its own table of conversions says what a folder has in their
place. `disk_names` reads that table by converting a few numbers of each parameter back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from .config import TransformersConfig, resolve_config
from .errors import UnsupportedModelError

ARCHITECTURES: dict[str, str] = {}  # any, where no other family has it


def hf_name_of(sizes: TransformersConfig) -> Callable[[str], str]:
    """Return the function that maps our names of parameters to those on disk, {} for the number of an expert."""
    return _model(sizes).disk_name


def hf_name(name: str) -> str:
    """Not used: names depend on the model."""
    raise KeyError(name)


def hf_buffer(name: str, sizes: TransformersConfig) -> str:
    """Return the name on disk of a buffer that a folder has."""
    return _model(sizes).disk_name(name)


def hf_config(sizes: TransformersConfig) -> dict[str, Any]:
    """Return the config.json of a model."""
    return json.loads(sizes.source.hf)


def read_config(hf: dict[str, Any]) -> TransformersConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: titan cannot run the model.
    """
    return resolve_config(hf)


def differences(sizes: TransformersConfig, other: TransformersConfig) -> dict[str, Any]:
    """Return the fields of config.json, with their values in `sizes`, in which two models differ."""
    ours, theirs = sizes.facts, other.facts
    return {key: value for key, value in ours.items() if value != theirs.get(key, value)}


@cache
def _model(sizes: TransformersConfig) -> Any:
    import torch

    from . import build_model

    with torch.device("meta"):
        return build_model(sizes)


def disk_names(hf: Any, names: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Return the names of the tensors on disk that hold a parameter, in its order: by expert, then by row.

    Args:
        hf: transformers' model.
        names: transformers' names in memory and the shapes of parameters.

    Raises:
        UnsupportedModelError: a parameter on disk is not a sequence of parts of it.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from titan.parallel.torch_compat import real_tensors

    found = {}
    for name, shape in names.items():
        # Numbers that tell where a part comes from: experts and two rows of each.
        small = (shape[0], 2, 1) if len(shape) == 3 else (2,) * len(shape)
        with real_tensors(), torch.device("cpu"):
            value = torch.arange(torch.Size(small).numel(), dtype=torch.float32).view(small)
            try:
                parts = revert_weight_conversion(hf, {name: value})
            except Exception as error:
                raise UnsupportedModelError(f"{name} has no form on disk: {error}") from error
            firsts = [(part.flatten()[0].item(), key) for key, part in parts.items()]
            found[name] = [key for _, key in sorted(firsts)]
            (part, *others) = parts.values()
            if not others and (part.shape != value.shape or not torch.equal(part, value)):
                raise UnsupportedModelError(f"{name} is stored in another form, {found[name][0]}")
    return found
