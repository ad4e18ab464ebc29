"""Steps of a job on one rank, and the comparison of a layout with one process. `titan certify` and the parity tests use it.

A rank returns the loss and the gradient norm of each step, whole gradients of the first step and whole weights after the last. A
difference is relative to the size of the value in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from titan.base.failure import UserError
from titan.checks.layout_rules import resolve_layout
from titan.config.phases import Phase
from titan.config.schema import JobConfig
from titan.data.base import TensorBatch
from titan.numerics.digests import whole
from titan.numerics.recording import StepRecorder
from titan.parallel import build_mesh, initialize, materialize
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.parallel.stages import extract_stages
from titan.step.resolved import resolve_job
from titan.step.train_step import TrainStep, build_train_step
from titan.step.whole_model import build_whole_model, sent_by_stage
from titan.tasks import task_of
from titan.tasks.base import Microbatch

CPU, BOUND = torch.device("cpu"), 1e-5
WHAT = ("losses", "norms", "gradients", "weights")
LEAST = 1e-3  # see `ratios`


def bounds(
    *, is_8bit: bool, adds_in_parts: bool, has_8bit_moments: bool = False
) -> dict[str, float]:
    """Return the largest relative difference that rounding makes in fp32, for each of `WHAT`.

    Args:
        is_8bit: linear layers or experts compute in 8 bits. A sum in another order may then fall on the other side of a rounding, a
            sixteenth to an eighth of the value away, and AdamW takes such a step in full. A wrong scale makes 1e-1.
        adds_in_parts: tensor- or context-parallel ranks add up parts before a cast.
        has_8bit_moments: the optimizer's. A moment next to the middle of two of its 256 levels takes the other one after any rounding.
    """
    if is_8bit:
        gradients = 2e-2 if adds_in_parts else BOUND
        return {"losses": 1e-4, "norms": 1e-3, "gradients": gradients, "weights": 2e-2}
    return {**dict.fromkeys(WHAT, BOUND), "weights": 5e-4 if has_8bit_moments else BOUND}


# ---- on a rank -----------------------------------------------------------------------------------


def train_job(config: JobConfig, recorded: bool = False, perturbed: int = 0) -> dict[str, Any]:
    """Train a job on the ranks of the default process group, on random batches of its task.

    Args:
        config: the job, of as many ranks.
        recorded: train two steps only, and return their records, too.
        perturbed: see `StepRecorder`.
    """
    layout = resolve_layout(config, dist.get_world_size())
    mesh = build_mesh("cpu", **layout.degrees)
    job = resolve_job(config, layout, device="cpu")
    try:
        train_step = build_train_step(job, device=CPU, mesh=mesh)
    except UserError as error:  # on all ranks: only the model tells
        return {"refused": str(error)}
    recorder = StepRecorder(train_step, perturbed=perturbed) if recorded else None
    batches = islice(_batches(train_step), 2 if recorded else None)
    found = record(train_step, batches, recorder)
    kept = [c.name for c in train_step.float8 if c.kept]
    return found | {"kept": kept}


def _batches(train_step: TrainStep) -> Iterator[list[TensorBatch]]:
    """Yield this rank's micro-batches of each step, and begin the phases of the job."""
    job = train_step.job
    for phase in job.phases:
        if phase.number > 1:
            train_step.change(phase)
        for step in range(phase.first_step, phase.last_step + 1):
            yield micro_batches(
                _random_batch(phase, step), train_step.mesh, phase.layout.accumulation
            )


def _random_batch(phase: Phase, step: int) -> TensorBatch:
    """Return the global batch of a step, which belongs to debug.seed."""
    training = phase.config.training.model_copy(update={"local_batch_size": phase.sequences})
    return task_of(phase.config.model_copy(update={"training": training})).random_batch(
        1000 * phase.config.debug.seed + step
    )


def micro_batches(whole: Any, mesh: DeviceMesh, accumulation: int) -> list[Any]:
    """Return a rank's micro-batches of a global batch."""
    axes = ("dp_replicate", "dp_shard")
    world, rank = axis_size(mesh, *axes), axis_rank(mesh, *axes)
    count = world * accumulation
    return [whole.map(lambda _, t, i=i: t.chunk(count)[i]) for i in range(rank, count, world)]


def record(
    train_step: TrainStep,
    batches: Iterable[Sequence[Any]],
    recorder: StepRecorder | None = None,
) -> dict[str, Any]:
    """Train on this rank's micro-batches of each step. Return `WHAT`, and records of the steps."""
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        if not gradients:
            gradients.update(whole_gradients(train_step))

    # Clipped, a wrong gradient would change all others. Early steps in the backward pass use gradients up, and never call this.
    train_step.call_with_gradients(keep_gradients)
    losses, norms, recorded = [], [], []
    for step, mine in enumerate(batches, 1):
        if recorder is not None:
            recorder.begin(mine)
        report = train_step.train(mine, step=step)
        if recorder is not None:
            recorded.append(recorder.end(step, report))
        losses.append(report.loss.item())
        norms.append(report.grad_norm.item())
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": {name: whole(p) for name, p in named_parameters(train_step)},
        "recorded": recorded,
    }


def named_parameters(train_step: TrainStep) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank's model parts, by their names in the plain model."""
    for part in train_step.model_parts:
        yield from ((canonical_name(n), p) for n, p in part.named_parameters())


def whole_gradients(train_step: TrainStep) -> dict[str, Tensor]:
    """Gather the gradients of this rank's model parts."""
    return {n: whole(p.grad) for n, p in named_parameters(train_step) if p.grad is not None}


# ---- comparison ----------------------------------------------------------------------------------


def ratios(
    results: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Any],
    what: str,
    least: float = 0.0,
) -> dict[Any, float]:
    """Return the relative difference of each parameter, or of each step, the largest over ranks.

    Args:
        results: of the ranks of a layout.
        reference: of one process.
        what: one of `WHAT`.
        least: the least size that a parameter is compared with, as a share of the size of all. Some gradients are zero but for
            rounding, such as those of biases of keys.
    """
    expected, *held = (_by_name(run[what]) for run in (reference, *results))
    if not any(held):  # early steps in the backward pass use the gradients up
        return {}
    sizes = {name: _size(e) for name, e in expected.items()}
    floor = least * math.hypot(*sizes.values()) * isinstance(reference[what], dict)
    found = dict.fromkeys({*expected}.union(*held), math.inf)
    for name, e in expected.items():
        # Another pipeline stage's is missing.
        away = [_size(h[name] - e) for h in held if name in h]
        if away:
            found[name] = max(_ratio(d, max(sizes[name], floor)) for d in away)
    return found


def _by_name(values: Any) -> dict[Any, Any]:
    return dict(enumerate(values, 1)) if isinstance(values, list) else values


def _size(x: Tensor | float) -> float:
    return torch.linalg.vector_norm(x).item() if isinstance(x, Tensor) else abs(x)


def _ratio(difference: float, size: float) -> float:
    ratio = difference and (difference / size if size else math.inf)
    # max() passes over NaN, which equals nothing.
    return math.inf if math.isnan(ratio) else ratio


# ---- what a pipeline cuts apart -------------------------------------------------------------------
# Stages one after the other in one process, beside the whole model. A rank gets nothing from the rank before but one tensor. A model whose
# blocks read anything else of earlier blocks (keys and values in a local variable of `forward`, a list on the model, a table of its module)
# computes something else where a cut parts them.


def cut_differences(
    config: JobConfig, modules: Sequence[Sequence[str]]
) -> dict[str, float | str]:
    """Cut the model of a job in two, at each block and wherever its pipeline does.

    Args:
        config: the job, on one rank.
        modules: names of the modules of each stage of its pipeline.

    Returns:
        For the first module after each cut: the largest difference of the model's output, relative to the output, or the error.
    """
    job = resolve_job(config, resolve_layout(config, 1), device="cpu")
    model, _ = build_whole_model(job)
    materialize(model, device=CPU)
    initialize(model, seed=config.debug.seed, std_of=model.init_std)
    drawn = [job.task.random_batch(1000 * config.debug.seed + number) for number in (1, 2)]
    first, second = (
        job.task.microbatch(job.task.complete(batch, device=CPU, is_cut=True))
        for batch in drawn
    )
    sent = sent_by_stage(job, first.input, first.inputs).shape
    return try_cuts(model.eval(), modules, first, second, sent=sent)


@torch.no_grad()
def try_cuts(
    model: nn.Module,
    modules: Sequence[Sequence[str]],
    first: Microbatch,
    second: Microbatch,
    *,
    sent: torch.Size,
) -> dict[str, float | str]:
    """Cut a model with weights in two, at each block and between the stages of `modules`. See `cut_differences`.

    Args:
        model: the model, in evaluation mode.
        modules: names of the modules of each stage.
        first: a micro-batch, which passes through both parts.
        second: another one, which passes through the first part in between: what that part left outside its modules is then of this one.
        sent: shape of the tensor between two parts.
    """
    order = [name for names in modules for name in names]
    shared = {name for name in order if order.count(name) > 1}
    starts = {names[0] for names in modules[1:] if names}
    starts |= {name for name in order[1:] if name.startswith("layers.")}
    expected = tree_leaves(model(first.input, **first.inputs))
    found: dict[str, float | str] = {}
    for place, name in enumerate(order[1:], 1):
        if name not in starts:
            continue
        names = [[*order[:place], *shared], [*shared, *order[place:]]]
        parts = extract_stages(
            model, [[*dict.fromkeys(part)] for part in names], numbers=(0, 1)
        )
        try:
            x = parts[0](first.input, **first.inputs)
            if not isinstance(x, Tensor) or x.shape != sent:
                raise ValueError(f"the part before it returns {_shape(x)}, not {tuple(sent)}")
            parts[0](second.input, **second.inputs)
            found[name] = _difference(tree_leaves(parts[1](x, **first.inputs)), expected)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def parted(found: Mapping[str, float | str], bound: float) -> dict[str, str]:
    """Return the fault of each wrong cut."""
    return {
        name: value if isinstance(value, str) else f"the output is {value:.1e} off"
        for name, value in found.items()
        if isinstance(value, str) or not value <= bound
    }


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b.is_floating_point()]
    return max(_ratio(_size(a - b), _size(b)) for a, b in pairs)
