"""Learning rate as a pure function of the step: a resume needs the step and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titan.config.phases import Phase, phases_of
from titan.config.schema import JobConfig, LRSchedulerSection
from titan.config.toml import tomllib


def phases(section: LRSchedulerSection, *, total_steps: int) -> tuple[int, int]:
    """Return the numbers of steps of warm-up and of decay.

    If they do not fit, warm-up comes first and decay takes the remaining steps, as in TorchTitan.

    Args:
        section: [lr_scheduler].
        total_steps: steps of the run, unless the section has its own.
    """
    total = section.total_steps or total_steps
    warmup = min(section.warmup_steps, total)
    wanted = total if section.decay_ratio is None else round(total * section.decay_ratio)
    return warmup, min(wanted, total - warmup)


def learning_rate_factor(
    step: int,
    *,
    section: LRSchedulerSection,
    total_steps: int,
    phases: Sequence[Phase] = (),
) -> float:
    """Return the share of the peak learning rate for a step.

    The schedule of [lr_scheduler] holds until a phase begins a separate schedule, which lasts until the next such phase or
    the end of the run.

    Args:
        step: step, from 1 to total_steps.
        section: [lr_scheduler].
        total_steps: steps of the run.
        phases: phases of the run.
    """
    changes = [
        phase for phase in phases if phase.section is not None and phase.section.sets_rate
    ]
    firsts = [*(phase.first_step for phase in changes), total_steps + 1]
    until = min(step, firsts[0]) if changes else step
    factor = _scheduled(until, section=section, total_steps=total_steps)
    for phase, end in zip(changes, firsts[1:], strict=True):
        own = phase.section
        if own is None or step < phase.first_step:
            break
        # A phase without lr_factor continues from the factor at the end of the schedule before it.
        factor = factor if own.lr_factor is None else own.lr_factor
        kind = own.decay_type or ("constant" if own.min_lr_factor is None else "linear")
        if kind != "constant":
            floor = own.min_lr_factor or 0.0
            progress = (min(step, end) - phase.first_step) / (end - phase.first_step)
            factor = floor + (factor - floor) * _shape(kind, progress)
    return factor


def _scheduled(step: int, *, section: LRSchedulerSection, total_steps: int) -> float:
    """Return the share of the peak learning rate for step 1, 2, ... total_steps, as TorchTitan does.

    Linear warm-up reaches 1 at warmup_steps. Then the rate is constant, until it decays along 1 - p (linear), 1 - sqrt(p) (sqrt)
    or (1 + cos(pi p)) / 2 (cosine) in the decay's progress p. Without decay_ratio the decay begins right after warm-up. It would
    reach min_lr_factor a step after the last, so that no step is lost to a rate of 0. Steps past the end keep min_lr_factor.
    """
    total = section.total_steps or total_steps
    warmup_steps, decay_steps = phases(section, total_steps=total_steps)
    if step <= warmup_steps:
        return step / warmup_steps
    # Step 1 of the decay is still at the peak.
    decayed = step - 1 - (total - decay_steps)
    if decayed <= 0 or not decay_steps:
        return 1.0
    progress = min(decayed / decay_steps, 1.0)
    shape = _shape(section.decay_type, progress)
    return section.min_lr_factor + (1 - section.min_lr_factor) * shape


def _shape(kind: str, progress: float) -> float:
    """Return the remaining share of a decay, from 1 to 0."""
    return {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[kind]


def rate_jump(saved: str, config: JobConfig, *, step: int, ranks: int) -> str:
    """Return a warning if a changed job makes the rate jump after a step, to less than half or more than twice.

    Args:
        saved: config of the checkpoint, as TOML.
        config: the job that continues.
        step: step of the checkpoint.
        ranks: number of ranks.

    Returns:
        The warning, or "" if the saved job would make the same jump, or if a phase that begins there sets the rate.
    """
    try:
        sections = tomllib.loads(saved)
        before = JobConfig.model_validate(sections)
        (old, usual), (_, new) = (_rates(job, step, ranks) for job in (before, config))
    except (ValueError, AttributeError):
        return ""  # of another titan, or an optimizer without one rate
    if not sections:  # of a titan that wrote none
        return ""
    is_planned = any(
        p.first_step == step + 1 and p.section and p.section.sets_rate
        for p in phases_of(config, world_size=ranks)
    )
    total, own = (
        job.lr_scheduler.total_steps or job.training.steps for job in (before, config)
    )
    if is_planned:
        return ""
    if math.isclose(new, usual, rel_tol=1e-6) or old / 2 <= new <= 2 * old:
        at = (step + own) // 2 + 1  # a shorter schedule may differ only later
        usual, new = (_rates(job, at - 1, ranks)[1] for job in (before, config))
        if own >= total or at > own or math.isclose(new, usual, rel_tol=0.05):
            return ""
        return f"the learning rate follows a schedule of {own} steps, not of {total}: at step {at} it is {new:.2e}, not {usual:.2e}"
    text = f"learning rate {old:.2e} -> {new:.2e} from step {step:,} to {step + 1:,}"
    if total == own:
        return text
    return (
        f"{text}, since the schedule spans training.steps. lr_scheduler.total_steps = {total} keeps the one before, which goes on at "
        f"{usual:.2e}; a [[phase]] with from_step = {step + 1} and lr_factor begins one of its own (docs/checkpoints.md, Continue a "
        "finished run)"
    )


def _rates(job: JobConfig, step: int, ranks: int) -> list[float]:
    """Return the learning rates of a step and of the next step."""
    phases = phases_of(job, world_size=ranks)
    factors = [
        learning_rate_factor(
            n, section=job.lr_scheduler, total_steps=job.training.steps, phases=phases
        )
        for n in (step, step + 1)
    ]
    return [job.optimizer.lr * factor for factor in factors]
