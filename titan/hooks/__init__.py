"""Standard hooks of a run, and hooks of other packages.

An installed package adds a hook through the entry point group "titan.hooks":

    [project.entry-points."titan.hooks"]
    my_hook = "my_package.hooks:MyHook"       # called with the trainer, returns a titan.hook.Hook, or None: this run needs none
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from titan.config.plug_ins import plug_ins
from titan.health.monitor import Monitor
from titan.hook import Hook, RunContext
from titan.hooks.checkpointing import Checkpointing
from titan.hooks.compilation import Compilation
from titan.hooks.evaluation import Evaluation
from titan.hooks.experts import ExpertLoads
from titan.hooks.metrics import Metrics
from titan.hooks.mtp import MTPMetrics
from titan.hooks.profiling import Profiling
from titan.hooks.rank_times import RankTimes
from titan.hooks.recording import Recording
from titan.hooks.recovery import StepRecovery
from titan.hooks.replay import Replay
from titan.hooks.replica_check import ReplicaCheck
from titan.hooks.run_events import RunEvents
from titan.hooks.step_limit import StepLimit
from titan.hooks.validation import Validation

# By name: the simulator is above the trainer.
TWIN = EntryPoint("twin", "titan.sim.twin.hook:Twin", "titan.hooks")


def standard_hooks(trainer: RunContext, *, monitor: Monitor | None = None) -> list[Hook]:
    """Return the hooks of `titan train` in their order, with those of installed packages.

    Args:
        trainer: the run.
        monitor: monitor of the run; None: no limit on the time of a step.
    """
    hooks: list[Hook] = [
        # First, so that it times the work of all other hooks in a step.
        StepLimit(trainer, monitor),
        StepRecovery(trainer),
        ReplicaCheck(trainer),
        *([Replay(trainer)] if trainer.config.fault_tolerance.replay_every else []),
        RunEvents(trainer),
        RankTimes(trainer),
        Profiling(trainer),
        Compilation(trainer),
        Validation(trainer),
        Evaluation(trainer),
        ExpertLoads(trainer),
        *([Recording(trainer)] if trainer.config.debug.record_steps else []),
        *([MTPMetrics(trainer)] if getattr(trainer.sizes, "num_mtp_modules", 0) else []),
        *([TWIN.load()(trainer)] if getattr(trainer.config.simulator, "twin", False) else []),
        # Last, since a checkpoint has the step's row, and a row has the columns of all other hooks.
        Checkpointing(trainer),
        Metrics(trainer),
    ]
    # Sorted by name, since every rank must call hooks in the same order.
    for entry in plug_ins("titan.hooks"):
        if hook := entry.load()(trainer):
            hooks.insert(0 if hook.is_first else -2, hook)
    return hooks
