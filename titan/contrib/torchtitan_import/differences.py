"""Settings that mean something else in TorchTitan v0.2.2, for `titan check`. Imports no torch.

README.md lists what differs in every run, such as the initialization of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from titan.checks.check_extension import CheckExtension
from titan.config.errors import RuleViolation
from titan.config.model import family
from titan.config.quantize import FLOAT8
from titan.config.schema import JobConfig
from titan.config.toml import format_value

from .aliases import TABLES

FLAVORS, DEFAULTS = TABLES["flavors"], TABLES["defaults"]


class Differences(CheckExtension):
    """The lines `differences` of `titan check`, for a job with keys or flavors that only TorchTitan has."""

    def facts(self, config: JobConfig, known: dict[str, Any]) -> dict[str, Any]:
        # The warnings are of aliases.py.
        return {"differences": differences(config) if config.source_map.warnings else []}

    def lines(self, facts: dict[str, Any]) -> list[str]:
        lines = [f"    {line}" for line in facts["differences"]]
        return ["differs  from TorchTitan v0.2.2 with the same file:", *lines] if lines else []


def differences(config: JobConfig) -> list[str]:
    """Return a line for each setting of a valid job that means something else in TorchTitan.

    Args:
        config: the job.

    Returns:
        The lines. A model that TorchTitan lacks has none.
    """
    if config.model.flavor not in FLAVORS.get(config.model.name, ()):
        return []
    differences = [*_in_model(config), *_in_defaults(config)]
    return [f"{key}: {message}" for key, message in differences]


def _in_model(config: JobConfig) -> Iterator[RuleViolation]:
    """Yield the differences of the model, its masks and its weight decay."""
    model = config.model
    if config.data.document_mask:
        yield (
            "data.document_mask",
            "true ignores the label across a boundary; TorchTitan does not",
        )
    elif model.flavor in TABLES["masked"].get(model.name, ()):
        yield "data.document_mask", f"false; TorchTitan masks documents in {model.flavor}"
    flavor = family(model.name).FLAVORS[model.flavor]
    others = dict(TABLES["sizes"].get(model.name, {}).get(model.flavor, {}))
    if flavor.num_experts:
        others |= TABLES["balance"].get(model.name, {})
    # TorchTitan applies DeepSeek's YaRN only to sequences longer than those of pretraining. titan always does, as transformers.
    if model.name == "deepseek_v3" and config.training.seq_len <= flavor.original_context:
        others["rope_factor"] = 0.0
    for name in {**model.overrides, **others}:
        value = model.overrides.get(name, getattr(flavor, name))
        if value != (theirs := others.get(name, getattr(flavor, name))):
            yield f"model.overrides.{name}", f"{value}; {model.flavor} has {theirs} there"
    optimizer = config.any_optimizer
    if optimizer.weight_decay and not optimizer.decay_norms:
        yield (
            "optimizer.decay_norms",
            "false spares norms from weight decay; TorchTitan does not",
        )


def _in_defaults(config: JobConfig) -> Iterator[RuleViolation]:
    """Yield settings that the file leaves to a default, in the sections that the run uses."""
    for key, theirs in DEFAULTS.items():
        *path, name = key.split(".")
        section = reduce(getattr, path, config)
        # A section that the run does not use changes no number.
        is_used = {
            "quantize": any(converter in FLOAT8 for converter in config.model.converters),
            "validation": config.validation.enable,
        }.get(path[0], True)
        ours = getattr(section, name, theirs)
        if is_used and name not in section.model_fields_set and ours != theirs:
            ours = "that of training" if ours is None else format_value(ours)
            yield key, f"{ours} by default; TorchTitan's default is {format_value(theirs)}"
