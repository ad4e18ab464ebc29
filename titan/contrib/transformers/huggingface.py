"""Hugging Face folders of models of `transformers`: names of tensors on disk, and config.json.

Names depend on the model (disk.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from inspect import getsource
from typing import Any

from .config import TransformersConfig
from .resolve import Fields
from .resolve import read_config as read_config

ARCHITECTURES: dict[str, str] = {}  # any, where no other family has it


def hf_name_of(sizes: TransformersConfig) -> Callable[[str], str]:
    """Return the function that maps our names of parameters to those on disk, {} for the number of an expert."""
    return _model(sizes).disk_name


def hf_name(name: str) -> str:
    """Raise KeyError: names depend on the model (`hf_name_of`)."""
    raise KeyError(name)


def hf_buffer(name: str, sizes: TransformersConfig) -> str:
    """Return the name on disk of a buffer that a folder has."""
    return _model(sizes).disk_name(name)


def hf_config(sizes: TransformersConfig) -> Fields:
    """Return the config.json of a model."""
    # As transformers writes numbers that JSON does not have.
    return json.loads(sizes.source.hf, parse_constant=lambda word: {"__float__": word})


def hf_unused(hf: Fields, sizes: TransformersConfig) -> Iterator[str]:
    """Yield the prefixes of tensor names that transformers reads nothing from, such as those of multi-token prediction.

    Args:
        hf: content of config.json.
        sizes: the model's sizes.
    """
    model = _model(sizes)
    names = [model.hf_name(name) for name, _ in model.named_parameters()]
    for pattern in model.hf._keys_to_ignore_on_load_unexpected or ():
        prefix = re.sub(r"^\(\^\|\\\.\)|^\^|\.\*$", "", pattern).replace("\\.", ".")
        if re.fullmatch(r"[\w.]+", prefix) and not any(n.startswith(prefix) for n in names):
            yield prefix


def hf_unread(hf: Fields, sizes: TransformersConfig) -> Iterator[str]:
    """Yield the fields of a config.json that the code of the model's classes and of its config's never names.

    Args:
        hf: content of config.json.
        sizes: the model's sizes.
    """
    model = _model(sizes).hf
    kinds = {base for part in (model.config, *model.modules()) for base in type(part).__mro__}
    names = {kind.__module__ for kind in kinds} - {"builtins"}
    code = [getsource(sys.modules[name]) for name in names if not name.startswith("torch.")]
    words = {word for text in code for word in re.findall(r"\w+", text)}
    yield from (key for key, value in hf.items() if value and key not in words)


def differences(sizes: TransformersConfig, other: TransformersConfig) -> Fields:
    """Return the fields of config.json, with their values in `sizes`, in which two models differ."""
    ours, theirs = sizes.facts, other.facts
    return {key: value for key, value in ours.items() if value != theirs.get(key, value)}


@cache
def _model(sizes: TransformersConfig) -> Any:
    import torch

    from .model import TransformersModel

    with torch.device("meta"):
        return TransformersModel(sizes.source)
