"""What this version cannot run yet. One row per key; whoever builds the feature deletes its row.

Such settings are right as configuration (`titan config` resolves them), so they are refused only where a run
would start: better than a run that silently does something else.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from titan import __version__

from .errors import Problem
from .schema import JobConfig
from .toml import format_value

# Key, the only value that runs, what to use.
UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("parallelism.expert_parallel_degree", 1, "use 1"),
    ("parallelism.expert_tensor_parallel_degree", 1, "use 1"),
)


def check_supported(config: JobConfig) -> list[Problem]:
    """A problem for each setting that would need a feature still to be built."""
    problems = []
    for key, runs, instead in UNSUPPORTED:
        value = reduce(lambda part, name: getattr(part, name, runs), key.split("."), config)
        if value != runs:
            message = (
                f"{format_value(value)} is not built yet in titan {__version__[:3]}; {instead}"
            )
            problems.append(config.source_map.problem(key, message))
    return problems
