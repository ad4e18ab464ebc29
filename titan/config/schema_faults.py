"""Section about failures: bad losses, signals, lost replica groups. Import it from titan.config.schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import LIMIT, NonNegative, Positive, Section


class FaultToleranceSection(Section):
    """What a run does about bad losses, differing weights, slow steps and signals. See docs/fault-tolerance.md."""

    enable: bool = False
    """Train in replica groups that may come and go, on torchft (docs/elastic.md). Needs the extra `elastic`."""
    replica_groups: Positive = 1
    """Replica groups at full strength. training.global_batch_size is that of all of them together."""
    replica_id: NonNegative = 0
    """Number of this group, from 0. `titan train --elastic` sets it."""
    min_replicas: Positive = 1
    """Groups without which no step is made: fewer wait for the others."""
    lighthouse: str = ""
    """Address of torchft's lighthouse, such as "http://node0:29510", or the absolute path of a file that holds
    it and is read again while nobody answers. Empty: the variable TORCHFT_LIGHTHOUSE."""
    healing_timeout_seconds: Positive = 600
    """Seconds in which a group that comes back must get a peer's state. The others wait meanwhile. After two
    failures it ends, and they go on."""
    process_group_timeout_ms: Positive = 60_000
    """Milliseconds that a group waits for the others' part of a sum, in which they may still compute. After
    that the step is repeated."""
    semi_sync_method: Literal["local_sgd", "diloco"] | None = None
    """How groups meet if not in every step: "local_sgd" averages their weights every sync_steps steps,
    "diloco" (arXiv:2311.08105) takes the average of their moves as the gradient of an outer optimizer.
    For groups with a slow link between them."""
    sync_steps: Positive = 50
    """Steps of a group from one meeting to the next."""
    num_fragments: Positive = 1
    """Parts of the model that meet by turns, at even distances (streaming
    DiLoCo, arXiv:2501.18512). Divides sync_steps."""
    fragment_sync_delay: NonNegative = 0
    """Steps in which a part's average is under way while training goes on."""
    fragment_update_alpha: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a group's own weights that stays after a meeting."""
    should_quantize: bool = False
    """Send DiLoCo's moves in 8 bits. Needs a GPU with Triton."""
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate of DiLoCo's outer optimizer, SGD with Nesterov momentum."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the outer optimizer. 0: plain SGD."""
    grace_seconds: Positive = 120
    """Seconds to finish the step and save after SIGTERM, SIGUSR1 or SIGINT; then the process ends.
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
    step_timeout_seconds: NonNegative = 0
    """Seconds that a step may take; the first has comm.init_timeout_seconds more. After that the
    run ends, with the stacks of all ranks in logs/ and the rank to look at in status.json. Saves
    and validation do not count. 0: no limit."""
