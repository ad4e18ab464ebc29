"""Section [model], and the sizes that it names by family, flavor and overrides.

A family is a folder in models/ (the package `titan.models.<name>`), or a package registered under the entry point
`titan.models`. It has `FLAVORS`, named sizes as frozen dataclasses, and importing it imports no torch. This file imports
torch only to check a plug-in or the names in `freeze`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_type_hints

from titan.base.untrusted import InputError
from titan.parallel.traits import UnknownSizes, add_defaults

from .base import TOKENIZER_FILE, Permission, ReadWith, Section, StrList
from .errors import (
    ConfigError,
    Problem,
    RuleViolation,
    Violations,
    choose,
    divisors,
    near,
    nearest,
)
from .plug_ins import is_ours, load_plug_in, plug_ins_by_name
from .toml import format_value

# Bounds far beyond any model. Without bounds, a typing error would show only by the memory that it needs.
LARGEST = {"n_layers": 10_000, "num_mtp_modules": 100, "": 2**24}
LARGEST_MODEL = 10**15
_DOCS = 'docs/architecture.md, "Adding a model family", says what titan reads'
# Fields that the estimates, the start-up page and the layout rules read from any model.
_SIZES = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_dim",
    "vocab_size",
    "num_params",
    "num_block_params",
    "num_embedding_params",
    "flops_per_token",
)
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


_OF_TRANSFORMERS = ReadWith("name", ("transformers",))
_CODE = Permission("code", option="--trust-remote-code")


class ModelSection(Section):
    """Which model to train, and its size."""

    name: str = "llama3"
    """The model family: a folder in models/, or the name of an entry point `titan.models`."""
    flavor: str = "debugmodel"
    """A named size of the family, such as "8B"."""
    overrides: dict[str, int | float | bool | str | list[Any] | dict[str, Any]] = {}
    """Fields of the flavor's config to change, such as {n_layers = 4}. vocab_size = "auto" is the number of the
    tokenizer's ids, rounded up to a multiple of 8; without it, a flavor has its own vocabulary."""
    hf_path: Annotated[str, _OF_TRANSFORMERS] = ""
    """For name = "transformers": a folder of Hugging Face, or a config.json, that says which model it is."""
    architecture: Annotated[str, _OF_TRANSFORMERS] = ""
    """For name = "transformers", in place of hf_path: a class, such as "Qwen3ForCausalLM". `overrides` are fields of its config."""
    plan: Annotated[dict[str, str], _OF_TRANSFORMERS] = {}
    """For name = "transformers": tensor-parallel styles of modules by pattern (docs/parallelism.md), before the derived ones."""
    trust_remote_code: Annotated[bool, _OF_TRANSFORMERS, _CODE] = False
    """For name = "transformers": run the Python code in the folder of hf_path."""
    hf_assets_path: Annotated[str, TOKENIZER_FILE] = ""
    """Folder with the tokenizer (tokenizer.json or tokenizer.model) and, for conversion from and to
    Hugging Face, safetensors and config.json."""
    attention_backend: Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"] = (
        "auto"
    )
    """Kernels of attention on a GPU. "auto": torch's order, which is cuDNN, FlashAttention-2, the
    memory-efficient kernel, plain operations on Hopper and Blackwell, and the same without cuDNN first
    elsewhere. Another name: that kernel, and the kernels after it in this order if it does not support a
    case. "fa3" and "fa4" are FlashAttention-3 and -4, which must be installed."""
    freeze: StrList = []
    """Patterns of names of parameters that are not trained, such as ["tok_embeddings.*", "layers.[0-3].*"].
    They get no gradients, no optimizer state and no decay. docs/checkpoints.md: how to begin from weights."""
    converters: StrList = []
    """Low-precision conversion of linear layers: "quantize.linear.float8" (or "float8") or
    "quantize.linear.mx". The section of the same name has its settings."""

    @property
    def resolved(self) -> tuple[Any, list[RuleViolation]]:
        """Return the sizes of the model, or None, and the problems of the section."""
        return _resolve(self)

    @property
    def sizes(self) -> Any:
        """Return the sizes of the model: the config dataclass of its family.

        Raises:
            ConfigError: the section is wrong.
        """
        sizes, violations = self.resolved
        if violations:
            raise ConfigError(
                [Problem("config", 0, key, message) for key, message in violations]
            )
        return sizes

    @property
    def known_sizes(self) -> Any:
        """Return the sizes of the model for rules about other sections: UnknownSizes if this section is wrong."""
        return self.resolved[0] or UnknownSizes()


def _resolve(section: ModelSection) -> tuple[Any, list[RuleViolation]]:
    """Return the config of a [model] section, or None, and the problems of the section."""
    try:
        package = family(section.name)
    except KeyError:
        retired: dict[str, str] = import_module("titan.models").RETIRED
        unknown = f'unknown model family "{section.name}"{choose(section.name, families())}'
        if nearest(section.name, families()) is None:
            unknown += '. For another model of transformers: name = "transformers", and hf_path = its folder'
        return None, [("model.name", retired.get(section.name, unknown))]
    # Families of other packages are checked when they are loaded. Tests check titan's families.
    foreign = is_plug_in(section.name)
    if foreign and (lacks := _lacks(package, ("FLAVORS", "TENSOR_PLAN", "build_model"))):
        return None, [("model.name", f"the family {section.name} lacks {lacks}; {_DOCS}")]
    # Check family, flavor, overrides and shape in this order, since each check needs the result of the previous one.
    if hasattr(package, "resolve"):  # its sizes come from a file, not from a flavor
        return package.resolve(section)
    flavors = package.FLAVORS
    if section.flavor not in flavors:
        hint = choose(section.flavor, flavors)
        return None, [
            ("model.flavor", f'{section.name} has no flavor "{section.flavor}"{hint}')
        ]
    flavor = flavors[section.flavor]
    if foreign and (problem := _problem_of_sizes(flavor)):
        message = f"the flavor {section.flavor} of the family {section.name} {problem}; {_DOCS}"
        return None, [("model.flavor", message)]
    violations = [*check_fields(section.overrides, flavor, prefix="model.overrides")]
    if violations:
        return None, violations
    config = replace_fields(flavor, section.overrides)
    violations = [
        *_check_shape(config, "head_dim" in section.overrides),
        *_check_experts(config),
    ]
    if not violations and foreign:
        violations = [*check_module(section.name, config)]
    return (None if violations else config), violations


def model_title(section: ModelSection) -> str:
    """Return the flavor of a model, or what stands for it where a file or a class says which model it is."""
    return section.architecture or Path(section.hf_path).name or section.flavor


@cache
def families() -> list[str]:
    """Return the names of the model families that are installed."""
    built_in = [
        m.name
        for m in pkgutil.iter_modules(import_module("titan.models").__path__)
        if m.ispkg and m.name != "common"
    ]
    return sorted({*built_in, *plug_in_families()})


def plug_in_families() -> dict[str, EntryPoint]:
    """Return the entry points of other packages' families, by name."""
    return plug_ins_by_name("titan.models")


def is_plug_in(name: str) -> bool:
    """Return whether a family belongs to another package. Families in titan/contrib do not."""
    entry = plug_in_families().get(name)
    return entry is not None and not is_ours(entry)


@cache
def family(name: str) -> ModuleType:
    """Import the package of a model family.

    Raises:
        KeyError: the family is not installed.
        ConfigError: its package cannot be imported.
    """
    if name not in families():
        raise KeyError(name)
    entry = plug_in_families().get(name)
    if entry is None:
        return import_module(f"titan.models.{name}")
    package = load_plug_in(entry)
    # A user's sizes need no base class of titan's. ModelSection.resolved reports flavors that are none.
    for flavor in vars(package).get("FLAVORS", {}).values():
        if dataclasses.is_dataclass(flavor):
            add_defaults(flavor)
    return package


def _problem_of_sizes(flavor: Any) -> str:
    if not (dataclasses.is_dataclass(flavor) and flavor.__hash__):
        return "is not a frozen dataclass"
    lacks = _lacks(flavor, _SIZES)
    return f"lacks {lacks}" if lacks else ""


def _lacks(thing: Any, names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if not hasattr(thing, name))


@cache
def check_module(name: str, config: Any) -> tuple[RuleViolation, ...]:
    """Check that a plug-in's module is as titan expects. The module is built on meta, which imports torch.

    Tests check titan's families.
    """
    import torch
    from torch import nn

    from titan.parallel.module_kinds import FillsBuffers, is_kind

    try:
        # A module on meta needs no memory, whatever its size.
        with torch.device("meta"):
            model = family(name).build_model(config)
    except Exception as error:
        message = f"build_model of the family {name} raised {type(error).__name__}: {error}"
        return (("model.name", f"{message}; {_DOCS}"),)
    kind, problems = type(model).__name__, []
    call = signature(model.forward)
    # Only bind the names, without computing anything.
    try:
        call.bind(None, positions_BS=None, document_ids_BS=None)
    except TypeError as error:
        problems.append(
            f"is called as forward(tokens_BS, positions_BS=..., document_ids_BS=...), and takes {call}: {error}"
        )
    if lacks := _lacks(model, ("layers", "output", "init_std")):
        problems.append(f"lacks {lacks}")
    elif not isinstance(model.layers, nn.ModuleDict):
        problems.append(
            f"has its blocks in a {type(model.layers).__name__}, not an nn.ModuleDict"
        )
    # Parameters get initial weights later, but a buffer on meta has no values.
    problems += [
        f"has a buffer {prefix}.{buffer}, and {type(module).__name__} no reset_buffers() that fills it"
        for prefix, module in model.named_modules()
        for buffer in module._buffers
        if not is_kind(module, FillsBuffers)
    ][:1]
    return tuple(
        ("model.name", f"{kind} of the family {name} {what}; {_DOCS}") for what in problems
    )


def frozen_names(parameters: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of parameters that match a pattern.

    Args:
        parameters: names of all parameters.
        patterns: patterns of `model.freeze`.

    Raises:
        InputError: a pattern matches no parameter, or all parameters match.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            near = ", ".join(get_close_matches(pattern, parameters, n=3, cutoff=0.0))
            raise InputError(
                f'model.freeze: no parameter matches "{pattern}"; near it are {near}'
            )
        frozen.update(names)
    if len(frozen) == len(parameters):
        raise InputError("model.freeze: every parameter matches, and nothing is left to train")
    return frozen


def check_freeze(section: ModelSection) -> Violations:
    """Check the patterns of `freeze` against the names of the model's parameters."""
    sizes = section.resolved[0]
    if section.freeze and sizes is not None:
        try:
            frozen_names(parameter_counts(section.name, sizes), section.freeze)
        except InputError as error:
            yield "freeze", str(error).removeprefix("model.freeze: ")


def num_frozen(section: ModelSection, sizes: Any) -> int:
    """Return the number of values in parameters that are not trained."""
    counts = parameter_counts(section.name, sizes) if section.freeze else {}
    return sum(counts[name] for name in frozen_names(counts, section.freeze)) if counts else 0


@cache
def parameter_counts(name: str, sizes: Any) -> dict[str, int]:
    """Return the number of values in each parameter of a model, by its name."""
    import torch

    with torch.device("meta"):
        model = family(name).build_model(sizes)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def tensor_plan_of(model: Any, package: ModuleType) -> Mapping[str, str]:
    """Return the tensor-parallel plan of a model: its own, or that of its family."""
    return getattr(model, "tensor_plan", package.TENSOR_PLAN)


def check_split(name: str, config: Any, *, stages: list[list[str]], tp: int) -> Violations:
    """Check that a plug-in's module can be cut into pipeline stages (if there are any) and split by `tp` ranks."""
    import torch

    from titan.parallel.stages import extract_stages
    from titan.parallel.tensor import check_plan

    package = family(name)
    with torch.device("meta"):
        model = package.build_model(config)
    prefix, where = "parallelism", ""
    if is_plug_in(name):
        where = f"; {name} is another package's family; {_DOCS}"
    try:
        if stages:
            extract_stages(model, stages, numbers=range(len(stages)))
    except ValueError as error:
        yield f"{prefix}.pipeline_parallel_degree", f"{error}{where}"
    try:
        if tp > 1:
            plan = tensor_plan_of(model, package)
            check_plan(model, plan, size=tp, num_kv_heads=config.n_kv_heads)
    except (KeyError, ValueError) as error:
        yield f"{prefix}.tensor_parallel_degree", f"{error.args[0]}{where}"


def check_fields(overrides: dict[str, Any], flavor: Any, *, prefix: str) -> Violations:
    """Check values for the fields of a dataclass: names, types and ranges."""
    types = (
        get_type_hints(type(flavor)) if overrides else {}
    )  # it is slow, and a search asks often
    # Fields that the class computes cannot be set.
    fields = {f.name: f for f in dataclasses.fields(flavor) if f.init}
    for name, value in overrides.items():
        key = f"{prefix}.{name}"
        if name not in fields:
            what = "field of the model" if prefix == "model.overrides" else "option of the task"
            yield key, f"unknown {what}{choose(name, fields)}"
            continue
        wanted = types[name]
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if not fits and wanted in _WANTED:
            yield key, f"expected {_WANTED[wanted]}, got {format_value(value)}"
        elif prefix == "model.overrides" and isinstance(value, list | dict):
            yield (
                key,
                f"this field takes no list or table, and cannot be set, got {format_value(value)}",
            )
        # A field may be 0 if its default is 0 ("head_dim = 0" derives it).
        elif wanted is int and value < (0 if fields[name].default == 0 else 1):
            yield key, f"must be at least 1, got {value}"
        elif wanted is int and value > LARGEST.get(name, LARGEST[""]):
            yield key, f"must be at most {LARGEST.get(name, LARGEST['']):,}, got {value}"
        elif wanted is float and value < 0:
            yield key, f"must not be negative, got {value}"


def replace_fields(flavor: Any, overrides: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with other values, which `check_fields` has checked."""
    types = get_type_hints(type(flavor))
    changes = {name: float(v) if types[name] is float else v for name, v in overrides.items()}
    # If the default is 0, the family derives head_dim from dim and n_heads.
    derives = any(f.name == "head_dim" and f.default == 0 for f in dataclasses.fields(flavor))
    has_changed = derives and overrides.keys() & {"dim", "n_heads"}
    if has_changed and flavor.head_dim == flavor.dim // flavor.n_heads:
        changes.setdefault("head_dim", 0)  # it was derived: derive it again from the new values
    return dataclasses.replace(flavor, **changes)


def _check_experts(config: Any) -> Violations:
    """Check that a router can choose the configured numbers of experts and groups."""
    prefix, experts = "model.overrides", config.num_experts
    # A package's family may have its own router, without groups.
    if not experts or config.score is None:
        return
    groups, top_groups = config.num_groups, config.top_groups
    if config.score not in ("softmax", "sigmoid"):
        yield (
            f"{prefix}.score",
            f'expected "softmax" or "sigmoid", got {format_value(config.score)}',
        )
    if experts % max(1, groups):
        fix = near(groups, divisors(experts))
        yield (
            f"{prefix}.num_groups",
            f"{groups} groups do not divide {experts} experts; use {fix}",
        )
        return
    size = experts // max(1, groups)
    if groups and not 1 <= top_groups <= groups:
        yield f"{prefix}.top_groups", f"must be 1 to num_groups {groups}, got {top_groups}"
    elif groups and config.group_top_k > size:
        message = f"a group has {size} experts and no best {config.group_top_k}; use {size}"
        yield f"{prefix}.group_top_k", message
    open_to_a_token = top_groups * size if groups else experts
    if not 1 <= config.top_k <= open_to_a_token:
        message = f"a token goes to 1 to {open_to_a_token} of the experts, got {config.top_k}"
        yield f"{prefix}.top_k", message
    if not config.expert_dim:
        yield f"{prefix}.expert_dim", "must be at least 1, got 0"


def _check_shape(config: Any, is_head_dim_set: bool) -> Violations:
    """Check the sizes that every attention model must satisfy. Fields that a family lacks are skipped."""
    names, prefix = (
        ("dim", "n_heads", "n_kv_heads", "head_dim", "num_params"),
        "model.overrides",
    )
    dim, heads, kv_heads, head_dim, num_params = (getattr(config, name, 0) for name in names)
    is_uneven = heads and dim % heads
    if is_uneven and not is_head_dim_set:
        fix = f"use {near(heads, divisors(dim))} heads, or set head_dim"
        yield f"{prefix}.n_heads", f"{heads} heads do not divide dim {dim}; {fix}"
    if kv_heads and heads % kv_heads:
        fix = f"use {near(kv_heads, divisors(heads))}"
        yield (
            f"{prefix}.n_kv_heads",
            f"{kv_heads} key/value heads do not divide {heads} heads; {fix}",
        )
    if num_params > LARGEST_MODEL:
        yield (
            prefix,
            f"a model of {num_params:.2g} parameters is too large; lower dim or n_layers",
        )
    # Rotary embedding rotates pairs of numbers.
    if head_dim % 2 and not is_uneven:
        yield f"{prefix}.head_dim", f"{head_dim} is odd; use {head_dim + 1}"
