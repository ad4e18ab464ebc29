"""LLaVA in `transformers` (LlavaForConditionalGeneration with CLIP and Llama): names, and config.json. Imports no torch.

Names are those of the published folders, llava-hf/llava-1.5-*. The decoder does not depend on CLIP's blocks past
`vision_feature_layer` and CLIP's last norm. Reading a folder skips them, and a folder that is written has no blocks past
the last one that LLaVA reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan.config.toml import table_beside
from titan.models.common import hf_names
from titan.models.llama3 import huggingface as llama3

from .config import LlavaConfig

Fields = dict[str, Any]
"""A file of a folder, or a table in it."""
ARCHITECTURES = {"LlavaForConditionalGeneration": "llava"}
_VISION = "vision_tower.vision_model."
# transformers 5 writes the second spelling.
SPELLINGS = ((_VISION, "vision_tower."),)

_NAMES = table_beside(__file__, "names.toml")
_VISION_FIELDS: tuple[hf_names.Field, ...] = (
    ("vision_dim", "hidden_size", ...),
    ("vision_heads", "num_attention_heads", ...),
    ("vision_ffn_dim", "intermediate_size", ...),
    ("image_size", "image_size", ...),
    ("patch_size", "patch_size", ...),
    ("vision_norm_eps", "layer_norm_eps", ...),
)
_ONLY, _ONLY_VISION = _NAMES["only"], _NAMES["only_vision"]


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: LLaVA has no parameter of this name.
    """
    if name in _NAMES["top"]:
        return _NAMES["top"][name]
    module, _, leaf = name.rpartition(".")
    if module in _NAMES["modules"]:
        return f"{_NAMES['modules'][module]}.{leaf}"
    if not name.startswith("vision."):
        return f"language_model.{llama3.hf_name(name)}"
    _, _, number, part = module.split(".", 3)
    return f"{_VISION}encoder.layers.{number}.{_NAMES['block'][part]}.{leaf}"


def hf_config(config: LlavaConfig) -> Fields:
    """Return the config.json of these sizes."""
    text = llama3.hf_config(config)
    return {
        **hf_names.header(ARCHITECTURES, "LlavaForConditionalGeneration"),
        "text_config": {**text, "max_position_embeddings": 4096},
        "vision_config": {
            **_ONLY_VISION,
            **hf_names.fields_of(config, _VISION_FIELDS),
            "num_hidden_layers": config.vision_layers,
            "projection_dim": config.dim,  # unused
        },
        **_ONLY,
        "image_token_index": config.image_token,
        "image_seq_length": config.num_patches,
        "vision_feature_layer": -1,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": 4096,
    }


def hf_files(config: LlavaConfig) -> dict[str, Fields]:
    """Return the files, by name, that make transformers prepare pictures as `titan.contrib.llava.image_text` does."""
    side = config.image_size
    return {
        # CLIPImageProcessor's defaults do the rest.
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": config.patch_size,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }


# Statistics of each colour, 0 to 1, over CLIP's training pictures.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def read_config(hf: Fields) -> LlavaConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe LLaVA 1.5.
    """
    text, vision = hf.get("text_config") or {}, _vision(hf)
    hf_names.require(hf, _ONLY)
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise ValueError(f"text_config is of a {kind}; titan's decoder is a Llama")
    for key, value in _ONLY_VISION.items():
        if vision.get(key, value) != value:
            raise ValueError(f"vision_config: {key} is {vision[key]!r}; titan's has {value!r}")
    decoder = llama3.read_config(text)
    sizes = hf_names.read_fields(vision, LlavaConfig, _VISION_FIELDS)
    hf = hf_names.renamed(hf, "image_token_id", "image_token_index")
    token = hf_names.read_fields(
        hf, LlavaConfig, (("image_token", "image_token_index", 32_000),)
    )
    fields = {name: getattr(decoder, name) for name in decoder.__dataclass_fields__}
    return LlavaConfig(**{**fields, **sizes, **token}, vision_layers=_layers_read(hf))


def hf_unused(hf: Fields, sizes: LlavaConfig) -> Iterator[str]:
    """Yield the prefixes of tensor names that the decoder's input does not depend on.

    Args:
        hf: content of config.json.
        sizes: the model's sizes.
    """
    for vision in SPELLINGS[0]:
        yield f"{vision}post_layernorm."
        for number in range(sizes.vision_layers, _vision(hf)["num_hidden_layers"]):
            yield f"{vision}encoder.layers.{number}."


def _vision(hf: Fields) -> Fields:
    """Return the settings of the encoder, with transformers' defaults."""
    given = hf.get("vision_config") or hf_names.completed({}, "llava_vision")
    return hf_names.completed(given, "clip_vision_model")


def _layers_read(hf: Fields) -> int:
    """Return the number of the encoder's blocks that run before the layer that LLaVA reads."""
    total, layer = _vision(hf)["num_hidden_layers"], hf.get("vision_feature_layer", -2)
    if not isinstance(layer, int) or not isinstance(total, int) or total > 1000:
        raise ValueError(
            f"vision_feature_layer is {layer!r} of {total!r}; titan reads one layer"
        )
    # Layer 0 is the embedding, so there is one more layer than blocks.
    number = layer if layer >= 0 else total + 1 + layer
    if not 1 <= number <= total:
        raise ValueError(f"vision_feature_layer {layer} is none of the {total} blocks")
    return number
