"""Branches of the code of transformers' classes: values of their config that decide what is computed, beside sizes.

Each branch changes one field of the small config of hf_sizes.py, and goes through the first row of `titan certify`: transformers' own class,
made of the same words, in one process.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.hf_sizes import overrides_of
from titan.checks.layout_rules import resolve_layout
from titan.config.errors import ConfigError
from titan.config.schema import JobConfig
from titan.config.toml import read_toml
from titan.numerics.certify.command import Certifier

Fields = dict[str, Any]
TABLES = read_toml(Path(__file__).with_suffix(".toml"))[0]


def branches(architecture: str) -> dict[str, Fields]:
    """Return the fields that each branch changes, by its name."""
    import transformers
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    kind: Any = getattr(transformers, architecture)
    code = inspect.getsource(sys.modules[kind.__module__])
    config = kind.config_class(**overrides_of(architecture)).to_dict()
    found: dict[str, Fields] = {}
    for key, value in sorted(config.items()):
        is_read = re.search(rf"config\.{key}\b|[\"']{key}[\"']", code) is not None
        if isinstance(value, bool) and is_read and not key.startswith(tuple(TABLES["of_call"])):
            found[f"{key} = {str(not value).lower()}"] = {key: not value}
        if isinstance(value, str):
            others = [text for text in TABLES["texts"].get(key, ()) if text != value]
            found |= {f'{key} = "{text}"': {key: text} for text in others}
        is_by_layer = isinstance(value, list) and len(value) == config.get("num_hidden_layers")
        if is_by_layer and all(isinstance(one, str) for one in value):
            named = {*re.findall(r"[\"'](\w+)[\"']", code)} & {*ALLOWED_LAYER_TYPES}
            for one in sorted(named | {*value}):
                layers = [value[0], *[one] * (len(value) - 1)]
                changed: Fields = {key: layers}
                if "sliding" in one and "sliding_window" in config:
                    changed["sliding_window"] = 8
                found[f'{key} with "{one}"'] = changed
    rope = config.get("rope_parameters") or {}
    if "rope_type" in rope:
        for name, more in TABLES["ropes"].items():
            table = {**rope, "rope_type": name, **more}
            found[f'rope_type = "{name}"'] = {"rope_parameters": table}
    return found


def verdict(architecture: str, fields: Fields, pool: Any) -> str:
    """Return the largest difference from transformers, or why there is none: "refused: ", "unknown: " or "DIFFERS: "."""
    small = {**overrides_of(architecture), **fields}
    model = {
        "name": "transformers",
        "architecture": architecture,
        "overrides": {k: v for k, v in small.items() if v is not None},
    }
    try:
        config = JobConfig.model_validate({"model": model, "training": {"seq_len": 64}})
        sizes, problems = config.model.resolved
        if sizes is None:
            return f"refused: {problems[0][1]}"
        certifier = Certifier(config, resolve_layout(config, 1))
        certifier.pool = pool
        row = certifier.certify_source()
    except (ConfigError, ValueError) as error:
        return f"refused: {' '.join(str(error).split())[:200]}"
    if row.verdict == "equal":
        return f"{max(row.differences.values()):.1e}"
    return f"{'DIFFERS' if row.verdict == 'differs' else row.verdict}: {row}"
