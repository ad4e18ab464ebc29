"""Supervisors, which watch over a rank of a run from before torch is imported to the end of the process.

titan/run/train.py knows of supervision what stands here. The entry point group `titan.supervisors` names the class that it
uses, which is that of titan/ops.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

from titan.base.errors import Failure
from titan.base.failure import RunFailure
from titan.base.signals import StopRequest
from titan.config.plug_ins import door, load_plug_ins, parts_of

if TYPE_CHECKING:  # `explain` must not need the keys of packages, which may be what is wrong
    from torch.distributed.device_mesh import DeviceMesh

    from titan.config.schema import JobConfig


class Supervisor:
    """Supervisor of one rank, which reports a failure and does nothing else. A subclass does more.

    Args:
        config: the job.
        stop: the request to end the run.
    """

    def __init__(self, config: JobConfig, stop: StopRequest) -> None:
        self.step = 0

    @staticmethod
    def admit(config: JobConfig) -> None:
        """Check, without a change to any file, whether a run of this job may start here.

        Raises:
            RunFailure: it may not.
        """

    def begin(self) -> None:
        """Take the run folder, and watch this rank. Called before torch is imported.

        Raises:
            RunFailure: another run is going on in the folder.
            OSError: the folder cannot be written.
        """

    def beat(self, step: int | None = None, *, extra_s: float = 0) -> None:
        """Record the progress of the run: first when the process group exists, then at both ends of a step.

        Args:
            step: number of the step that begins; None: no step runs, so that no time limit holds.
            extra_s: seconds that the step may take beyond the limit of others.
        """
        self.step = step or self.step

    def see_mesh(self, mesh: DeviceMesh) -> None:
        """Look at the device mesh of a trainer, before its groups communicate."""

    def fail(self, error: Exception) -> int:
        """Report the error that ends the run. Return the exit code of this rank."""
        failure = Failure.of(error, rank=int(os.environ.get("RANK", 0)), step=self.step)
        print(failure.reason, file=sys.stderr, flush=True)
        return failure.exit_code

    def end(self) -> None:
        """Stop expecting heartbeats from this rank, whose training has ended or failed."""

    def close(self) -> None:
        """Release the run folder. The last call, after the hooks are closed."""


def supervisor_class() -> type[Supervisor]:
    """Return the class that `titan train` supervises its ranks with."""
    return next(iter(load_plug_ins("titan.supervisors")), Supervisor)


@door("failure")
class ExplainFailure(Protocol):
    """Function that returns the failure that explains an error, or None if it does not know the error."""

    def __call__(self, error: Exception, /) -> RunFailure | None: ...


def explain(error: Exception) -> RunFailure | None:
    """Return the failure that explains an error in a line: the error itself, or what a package knows of it."""
    if isinstance(error, RunFailure):
        return error
    found = (explained_by(error) for explained_by in parts_of(ExplainFailure))
    return next((failure for failure in found if failure), None)
