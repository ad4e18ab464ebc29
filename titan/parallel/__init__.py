"""Parallelize helpers: each takes any nn.Module and a DeviceMesh, and imports neither a trainer nor a config."""

from .context import apply_cp, shard_sequence
from .fsdp import apply_ddp, apply_fsdp
from .initialize import initialize, materialize
from .mesh import axis_rank, axis_size, build_mesh, submesh
from .tensor import apply_tp

__all__ = [
    "apply_cp",
    "apply_ddp",
    "apply_fsdp",
    "apply_tp",
    "axis_rank",
    "axis_size",
    "build_mesh",
    "initialize",
    "materialize",
    "shard_sequence",
    "submesh",
]
