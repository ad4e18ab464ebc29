"""Keys that titan no longer has, in job files and in the config.toml of older runs, which has all keys.

A key at its former default changes nothing and is dropped. load.py applies the table to each file before files are merged.
"""

from __future__ import annotations

from typing import Any

from .errors import Problem
from .layer import ConfigLayer, last

_METHOD = "fault_tolerance.semi_sync_method"
_SUMS = "replica groups sum their gradients in every step; over a slow link use HSDP, parallelism.data_parallel_replicate_degree"

# The former default, and what to do instead of another value.
FORMER: dict[str, tuple[Any, str]] = {
    "metrics.log_layer_norms_every_n_steps": (
        0,
        "is a package now: pip install ./examples/layer_norms, and remove the key",
    ),
    _METHOD: ("", f"LocalSGD and DiLoCo are gone: {_SUMS}"),
    **{
        f"fault_tolerance.{name}": (default, f"went with {_METHOD}; remove the key")
        for name, default in {
            "sync_steps": 50,
            "num_fragments": 1,
            "fragment_sync_delay": 0,
            "fragment_update_alpha": 0.0,
            "should_quantize": False,
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
        }.items()
    },
}


def drop_former_keys(layer: ConfigLayer) -> list[Problem]:
    """Remove former keys from a layer, in place, and return a problem for each that has a value of its own."""
    problems: list[Problem] = []
    for key, (default, message) in FORMER.items():
        if last(key) in layer.table_of(key) and layer.remove(key) != default:
            problems.append(layer.locations[key].problem(message))
    return problems
