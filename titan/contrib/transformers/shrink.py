"""Small values of the fields of config.json, for proofs and measurements of a job that does not fit on a CPU. Imports no torch."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from .config import FIELDS, NAMES, TransformersConfig

_HEAD_DIM = 16


def shrink(sizes: TransformersConfig, n_layers: int | None = None) -> dict[str, Any]:
    """Return the keys of a job with small values: fields of config.json, in which ratios and kinds of layers stay.

    Args:
        sizes: the model's sizes.
        n_layers: the number of layers. None: the least with a layer of each kind.
    """
    content = json.loads(sizes.source.hf)
    ratio = min(sizes.n_heads // max(1, sizes.n_kv_heads), 8)
    # Some classes give other layers a multiple of what the field says.
    fields = [content[key] for key in NAMES["n_kv_heads"] if content.get(key)]
    groups = min(sizes.n_kv_heads, 4 if ratio == 1 else 2, *fields)
    wanted = {
        name: min(limit, getattr(sizes, name, limit) or limit)
        for name, limit in FIELDS["small"].items()
    }
    wanted |= {"n_heads": groups * ratio, "n_kv_heads": groups}
    wanted["n_layers"] = n_layers or num_layers(sizes)
    wanted["head_dim"] = _HEAD_DIM
    if "head_dim" not in content:
        wanted["dim"] = groups * ratio * _HEAD_DIM  # from which it follows
    overrides: dict[str, Any] = {}
    for name, value in wanted.items():
        for key in NAMES[name]:
            if (
                _is_number(content.get(key)) and content[key]
            ):  # 0 is turned off, such as a window
                overrides[key] = value
    for key, value in FIELDS["small_fields"].items():
        if _is_number(content.get(key)):
            overrides[key] = min(value, content[key])
    for key, value in content.items():
        if isinstance(value, list) and len(value) == content.get("num_hidden_layers"):
            overrides[key] = value[: wanted["n_layers"]]  # such as layer_types
    if _is_number(content.get("mamba_n_heads")):  # whose state is as wide as its input
        width = int((content.get("mamba_expand") or 2) * overrides["hidden_size"])
        mamba = {"mamba_n_heads": width // _HEAD_DIM, "mamba_d_head": _HEAD_DIM}
        mamba |= {
            "mamba_d_state": 16,
            "mamba_n_groups": min(2, content.get("mamba_n_groups", 1)),
        }
        overrides |= {
            key: n for key, n in {**mamba, "mamba_d_ssm": width}.items() if key in content
        }
    if "qk_rope_head_dim" in overrides and "head_dim" in overrides:
        # Of the rotated channels in some config classes, of all in others.
        is_rotated = content["head_dim"] == content["qk_rope_head_dim"]
        overrides["head_dim"] = 8 if is_rotated else 24
    return {"model.overrides": overrides}


def num_layers(sizes: TransformersConfig) -> int:
    """Return the least number of layers, four or five or more, with a layer of each kind."""
    kinds = [
        (bool(w), bool(e)) for w, e in zip(sizes.windows, sizes.experts_of_blocks, strict=True)
    ]
    even_or_odd = count(4 + len(kinds) % 2, 2)
    least = (n for n in even_or_odd if n >= len(kinds) or {*kinds[:n]} == {*kinds})
    return min(len(kinds), next(least))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
