"""Find the parameters that `model.freeze` names. Imports torch only for a job that has it, to build the model on meta."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from titan.untrusted import InputError

from .errors import RuleViolation
from .model import family, resolve_model
from .schema import JobConfig


def frozen_names(parameters: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that match a pattern. Raises InputError if a pattern matches nothing, or if all match."""
    frozen: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            near = ", ".join(get_close_matches(pattern, parameters, n=3, cutoff=0.0))
            raise InputError(f'model.freeze: no parameter matches "{pattern}"; near it are {near}')
        frozen.update(names)
    if len(frozen) == len(parameters):
        raise InputError("model.freeze: every parameter matches, and nothing is left to train")
    return frozen


def check_freeze(config: JobConfig) -> Iterator[RuleViolation]:
    """Check the patterns against the names of the model."""
    sizes, _ = resolve_model(config.model)
    if config.model.freeze and sizes is not None:
        try:
            frozen_names(_counts(config.model.name, sizes), config.model.freeze)
        except InputError as error:
            yield "freeze", str(error).removeprefix("model.freeze: ")


def num_frozen(config: JobConfig, sizes: Any) -> int:
    """Return how many parameters are not trained."""
    if not config.model.freeze:
        return 0
    counts = _counts(config.model.name, sizes)
    return sum(counts[name] for name in frozen_names(counts, config.model.freeze))


@cache
def _counts(name: str, sizes: Any) -> dict[str, int]:
    """Return the numbers of each parameter of a model, by its name."""
    import torch

    with torch.device("meta"):
        model = family(name).build_model(sizes)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}
