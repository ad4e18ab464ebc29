"""Checks of torchrun's environment variables, which determine how a run starts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from titan.config.errors import Problem, Violations

# Whole numbers that torchrun, or another starter of ranks, sets.
_NUMBERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)
_STARTER = "start the run with torchrun, srun and torchrun, or titan train --nproc"


def check_environment(environment: Mapping[str, str]) -> list[Problem]:
    """Return everything that is wrong with the variables, as problems without a line."""
    # Numbers first: ranks can only be compared if they are numbers.
    violations = [*_check_numbers(environment)] or [*_check_ranks(environment)]
    return [Problem("environment", 0, name, message) for name, message in violations]


def _check_numbers(environment: Mapping[str, str]) -> Violations:
    for name in _NUMBERS:
        value = environment.get(name)
        if value is not None and not re.fullmatch(r"\d{1,9}", value, re.ASCII):
            yield name, f"expected a whole number, got {value!r}; {_STARTER}, or unset it"


def _check_ranks(environment: Mapping[str, str]) -> Violations:
    # A process without RANK is a single process, unless WORLD_SIZE is above 1.
    number = {name: int(environment[name]) for name in _NUMBERS if name in environment}
    if "RANK" not in number:
        if number.get("WORLD_SIZE", 1) != 1:
            yield "RANK", f"missing beside WORLD_SIZE = {number['WORLD_SIZE']}; {_STARTER}"
        return
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name, "").strip():
            yield name, f"missing beside RANK = {number['RANK']}; {_STARTER}"
    # A rank counts from 0, so it is below its size.
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size in number and number.get(rank, 0) >= number[size]:
            ranks = f"0 to {number[size] - 1}" if number[size] else "none"
            yield (
                rank,
                f"{number[rank]}, but {size} = {number[size]} has ranks {ranks}",
            )
    if not 1 <= number.get("MASTER_PORT", 1) <= 65_535:
        yield "MASTER_PORT", f"{number['MASTER_PORT']} is not a port; use one from 1 to 65535"
