"""Megatron's names of the tensors of a Hugging Face folder, and the part of a tensor that each means.

    self_attention.linear_qkv.weight    ((H + 2 G) K, D): for each of G groups its queries, one key and one value
    mlp.linear_fc1.weight               (2 F, D): gate over up. Single shards (since 0.15) are two tensors: weight_w and weight_v
    mlp.experts.experts.linear_fc1      (E, 2 F, D), or a tensor for each expert

H query heads, G groups, K head dim, D model, F feed-forward, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from .job import TABLES

_LAYER, _MTP, _TOP = TABLES["layer"], TABLES["mtp"], TABLES["top"]
_FEED_FORWARD = re.compile(r"(mlp(?:\.shared_experts|\.experts\.\{\})?)\.(\w+)_proj")
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


class TensorPlace(NamedTuple):
    """TensorPlace of a tensor in a checkpoint.

    Attributes:
        name: Megatron's name. {} stands for the number of an expert.
        part: part of the tensor: q, k, v, gate, up, or all for "".
    """

    name: str
    part: str = ""


def places(theirs: str, *, num_layers: int) -> Iterator[TensorPlace]:
    """Yield the places where Megatron may keep a tensor.

    Args:
        theirs: its name in a Hugging Face folder. {} stands for the number of an expert.
        num_layers: layers before those of multi-token prediction.
    """
    words = (TABLES["synonyms"].get(word, word) for word in theirs.split("."))
    name, _, ending = ".".join(words).rpartition(".")
    if name in _TOP:
        yield TensorPlace(_TOP[name] + ending)
        return
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return
    layer, name = int(match[1]), match[2]
    prefix = f"decoder.layers.{layer}."
    if layer >= num_layers:
        prefix = f"mtp.layers.{layer - num_layers}."
        if name in _MTP:
            yield TensorPlace(prefix + _MTP[name] + ending)
            return
        prefix += "transformer_layer."
    for rest, part in _in_layer(name):
        # Single shards of the feed-forward layer are whole tensors of two names.
        if part in ("gate", "up"):
            yield TensorPlace(f"{prefix}{rest}{ending}_{'w' if part == 'gate' else 'v'}")
        yield TensorPlace(f"{prefix}{rest}{ending}", part)


def _in_layer(name: str) -> Iterator[TensorPlace]:
    """Yield the places of a module of a layer, without the ending of its parameter."""
    for known in _LAYER.get(name, ()):
        yield TensorPlace(known)
    if projection := re.fullmatch(r"self_attn\.([qkv])_proj", name):
        yield TensorPlace("self_attention.linear_qkv.", projection[1])
    if projection := _FEED_FORWARD.fullmatch(name):
        module, kind = projection.groups()
        layer, part = ("linear_fc2.", "") if kind == "down" else ("linear_fc1.", kind)
        if module.endswith("{}"):
            yield TensorPlace(f"mlp.experts.experts.{layer}", part)
            module = "mlp.experts.experts.{}"
        yield TensorPlace(f"{module}.{layer}", part)


def part_of(tensor: Tensor, part: str, *, num_heads: int, num_groups: int) -> Tensor:
    """Return the part of a tensor that a place means.

    Args:
        tensor: Megatron's tensor.
        part: see `TensorPlace`.
        num_heads: query heads H.
        num_groups: groups G of query heads, which share a key and a value.
    """
    if part in ("gate", "up"):
        dim = max(tensor.ndim - 2, 0)
        return tensor.chunk(2, dim)[part == "up"]
    if part:
        queries = num_heads // num_groups
        grouped = tensor.unflatten(0, (num_groups, queries + 2, -1))
        parts = grouped.split([queries, 1, 1], dim=1)
        return parts["qkv".index(part)].flatten(0, 2)
    return tensor
