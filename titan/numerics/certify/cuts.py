"""What a pipeline cuts apart: stages one after the other in one process, beside the whole model.

A rank gets nothing from the rank before but one tensor. A model whose blocks read anything else of earlier blocks (keys and values in a local
variable of `forward`, a list on the model, a table of its module) computes something else where a cut parts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan.config.layout import resolve_layout
from titan.config.schema import JobConfig
from titan.parallel import initialize, materialize
from titan.parallel.stages import extract_stages
from titan.step.resolved import resolve_job
from titan.step.whole_model import build_whole_model, sent_by_stage
from titan.tasks.base import Microbatch

CPU = torch.device("cpu")


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
    """Return what is wrong with each cut that is."""
    return {
        name: value if isinstance(value, str) else f"the output is {value:.1e} off"
        for name, value in found.items()
        if isinstance(value, str) or not value <= bound
    }


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b.is_floating_point()]
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)
