"""Section of a job file about failures: bad losses and signals. Import it from titan.config.schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import LIMIT, NonNegative, Positive, ReadWith, Section


class FaultToleranceSection(Section):
    """Reaction of a run to bad losses, differing weights, slow steps and signals. See docs/cluster.md."""

    grace_seconds: Positive = 120
    """Seconds to finish the step and save after SIGTERM, SIGUSR1, SIGINT, SIGHUP or SIGXCPU; then the process ends.
    Set it below what the scheduler grants before SIGKILL."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """What to do when a step's loss or gradient norm is NaN or infinite. "stop" ends the run.
    "skip" trains on without this step's update. "rewind" returns to the newest checkpoint and
    leaves out the samples that led here."""
    on_spike: Literal["off", "warn", "skip", "rewind", "stop"] = "off"
    """What to do when the loss is more than spike_threshold robust deviations above recent losses.
    "off" does not check, "warn" logs it, and the others act as in on_nonfinite. If this is not
    "off", or on_nonfinite is not "stop", the host waits for each step before it updates."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """Robust z-score above which a loss is a spike: distance from the median, divided by 1.4826 x
    the median absolute deviation."""
    spike_window: Annotated[int, Field(ge=8, le=LIMIT)] = 128
    """Number of recent losses that a loss is compared with."""
    spike_min_steps: Annotated[int, Field(ge=8, le=LIMIT)] = 32
    """Number of losses needed before one can be a spike. The loss of the first steps falls fast."""
    max_skips: Positive = 10
    """Steps skipped in a row after which the run ends."""
    max_rewinds: Positive = 3
    """Rewinds since the last start after which the run ends."""
    rewind_steps: Positive = 100
    """Steps whose samples a rewind leaves out, up to and including the bad step."""
    check_replicas_every_n_steps: NonNegative = 0
    """Steps from one comparison of replicas to the next. It hashes all weights that several ranks
    hold, and ends the run if they differ. 0: never."""
    replay_every: NonNegative = 0
    """Steps from one replay to the next. A replay computes the first micro-batch of a step twice on each
    device and compares outputs and gradients bit for bit; the step is not changed. 0: never."""
    on_replay_mismatch: Annotated[Literal["warn", "stop"], ReadWith("replay_every")] = "stop"
    """Action when bits differ. "stop" ends the run and names rank, host and module. "warn" logs
    the same and trains on."""
    step_timeout_seconds: NonNegative = 0
    """Seconds that a step may take; the first has comm.init_timeout_seconds more. After that the
    run ends, with the stacks of all ranks in logs/ and the rank to look at in status.json. Saves
    and validation do not count. 0: no limit."""
