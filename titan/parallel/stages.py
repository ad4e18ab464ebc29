"""Pipeline stages: copies of a model in which all modules of other stages are removed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from .module_kinds import SharesModules, is_kind


def extract_stages(
    model: nn.Module, modules: Sequence[Sequence[str]], *, numbers: Iterable[int]
) -> dict[int, nn.Module]:
    """Return stages of `model`, by number.

    A module without parameters (rotation tables, dropout) may be in several stages, if the forward pass of each is to call it.

    Args:
        model: the model, on meta.
        modules: names of the modules of every stage.
        numbers: numbers of the stages to return.

    Raises:
        ValueError: a module with parameters is in no stage or in several.
    """
    everywhere = model.on_all_stages if is_kind(model, SharesModules) else ()
    modules = [[*names, *everywhere] for names in modules]
    # Every parameter must be trained by exactly one stage.
    stages_of: dict[str, list[int]] = {}
    for stage, names in enumerate(modules):
        for name in names:
            stages_of.setdefault(name, []).append(stage)
    for name, unit in _units(model).items():
        holders = stages_of.get(name, [])
        if not holders or (len(holders) > 1 and any(True for _ in unit.parameters())):
            where = f"in stages {' and '.join(map(str, holders))}" if holders else "in no stage"
            fix = "put it into one"
            if isinstance(unit, nn.ModuleList):
                fix = "to be cut into stages it must be an nn.ModuleDict"
            raise ValueError(f"module '{name}' is {where}; {fix}")
    # Stages are made of modules, so a parameter of the model itself has no place.
    for name, _ in model.named_parameters(recurse=False):
        raise ValueError(f"parameter '{name}' is in no module, so no stage could have it")
    return {number: extract_stage(model, modules[number]) for number in numbers}


def extract_stage(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a copy of `model` with the named modules, under the same names, and no other modules.

    Other children become None, and other entries of a ModuleDict are deleted. It is cheap on meta, on which models are built.

    Args:
        model: the model.
        names: children ("norm"), or single entries of a child that is a ModuleDict ("layers.3").

    Raises:
        ValueError: the model does not have a name, or a parameter is shared with another stage (tied embeddings).
    """
    units = _units(model)
    for name in names:
        if name not in units:
            match = get_close_matches(name, units, n=1)
            hint = f"; did you mean '{match[0]}'?" if match else f"; it has {', '.join(units)}"
            raise ValueError(f"the model has no module '{name}'{hint}")
    # A parameter in two stages would be two parameters after the copy, and drift apart.
    kept = {id(p) for name in names for p in units[name].parameters()}
    for name, unit in units.items():
        shared = [f"{name}.{n}" for n, p in unit.named_parameters() if id(p) in kept]
        if name not in names and shared:
            raise ValueError(
                f"{shared[0]} is tied to a parameter of another pipeline stage, which would train a separate copy; "
                "untie them (model.tied_embeddings = false), or keep both modules in one stage"
            )
    # Stages of one rank must not share modules. Placeholders replace the modules of other stages, which may be many.
    mine = {id(units[name]) for name in names}
    foreign = {id(unit): nn.Identity() for unit in units.values() if id(unit) not in mine}
    stage = copy.deepcopy(model, foreign)
    for child, module in list(stage.named_children()):
        if isinstance(module, nn.ModuleDict):
            for entry in [entry for entry in module if f"{child}.{entry}" not in names]:
                del module[entry]
        elif child not in names:
            setattr(stage, child, None)
    return stage


def _units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a stage can have, by name."""
    units: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            units |= {f"{name}.{entry}": module for entry, module in child.items()}
        else:
            units[name] = child
    return units
