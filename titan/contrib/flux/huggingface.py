"""Flux in `diffusers` (FluxTransformer2DModel): names, and config.json of a pipeline's `transformer/` folder. Imports no torch.

Only names differ, with one exception: in a block of one stream, diffusers joins the matrices after attention and after the
feed-forward layer into one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from titan.config.toml import table_beside
from titan.models.common import hf_names

from .config import FluxConfig

ARCHITECTURES = {"FluxTransformer2DModel": "FluxTransformer2DModel"}

_NAMES = table_beside(__file__, "names.toml")
_FIELDS: tuple[hf_names.Field, ...] = (
    ("n_double", "num_layers", ...),
    ("n_heads", "num_attention_heads", ...),
    ("in_channels", "in_channels", ...),
    ("context_dim", "joint_attention_dim", ...),
    ("pooled_dim", "pooled_projection_dim", ...),
    ("guidance_embed", "guidance_embeds", False),
)


def hf_name_of(sizes: FluxConfig) -> Callable[[str], str]:
    """Return a function from our parameter names to those of diffusers.

    Two of our parameters with the same name in diffusers are the columns of one tensor there.
    """

    def name_of(name: str) -> str:
        name, _, kind = name.rpartition(".")
        if not (match := re.fullmatch(r"layers\.(\d+)\.(.+)", name)):
            return f"{_NAMES['top'][name]}.{kind}"
        number, part = int(match[1]), match[2]
        if number < sizes.n_double:
            return f"transformer_blocks.{number}.{_NAMES['double'][part]}.{kind}"
        number -= sizes.n_double
        return f"single_transformer_blocks.{number}.{_NAMES['single'][part]}.{kind}"

    return name_of


def hf_config(config: FluxConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "num_single_layers": config.n_layers - config.n_double,
        "attention_head_dim": config.head_dim,
        "axes_dims_rope": list(config.rope_axes),
        **hf_names.fields_of(config, _FIELDS),
    }


def read_config(hf: dict[str, Any]) -> FluxConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe Flux.1.
    """
    hf = hf_names.completed(hf, "flux")
    if hf.get("patch_size", 1) != 1 or hf.get("out_channels") not in (
        None,
        hf.get("in_channels"),
    ):
        raise ValueError("patch_size and out_channels are not those of Flux.1")
    # Two keys have no field of ours. They are read under the name of the field that is computed from each.
    more = (("n_layers", "num_single_layers", ...), ("dim", "attention_head_dim", ...))
    sizes = hf_names.read_fields(hf, FluxConfig, (*_FIELDS, *more))
    sizes["n_layers"] += sizes["n_double"]
    sizes["dim"] *= sizes["n_heads"]
    axes = tuple(map(int, hf["axes_dims_rope"]))
    if sum(axes) != hf["attention_head_dim"] or any(size < 2 or size % 2 for size in axes):
        raise ValueError(f"axes_dims_rope {axes} are not the even parts of a head")
    return FluxConfig(**sizes, ffn_dim=4 * sizes["dim"], rope_axes=axes)
