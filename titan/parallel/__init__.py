"""Parallelize helpers. Each takes any nn.Module and a DeviceMesh, and imports neither a trainer nor a config.

A name is imported at its first use: the checks of a job file need `titan.parallel.schedules`, which imports no torch. Installed
parts add names through the entry points `titan.parallel`.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import apply_ac
    from .compile import apply_compile
    from .context import apply_cp, shard_sequence, unshard_sequence
    from .expert import apply_ep
    from .float8 import apply_float8, precompute_scales
    from .fsdp import apply_ddp, apply_fsdp, set_gradient_sync
    from .init_weights import initialize, materialize
    from .mesh import axis_rank, axis_size, build_mesh, build_sparse_mesh, submesh
    from .pipeline import Pipeline
    from .stage_split import split_stages
    from .stages import extract_stages
    from .tensor import apply_tp

    Recorder: Any
    require_equal_replicas: Any
    whole_shapes: Any

_MODULES = {
    "activation": "apply_ac",
    "compile": "apply_compile",
    "context": "apply_cp shard_sequence unshard_sequence",
    "expert": "apply_ep",
    "float8": "apply_float8 precompute_scales",
    "fsdp": "apply_ddp apply_fsdp set_gradient_sync",
    "mesh": "axis_rank axis_size build_mesh build_sparse_mesh submesh",
    "pipeline": "Pipeline",
    "stages": "extract_stages",
    "stage_split": "split_stages",
    "tensor": "apply_tp",
    "init_weights": "initialize materialize",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Pipeline",
    "Recorder",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_ddp",
    "apply_ep",
    "apply_float8",
    "apply_fsdp",
    "apply_tp",
    "axis_rank",
    "axis_size",
    "build_mesh",
    "build_sparse_mesh",
    "extract_stages",
    "initialize",
    "materialize",
    "precompute_scales",
    "require_equal_replicas",
    "set_gradient_sync",
    "shard_sequence",
    "split_stages",
    "submesh",
    "unshard_sequence",
    "whole_shapes",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _added():
        return _added()[name].load()
    raise AttributeError(f"titan.parallel has no {name}")


@cache
def _added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="titan.parallel")}
