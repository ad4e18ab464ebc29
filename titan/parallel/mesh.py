"""Device mesh: its axes, outermost first, and the process groups derived from them.

    pp            pipeline stages
    dp_replicate  replicas of the model (DDP, HSDP)
    dp_shard      shards of parameters, gradients and optimizer state (FSDP)
    cp            parts of the sequence
    tp            parts of each matrix

Ranks are numbered with tp fastest, so that tensor-parallel ranks are neighbours on a node. The mesh has no axes of size one
(a group of one rank is pure cost), except dp_shard, on which FSDP casts to a lower precision even alone. `submesh` knows which
axes the mesh has.

Experts have a second mesh over the same ranks. Expert parallelism may use any ranks that hold different tokens; tensor-parallel
ranks do too, between matmuls (sequence parallel):

    dense    pp x dp_replicate x dp_shard x cp x tp
    sparse   pp x dp_replicate x efsdp x ep            efsdp = dp_shard cp tp / ep

    efsdp    shards of the experts that an ep rank holds (FSDP)
    ep       experts; the fastest axis, so that tokens travel within a node first

An example with 16 ranks: dp_shard = 4, cp = 2 and tp = 2 make a dense mesh of 4 x 2 x 2. With ep = 8, the sparse mesh
is efsdp = 2 x ep = 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(
    device_type: str,
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
) -> DeviceMesh:
    """Build the mesh over all ranks of the default process group, which must be initialised.

    Args:
        device_type: type of the ranks' device, such as "cuda".
        pp: number of pipeline ranks.
        dp_replicate: number of replicas.
        dp_shard: number of FSDP shards.
        cp: number of context-parallel ranks.
        tp: number of tensor-parallel ranks.

    Raises:
        ValueError: the product of the degrees is not the world size (from torch).
    """
    degrees = dict(zip(AXES, (pp, dp_replicate, dp_shard, cp, tp), strict=True))
    present = {axis: n for axis, n in degrees.items() if n > 1 or axis == "dp_shard"}
    return _build(device_type, present)


def _build(device_type: str, degrees: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def build_sparse_mesh(mesh: DeviceMesh, *, ep: int) -> DeviceMesh:
    """Build the experts' mesh over the ranks of `mesh`.

    Args:
        mesh: the dense mesh.
        ep: number of expert-parallel ranks.

    Raises:
        ValueError: `ep` does not divide dp_shard x cp x tp.
    """
    lent = axis_size(mesh, "dp_shard", "cp", "tp")
    if lent % ep:
        raise ValueError(
            f"expert parallel degree {ep} does not divide dp_shard x cp x tp = {lent}"
        )
    degrees = {axis: axis_size(mesh, axis) for axis in ("pp", "dp_replicate")}
    present = {axis: n for axis, n in degrees.items() if n > 1} | {"efsdp": lent // ep}
    if ep > 1:
        present["ep"] = ep
    return _build(mesh.device_type, present)


def submesh(mesh: DeviceMesh, *axes: str, flatten: bool = False) -> DeviceMesh | None:
    """Return the part of the mesh along the given axes that it has, or None if all have size one.

    Args:
        mesh: the dense or the sparse mesh.
        axes: names of axes.
        flatten: join several axes to one, named after them, for a collective over all of their ranks.
    """
    names = mesh.mesh_dim_names
    assert names is not None, "the mesh was built with axis names"
    present = tuple(axis for axis in axes if axis_size(mesh, axis) > 1)
    if not present:
        return None
    part = mesh[present] if len(present) > 1 else mesh[present[0]]
    if flatten and len(present) > 1:
        return part._flatten("_".join(present))  # private, but the same in torch 2.11 to 2.15
    return part


def axis_size(mesh: DeviceMesh, *axes: str) -> int:
    """Return the number of ranks along the axes. An axis that the mesh does not have counts as 1.

    Args:
        mesh: the dense or the sparse mesh.
        axes: names of axes.
    """
    names = mesh.mesh_dim_names or ()
    return math.prod(mesh[axis].size() for axis in axes if axis in names)


def axis_rank(mesh: DeviceMesh, *axes: str) -> int:
    """Return this rank's number along the axes, with the last one fastest.

    Args:
        mesh: the dense or the sparse mesh.
        axes: names of axes.
    """
    names = mesh.mesh_dim_names or ()
    rank = 0
    # The same order as in the mesh: the ranks of an axis are multiplied by the sizes of all later axes.
    for axis in axes:
        if axis in names:
            rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
    return rank


@dataclass(frozen=True)
class StepGroups:
    """Process groups that a training step sums over. A field is None if its group has one rank.

    Attributes:
        data: ranks with different samples.
        tokens: ranks with different tokens, which includes context parallelism.
        loss: ranks with different tokens, on all pipeline stages.
        stages: ranks of the pipeline.
    """

    data: dist.ProcessGroup | None
    tokens: dist.ProcessGroup | None
    loss: dist.ProcessGroup | None
    stages: dist.ProcessGroup | None

    @staticmethod
    def of(mesh: DeviceMesh) -> StepGroups:
        """Return the groups of a mesh.

        Args:
            mesh: the dense mesh.
        """

        def group(*axes: str) -> dist.ProcessGroup | None:
            part = submesh(mesh, *axes, flatten=True)
            return None if part is None else part.get_group()

        return StepGroups(
            data=group("dp_replicate", "dp_shard"),
            tokens=group("dp_replicate", "dp_shard", "cp"),
            loss=group("pp", "dp_replicate", "dp_shard", "cp"),
            stages=group("pp"),
        )
