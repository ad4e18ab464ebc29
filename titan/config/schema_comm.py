"""Section of a job file about communication between ranks. Import it from titan.config.schema."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .base import NonNegative, Permission, Positive, Section

_BELOW_RUN = Permission("write", below_run=True)
_Blocks = Annotated[int | None, Field(ge=1, le=64)]


class NcclGroupSection(Section):
    """Options of the NCCL communicators of an axis of the mesh. FSDP uses those of dp_shard, and for experts those of efsdp.

    See docs/cluster.md.
    """

    min_ctas: _Blocks = None
    """Least thread blocks, each on an SM, of a collective. Unset: NCCL's choice."""
    max_ctas: _Blocks = None
    """Most thread blocks of a collective. Fewer leave more SMs to matmuls, and may be slower. Unset:
    NCCL's choice."""
    cga_cluster_size: Annotated[int | None, Field(ge=0, le=8)] = None
    """Thread blocks in a cluster, on Hopper and later; 0: no clusters. Unset: NCCL's choice."""
    net_name: Annotated[str | None, Field(min_length=1)] = None
    """Network of NCCL to use, such as "IB" or "Socket". Unset: NCCL's choice."""
    high_priority_stream: bool | None = None
    """Run asynchronous collectives on a stream of high priority, before kernels that wait for an SM.
    Unset: do not."""


class NcclSection(Section):
    """Options of NCCL by axis of the mesh. An axis with options has separate communicators, even if it spans all ranks."""

    pp: NcclGroupSection = NcclGroupSection()
    dp_replicate: NcclGroupSection = NcclGroupSection()
    dp_shard: NcclGroupSection = NcclGroupSection()
    cp: NcclGroupSection = NcclGroupSection()
    tp: NcclGroupSection = NcclGroupSection()
    efsdp: NcclGroupSection = NcclGroupSection()
    ep: NcclGroupSection = NcclGroupSection()

    def options(self) -> dict[str, dict[str, Any]]:
        """Return the options that are set, by axis."""
        sections = {axis: getattr(self, axis) for axis in type(self).model_fields}
        found = {axis: s.model_dump(exclude_defaults=True) for axis, s in sections.items()}
        return {axis: options for axis, options in found.items() if options}


class CommSection(Section):
    """Limits for collectives and heartbeats, the flight recorder, the ranks' cores, and NCCL's options."""

    init_timeout_seconds: Positive = 300
    """Seconds that a collective may take during set-up and the first step, which compiles."""
    train_timeout_seconds: Positive = 100
    """Seconds that a collective may take after the first step. Then the run ends with a report."""
    heartbeat_timeout_seconds: NonNegative = 30
    """Seconds without a heartbeat after which a rank counts as lost: its host is down, its process
    is stopped, or an extension holds the GIL. The run then ends on all ranks and names that rank
    and its host. 0 disables heartbeats. See docs/cluster.md."""
    trace_buf_size: Annotated[int, Field(ge=0, le=10_000_000)] = 2_000
    """Number of the newest collectives that the flight recorder keeps. Writing 20,000 takes a rank
    some seconds, 2,000 a tenth of that. 0 disables the recorder."""
    save_traces_folder: Annotated[str, _BELOW_RUN] = "flight_recorder"
    """Folder of the flight recorder's dumps, below the run folder."""
    save_traces_file_prefix: Annotated[str, _BELOW_RUN] = "rank-"
    """Beginning of a dump's file name; the rank follows."""
    numa_binding: bool = True
    """Whether a rank's threads stay on the cores of its GPU's NUMA node, among those that they may
    use already. Has no effect without CUDA, or where the host names no node. See docs/cluster.md."""
    sm_carveout: Annotated[int, Field(ge=0, le=256)] = 0
    """SMs of a GPU that matmuls leave free during training, for the collectives that run beside them.
    Float8 and grouped matmuls, FlashAttention 3 and Inductor's templates do; cuBLAS does not. 0: none."""
    nccl: NcclSection = NcclSection()
