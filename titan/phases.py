"""Begin a phase of a run (titan/config/phases.py): batch, sequences and data change between two steps."""

from __future__ import annotations

from titan.config.layout import resolve_layout
from titan.hook import Run


def enter_phase(run: Run, step: int) -> None:
    """Go on with the settings of the phase that a step belongs to. The learning rate follows by itself (titan/optim/schedule.py)."""
    # Steps past the end are of the last phase.
    phase = [phase for phase in run.phases if phase.first_step <= max(step, 1)][-1]
    if phase is getattr(run, "phase", None):
        return
    run.phase, training = phase, phase.config.training
    accumulation = resolve_layout(phase.config, run.world_size).accumulation
    run.sequences_per_step = training.local_batch_size * run.layout.dp * accumulation
    run.tokens_per_step = run.sequences_per_step * training.seq_len
    run.loader.change(
        batch=training.local_batch_size,
        accumulation=accumulation,
        seq_len=training.seq_len,
        weights=[source.weight for source in phase.config.data.sources],
    )
    run.train_step.change(phase.config)
    if hasattr(run, "timer"):  # else the run is about to start in this phase
        run.timer.forget_mean()
        # No warning, for it begins as planned.
        run.console.message(str(phase), always=True)
        run.events.write("decision", step=run.step, text=str(phase))
