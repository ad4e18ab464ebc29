"""Keys that titan no longer has, in job files and in the config.toml of older runs, which has all keys.

load.py applies the tables to each file before files are merged.
"""

from __future__ import annotations

from typing import Any

from .errors import Problem
from .layer import ConfigLayer, last

# The former default, which changes nothing and is dropped, and what to do instead of another value.
FORMER: dict[str, tuple[Any, str]] = {
    "metrics.log_layer_norms_every_n_steps": (
        0,
        "is a package now: pip install ./examples/layer_norms, and remove the key",
    ),
    "simulator.twin": (
        False,
        "the twin is gone: `titan sim --measured RUN` compares a run with its simulation, `titan doctor RUN` names slow ranks, and "
        "`titan preflight` measures links. Remove the key",
    ),
    "simulator.twin_hardware": ("auto", "went with simulator.twin; remove the key"),
    "fault_tolerance.semi_sync_method": (
        "",
        "LocalSGD and DiLoCo are gone: replica groups sum their gradients in every step. Remove the key; over a slow link use HSDP "
        "in place of groups (parallelism.data_parallel_replicate_degree)",
    ),
}
# Keys that did nothing without semi_sync_method, whose line is enough.
_OF_SEMI_SYNC = (
    "sync_steps",
    "num_fragments",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "should_quantize",
    "outer_lr",
    "outer_momentum",
)


def drop_former_keys(layer: ConfigLayer) -> list[Problem]:
    """Remove former keys from a layer, in place, and return a problem for each that asked for something."""
    problems: list[Problem] = []
    for key, (default, message) in FORMER.items():
        if last(key) in layer.table_of(key) and layer.remove(key) != default:
            problems.append(layer.locations[key].problem(message))
    for name in _OF_SEMI_SYNC:
        if name in layer.table_of(key := f"fault_tolerance.{name}"):
            layer.remove(key)
    return problems
