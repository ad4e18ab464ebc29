"""What this version cannot run yet. One row per key; whoever builds the feature deletes its row.

Such settings are right as configuration (`titan config` resolves them), so they are refused only where a run
would start: better than a run that silently does something else.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from titan import __version__

from .problems import Problem
from .sections import JobConfig
from .toml import format_value

# Key, the only value that runs, what to use.
UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("parallelism.expert_parallel_degree", 1, "use 1"),
    ("parallelism.expert_tensor_parallel_degree", 1, "use 1"),
    ("model.converters", [], "use []"),
    ("checkpoint.async_mode", "disabled", 'use "disabled"'),
    ("checkpoint.initial_load_in_hf", False, "use a checkpoint that titan wrote"),
    ("checkpoint.last_save_in_hf", False, "use false"),
    (
        "checkpoint.create_seed_checkpoint",
        False,
        "use false: initial weights do not depend on the layout",
    ),
    ("optimizer.early_step_in_backward", False, "use false"),
    ("profiling.enable_profiling", False, "use false"),
    ("profiling.enable_memory_snapshot", False, "use false"),
)


def check_supported(config: JobConfig) -> list[Problem]:
    """A problem for each setting that would need a feature still to be built."""
    problems = []
    if config.activation_checkpoint.mode == "memory_budget":
        problems.append(
            config.origin.problem(
                "activation_checkpoint.mode",
                f'"memory_budget" is not built yet in titan {__version__[:3]}; use "selective" or "full"',
            )
        )
    for key, runs, instead in UNSUPPORTED:
        value = reduce(lambda part, name: getattr(part, name, runs), key.split("."), config)
        if value != runs:
            message = (
                f"{format_value(value)} is not built yet in titan {__version__[:3]}; {instead}"
            )
            problems.append(config.origin.problem(key, message))
    return problems
