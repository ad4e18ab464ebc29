"""Forward passes of evaluations in `titan sim --run`. Imports no torch."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from titan.data import DataError
from titan.data.tokenizer import open_tokenizer
from titan.sim.extension import SimExtension

from .examples import read_task
from .passes import UNIT, plan_passes
from .section import EvaluationSection

if TYPE_CHECKING:
    from titan.sim.simulate import Simulation


class EvaluationPasses(SimExtension):
    """Tokens of the evaluations of a run."""

    def forward_tokens(self, simulation: Simulation) -> int:
        job: Any = simulation.config
        return sum(
            ceil(job.training.steps / section.interval) * _tokens(simulation, section)
            for section in job.evaluation
        )


def _tokens(simulation: Simulation, section: EvaluationSection) -> int:
    """Return the tokens of a rank's forward passes in one evaluation, with their padding."""
    config, layout = simulation.config, simulation.layout
    try:
        encode = open_tokenizer(config).encode
    except (
        DataError
    ):  # it may be on another machine: four characters a token, as English text has
        encode = lambda text: text[::4]  # noqa: E731
    unit, total = UNIT * layout.cp * layout.tp, 0
    for name in section.tasks:
        pairs = read_task(name, num_examples=section.num_examples).pairs
        inputs = [min(len(encode("".join(pair))), config.training.seq_len) for pair in pairs]
        batch = min(section.local_batch_size, ceil(len(inputs) / layout.dp))
        passes = plan_passes(
            inputs, config.training.seq_len, batch=batch, world=layout.dp, unit=unit
        )
        total += sum(batch * length for _, length in passes)
    return total
