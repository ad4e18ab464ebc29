"""config.json without one of its keys: the sizes are those of the config that transformers completes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from titan.config.model import families, family
from titan.huggingface.hf_model import hooks_of, unread_keys

DEFAULTS = json.loads(
    (Path(__file__).parents[2] / "models/common/hf_defaults.json").read_text(encoding="utf-8")
)
NAMES = [name for name in families() if name != "flux" and family(name).FLAVORS]
FLAVORS = [(name, flavor) for name in NAMES for flavor in family(name).FLAVORS]
# DeepseekV2Config has no number of experts for a token, so its model cannot run either.
REQUIRED = {("deepseek_v2", "num_experts_per_tok")}


def completed(hf: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config that transformers makes of a config.json, or None if it refuses it."""
    try:
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(hf)))
    except (ValueError, TypeError, KeyError, ZeroDivisionError):
        return None
    except Exception as error:  # its checks of types
        if type(error).__module__.startswith("huggingface_hub"):
            return None
        raise
    return {**config.to_dict(), "architectures": hf["architectures"]}


def read(hooks: Any, hf: dict[str, Any]) -> Any:
    try:
        return hooks.read_config(hf)
    except (ValueError, TypeError, LookupError) as error:
        return str(error)


def variants(hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the config.json without each of its keys, with null for each, and without each key of a table in it."""
    found = {}
    for key in hf.keys() - {"architectures", "model_type"}:
        found[key] = {k: v for k, v in hf.items() if k != key}
        found[f"{key} = null"] = {**hf, key: None}
        if isinstance(hf[key], dict) and key.endswith("_config"):
            for inner in hf[key].keys() - {"model_type", "architectures"}:
                rest = {k: v for k, v in hf[key].items() if k != inner}
                found[f"{key}.{inner}"] = {**hf, key: rest}
    return found


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_each_key_that_is_left_out_has_the_value_of_transformers_class(
    name: str, flavor: str
) -> None:
    hooks: Any = hooks_of(name)
    full = hooks.hf_config(family(name).FLAVORS[flavor])
    tried = 0
    for what, hf in variants(full).items():
        whole = completed(hf)
        # A base of null makes a model of transformers that cannot run.
        if (
            what == "rope_theta = null"
            or whole is None
            or (full["model_type"], what.split(" ")[0]) in REQUIRED
        ):
            continue
        expected, found = read(hooks, whole), read(hooks, hf)
        if isinstance(expected, str):  # a model that titan does not have
            assert isinstance(found, str), (what, expected, found)
            continue
        tried += 1
        assert found == expected, (
            what,
            found if isinstance(found, str) else dataclasses.asdict(found),
        )
    assert tried > 10


@pytest.mark.parametrize("model_type", sorted(DEFAULTS.keys() - {"flux", "llava_vision"}))
def test_the_values_are_those_of_the_class(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    values = {**config.to_dict(), "topk_method": getattr(config, "topk_method", None)}
    rope = values.get("rope_parameters") or {}
    for key, value in DEFAULTS[model_type].items():
        if key == "rope_theta":
            assert rope[key] == value
        elif key == "rope_parameters":
            assert rope.items() >= value.items()
        else:
            assert getattr(config, key, values.get(key)) == value, key


def test_the_encoder_of_llava_and_the_sizes_of_flux() -> None:
    llava: Any = transformers.LlavaConfig()
    vision = llava.vision_config.to_dict()
    assert vision.items() >= DEFAULTS["llava_vision"].items()
    flux: Any = hooks_of("flux")
    # FLUX.1 schnell has the sizes of the class in diffusers.
    found = flux.read_config({"_class_name": "FluxTransformer2DModel"})
    assert found == family("flux").FLAVORS["12B"]


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_no_model_of_titan_has_are_named(name: str, tmp_path: Path) -> None:
    hooks: Any = hooks_of(name)
    sizes = next(iter(family(name).FLAVORS.values()))
    whole = completed(hooks.hf_config(sizes))
    assert whole is not None
    file = tmp_path / "config.json"
    assert unread_keys(file, whole, hooks, sizes) == []
    more = {"attention_multiplier": 3.5, "logit_scale": 0.5, "nothing": None, "off": False}
    # It adds a term to the loss of transformers' class.
    more["output_router_logits"] = True
    [line] = unread_keys(file, {**whole, **more}, hooks, sizes)
    names = line.removeprefix(f"{file}: not read: ").split(", ")
    assert sorted(names) == ["attention_multiplier", "logit_scale", "output_router_logits"]
