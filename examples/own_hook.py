"""Add a hook to the trainer. This one adds a column to metrics.jsonl, the spread of the losses of a step's micro-batches.

python examples/own_hook.py train_configs/debug_model.toml --training.steps=20
"""

import sys

from titan.checks.rules import load_to_run
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer


class LossSpread(Hook):
    """Record how far apart the losses of this rank's micro-batches are."""

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer

    def columns(self, window, result: StepResult) -> dict[str, float]:
        losses = result.report.local_losses / result.report.num_valid
        return {"loss_spread": (losses.max() - losses.min()).item()}


if __name__ == "__main__":
    config, _ = load_to_run(sys.argv[1:], world_size=1)
    trainer = Trainer(config, hooks=standard_hooks)
    trainer.hooks.insert(0, LossSpread(trainer))
    try:
        sys.exit(trainer.run())
    finally:
        trainer.close()
