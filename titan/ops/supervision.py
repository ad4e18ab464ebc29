"""Supervision of a run: its lock, heartbeats, limits of time and memory, and reports (titan/run/supervisor.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from titan.base.signals import StopRequest
from titan.config.schema import JobConfig
from titan.run.supervisor import Supervisor

from . import flight_recorder
from .flight_recorder import FlightRecorder
from .memory_limit import require_address_space
from .monitor import Monitor
from .run_lock import RunLock

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Supervision(Supervisor):
    """Supervisor of a rank by a run lock, a monitor and torch's flight recorder."""

    def __init__(self, config: JobConfig, stop: StopRequest) -> None:
        self.config, self.stop = config, stop
        folder, comm = Path(config.job.dump_folder), config.comm
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.lock = RunLock(folder)
        self.recorder = FlightRecorder(comm, folder, rank, world_size)
        self.monitor = Monitor(
            folder,
            rank=rank,
            world_size=world_size,
            heartbeat_s=comm.heartbeat_timeout_seconds,
            step_limit_s=config.fault_tolerance.step_timeout_seconds,
            lock=self.lock,
        )
        self.is_connected = False
        self.fail = self.monitor.fail

    @staticmethod
    def admit(config: JobConfig) -> None:
        """Check that torch fits into the memory of a process, and that no other run holds the folder."""
        require_address_space()
        RunLock(Path(config.job.dump_folder)).require_free()

    def begin(self) -> None:
        """Take the lock on rank 0, and start to watch this rank."""
        # `admit` has admitted the other ranks.
        if self.monitor.rank == 0:
            self.lock.acquire()
        # torch reads the recorder's variables when it is imported.
        flight_recorder.install(self.recorder)
        monitor, stop = self.monitor, self.stop
        grace_s = self.config.fault_tolerance.grace_seconds
        monitor.start()
        stop.allow(grace_s, report=lambda: monitor.stop_too_late(stop, grace_s))
        stop.on_ask = monitor.dump_on_request
        flight_recorder.catch_terminate(monitor.terminate)

    def beat(self, step: int | None = None, *, extra_s: float = 0) -> None:
        """Exchange heartbeats from now on, and begin or end the time limit of a step."""
        if not self.is_connected:
            self.is_connected = True
            self.monitor.connect()
        if step is None:
            self.monitor.end()
        else:
            self.monitor.begin(step, extra_s=extra_s)

    def see_mesh(self, mesh: DeviceMesh) -> None:
        """Name the axes of process groups in dumps."""
        flight_recorder.name_axes(mesh)

    def end(self) -> None:
        """Tell the peers not to expect heartbeats. The lock keeps its heartbeat until the save ends."""
        self.monitor.finish()

    def close(self) -> None:
        """Release the lock, and end the watch."""
        self.lock.release()
        self.monitor.close()
