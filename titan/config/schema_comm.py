"""Section of a job file about communication between ranks. Import it from titan.config.schema."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import NonNegative, Permission, Positive, Section

_BELOW_RUN = Permission("write", below_run=True)


class CommSection(Section):
    """Limits for collectives and heartbeats, and the flight recorder."""

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
