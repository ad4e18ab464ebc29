"""Resolution of a [model] section or a config.json into a model of transformers.

Importing this file imports neither torch nor transformers. Its functions import both.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titan.base.untrusted import InputError, is_there, read_json
from titan.config.errors import did_you_mean, hub_fix

from .config import NAMES, ModelSource, TransformersConfig
from .errors import UnsupportedModelError, WrongKeyError, refusing

OLDEST, NEWEST = (5, 20), (5, 99)
"""Versions of transformers whose interfaces for attention, masks and experts this family uses."""
Fields = dict[str, Any]
"""A config.json, or a table in it."""
_REFUSED = "transformers refuses the config"
_MOST_EXPERTS = 2**16  # far beyond any model: each expert has its own names on disk


def resolve(section: Any) -> tuple[TransformersConfig | None, list[tuple[str, str]]]:
    """Return the sizes of a [model] section, or None, and the problems of the section by key.

    Args:
        section: the [model] section of a job.
    """
    try:
        plan = tuple(sorted(section.plan.items()))
        named = str(Path(section.hf_path).absolute()) if section.hf_path else ""
        overrides = json.dumps(section.overrides, default=str)  # TOML has dates
        found = _read(named, section.architecture, overrides, section.trust_remote_code)
        return describe(found._replace(plan=plan)), []
    except WrongKeyError as error:
        return None, [*error.args]
    except UnsupportedModelError as error:
        key = "model.hf_path" if section.hf_path else "model.architecture"
        fix = "" if Path(section.hf_path).exists() else hub_fix(section.hf_path)
        return None, [(key, f"{error}{fix}")]


@cache
def _read(path: str, architecture: str, overrides: str, trusted: bool) -> ModelSource:
    """Return the source of a model, without its plan.

    Args:
        path: folder or config.json, or "".
        architecture: a class, or "".
        overrides: fields of its config, as JSON.
        trusted: whether code in the folder may run.
    """
    if bool(path) == bool(architecture):
        raise WrongKeyError(
            (
                "model.hf_path",
                'the family "transformers" needs model.hf_path (a folder, or a config.json) or model.architecture '
                '(a class, such as "Qwen3ForCausalLM"), one of them',
            )
        )
    transformers = _import()
    code, content = "", Fields()
    if path:
        content = _config_json(Path(path))
        kind = str(content.get("model_type", ""))
        if "auto_map" in content and kind not in transformers.CONFIG_MAPPING:
            if not trusted:
                raise UnsupportedModelError(
                    "its model is Python code in the folder, which could do anything: set model.trust_remote_code = true if you "
                    "have read it, or --trust-remote-code of a command that reads a checkpoint"
                )
            code = path if Path(path).is_dir() else str(Path(path).parent)
            with refusing(_REFUSED):
                config = transformers.AutoConfig.from_pretrained(code, trust_remote_code=True)
        else:
            config = _config_of(transformers, content)
    else:
        kind = getattr(transformers, architecture, None)
        if kind is None or getattr(kind, "config_class", None) is None:
            endings = ("ForCausalLM", "LMHeadModel")
            names = [n for n in dir(transformers) if n.endswith(endings) and n[:4] != "Auto"]
            near = did_you_mean(architecture, names, cutoff=0.5)
            message = f"transformers {transformers.__version__} has no {architecture}{near}"
            raise WrongKeyError(("model.architecture", message))
        content = {"architectures": [architecture]}
        with refusing(_REFUSED):
            config = kind.config_class(**content)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder with a decoder, and titan trains decoders alone"
        )
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedModelError(
            f"{config.model_type} has several parts, such as a vision model, and titan trains text models"
        )
    changes = json.loads(overrides)
    if code:
        _merged(config.to_dict(), changes, config)
        _require_effect(config, changes, "the folder's own code gets no other values")
    else:
        with refusing(_REFUSED):
            config = _changed(config, content, changes)
    _require_enough_experts(config.to_dict())
    return _source(config, code)


def _source(config: Any, code: str = "") -> ModelSource:
    """Return the source of a model in high precision: quantized weights are converted when titan reads them."""
    content = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
    for key in NAMES["num_experts"]:
        number = content.get(key)
        if isinstance(number, int) and number > _MOST_EXPERTS:
            raise UnsupportedModelError(
                f"{key} is {number:,}, and titan builds models of at most {_MOST_EXPERTS:,} experts"
            )
    return ModelSource(json.dumps(content, sort_keys=True, default=str), code=code)


def _changed(config: Any, given: Fields, overrides: Fields) -> Any:
    """Return a config with other values: what its class makes of the given fields and the overrides, as if one had passed them to it.

    So a field that the class derives from others, such as a kind for each layer, is derived from the new values.

    Args:
        config: the config of the given fields.
        given: fields of a config.json; nothing for the defaults of a class.
        overrides: values of its fields.

    Raises:
        WrongKeyError: a field does not exist, or its value would have no effect.
    """
    changes = {_their_name(key, config): value for key, value in overrides.items()}
    fields = config.to_dict()
    merged = _merged(fields, changes, config)
    own = {config.attribute_map.get(key, key): value for key, value in given.items()}
    content = own | {key: merged[key] for key in changes}
    count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    cut = _cut(fields, changes.get(count), config.num_hidden_layers)
    content |= {key: value for key, value in cut.items() if key in own and key not in changes}
    kind = type(config)
    try:
        config = kind.from_dict(content)
    except Exception:
        # A class may have a default for each layer of its default depth.
        config = kind.from_dict({**cut, **content})
    _require_effect(config, changes, "the config of {} derives this field from others, as {}")
    return config


def _cut(fields: Fields, number: Any, before: int) -> Fields:
    """Return the fields with a value for each layer, cut to another number of layers, or None where the class is to fill in more."""
    if number is None or number == before:
        return {}
    by_layer = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == before}
    return {k: v[:number] if number <= before else None for k, v in by_layer.items()}


def _require_effect(config: Any, changes: Fields, reason: str) -> None:
    """Raise WrongKeyError if a config does not have the values of a change."""
    for key, value in changes.items():
        if key == "num_nextn_predict_layers" and value:
            message = "transformers builds no modules of multi-token prediction; remove it, or take titan's family deepseek_v3"
            raise WrongKeyError((f"model.overrides.{key}", message))
        has = getattr(config, key, value)
        if not isinstance(value, dict | list) and has != value:
            message = reason.format(config.model_type, has)
            raise WrongKeyError((f"model.overrides.{key}", message))


def _config_of(transformers: Any, content: Fields) -> Any:
    """Return the config of a config.json, or raise UnsupportedModelError if its type is unknown or its class is of another type."""
    known = transformers.CONFIG_MAPPING
    type_ = str(content.get("model_type", ""))
    if type_ not in known:
        raise UnsupportedModelError(
            f'transformers {transformers.__version__} has no model_type "{type_}"{did_you_mean(type_, known)}'
        )
    with refusing(_REFUSED):
        config = known[type_].from_dict(content)
    for name in content.get("architectures") or ():
        kind = getattr(getattr(transformers, str(name), None), "config_class", None)
        if kind is not None and kind.model_type != content["model_type"]:
            raise UnsupportedModelError(
                f"architecture {name} does not go with model_type {content['model_type']}"
            )
    return config


def _require_enough_experts(content: Fields) -> None:
    """Raise WrongKeyError if a token would go to more experts than there are."""
    fields = [
        next((k for k in NAMES[name] if k in content), "") for name in ("top_k", "num_experts")
    ]
    top_k, total = (content.get(key) for key in fields)
    if isinstance(top_k, int) and isinstance(total, int) and top_k > total > 0:
        message = f"a token goes to {top_k} experts, and {fields[1]} is {total}"
        raise WrongKeyError((f"model.overrides.{fields[0]}", message))


def _their_name(key: str, config: Any) -> str:
    """Return the name under which a config class keeps a field. titan's name for it, such as n_layers, is accepted, too."""
    if not hasattr(config, key):
        key = next((name for name in NAMES.get(key, ()) if hasattr(config, name)), key)
    return config.attribute_map.get(key, key)


def _merged(fields: Fields, changes: Fields, config: Any, table: str = "") -> Fields:
    """Return fields of a config with changes, of which a table, such as rope_parameters, changes the keys that it names.

    Raises:
        WrongKeyError: there is no such field.
    """
    # Keys of tables of rotary embeddings belong to their kind, which may change.
    known = {*fields}
    if table:
        from transformers.modeling_rope_utils import RopeParameters

        known |= {*RopeParameters.__annotations__}
    merged = dict(fields)
    for key, value in changes.items():
        is_field = not table and (
            hasattr(config, key) or any(key in names for names in NAMES.values())
        )
        if key not in known and not is_field:
            where = f"{table[:-1]} in the" if table else "the"
            message = f"{where} config of {config.model_type} has no such field{did_you_mean(key, known)}"
            raise WrongKeyError((f"model.overrides.{table}{key}", message))
        before = fields.get(key)
        if isinstance(before, dict) != isinstance(value, dict) and before is not None:
            wanted = "a table" if isinstance(before, dict) else "no table"
            raise WrongKeyError((f"model.overrides.{table}{key}", f"expected {wanted}"))
        if isinstance(before, dict):
            value = _merged(before, value, config, f"{table}{key}.")
        merged[key] = value
    return merged


def _config_json(path: Path) -> Fields:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = read_json(file, Fields)  # of a regular file of bounded size
    except InputError as error:
        text = str(error) if is_there(file) else f"there is no {file}"
        raise UnsupportedModelError(text) from error
    return json.loads(json.dumps(content), object_hook=_as_float)


def _as_float(table: Fields) -> Any:
    """Return the number of transformers' {"__float__": "Infinity"}, and any other table as it is."""
    return float(str(table["__float__"])) if table.keys() == {"__float__"} else table


def _import() -> Any:
    """Return the package transformers, of a version that this family knows."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise UnsupportedModelError(
            "transformers is not installed: pip install 'titan-pretrain[transformers]'"
        ) from None
    if not OLDEST <= tuple(int(part) for part in found.split(".")[:2]) <= NEWEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedModelError(
            f"transformers {found} is installed, and titan uses interfaces of {oldest} to {NEWEST[0]}.x: "
            "pip install 'titan-pretrain[transformers]'"
        )
    import torch

    from titan.parallel.float8 import quiet_torchao

    quiet_torchao(has_kernels=torch.cuda.is_available())  # transformers imports it
    import transformers

    return transformers


def read_config(content: Fields) -> TransformersConfig:
    """Return the sizes of a config.json.

    Raises:
        UnsupportedModelError: titan cannot run the model.
    """
    transformers = _import()
    content = json.loads(json.dumps(content), object_hook=_as_float)
    return describe(_source(_config_of(transformers, content)))


@cache
def describe(source: ModelSource) -> TransformersConfig:
    """Return the sizes of a model, which is built on meta.

    Raises:
        UnsupportedModelError: titan cannot run the model.
    """
    import torch

    from .model import TransformersModel

    with refusing("its sizes cannot be found"), torch.device("meta"):
        return TransformersModel(source).config
