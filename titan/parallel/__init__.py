"""Parallelize helpers: each takes any nn.Module and a DeviceMesh, and imports neither a trainer nor a config."""

from .fsdp import apply_ddp, apply_fsdp
from .initialize import initialize, materialize
from .mesh import build_mesh, submesh

__all__ = ["apply_ddp", "apply_fsdp", "build_mesh", "initialize", "materialize", "submesh"]
