"""Load of the busiest rank of an expert-parallel dispatch. Imports no torch.

It follows from the spread of tokens over experts. A dispatch ends when its busiest rank is done, so
this rank sets the time of each layer. `simulator.routing` gives the shares p of E experts; C ranks
hold E / C of them each, and all ranks together route N tokens (counted once per expert) in a
forward pass:

    even       p = 1/E, and no noise
    zipf:s     p of the i-th busiest expert is i^-s / sum of all; experts are on ranks by chance, in each layer in another order
    W0 to W7   some experts are hot and get three quarters of the tokens (`_HOT`), in some steps
    a file     p of each layer as a run counted them (experts.json), in the order of its experts

The tokens of a rank are drawn from a normal distribution with the mean N q and the variance N q (1
- q) of a multinomial one, where q is the sum of its experts' shares. The load of a step is the mean
over layers of the busiest rank's tokens, divided by N / C. Draws are seeded, so equal jobs give
equal figures. Tokens of a text are alike, so the real noise is larger than a multinomial one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from titan.base.untrusted import InputError, read_json
from titan.config.errors import ConfigError, Problem
from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.sim.section import assumptions


@dataclass(frozen=True)
class _Counts:
    """Tokens of each expert, in each layer."""

    loads: list[list[Annotated[int, Field(ge=0)]]]


_STEPS = 200
"""Steps that are drawn."""
_HOT_SHARE = 0.75
Hot = Callable[[int, int, int], Sequence[int]]
_HOT: dict[str, Hot] = {
    "W0": lambda step, experts, ranks: (),
    "W1": lambda step, experts, ranks: range(experts // 8, experts // 2),
    "W2": lambda step, experts, ranks: range(experts // ranks),
    "W3": lambda step, experts, ranks: range(0, experts, experts // ranks),
    "W4": lambda step, experts, ranks: (0, experts - 1),
    "W5": lambda step, experts, ranks: range(experts // ranks),
    "W6": lambda step, experts, ranks: _quarter(step, experts),
    "W7": lambda step, experts, ranks: _quarter(3, experts) if step % 8 == 7 else (),
}
"""Hot experts of a step, by the number of the step, of experts and of ranks, after NVIDIA/Megatron-LM#7488: balanced, three of eight, those
of a rank, one on each rank, two, those of a rank where the others get no tokens, rotating, a burst in one step of eight."""


def busiest_rank(config: JobConfig, model: Any, layout: Layout) -> float:
    """Return the tokens that the busiest rank of a dispatch gets, divided by the mean.

    Args:
        config: the job.
        model: sizes of the model.
        layout: layout of the ranks.

    Raises:
        ConfigError: the file of simulator.routing is wrong.
    """
    section, ep = assumptions(config), config.parallelism.expert_parallel_degree
    if ep == 1 or not model.num_experts:
        return 1.0
    most = most_imbalance(config, model)
    if ep > model.num_experts:  # a search asks before the layout is refused
        return most
    if section.expert_imbalance is not None:
        return min(section.expert_imbalance, most)
    loads = config_loads(config, model, layout)
    # It is rounded to 0.01, since stored traces depend on it.
    return round(fmean(loads), 2) if loads else 1.0


def config_loads(config: JobConfig, model: Any, layout: Layout) -> list[float]:
    """Return the tokens of the busiest rank over the mean in each of some steps; nothing if they are the same in all."""
    section, ep = assumptions(config), config.parallelism.expert_parallel_degree
    is_even = section.routing == "even" or config.debug.moe_force_load_balance
    if is_even or section.expert_imbalance is not None:
        return []
    sequences = config.training.local_batch_size
    if layout.pp > 1:
        sequences = config.parallelism.pipeline_parallel_microbatch_size
    tokens = sequences * config.training.seq_len // (layout.cp * layout.tp)
    most = most_imbalance(config, model)
    loads = step_loads(section.routing, model.num_experts, ep, ep * tokens * model.top_k)
    return [min(load, most) for load in loads]


def _quarter(step: int, experts: int) -> range:
    """Return a quarter of the experts, another one in each of four steps."""
    return range(step % 4 * experts // 4, (step % 4 + 1) * experts // 4)


def most_imbalance(config: JobConfig, model: Any) -> float:
    """Return the largest load of a rank over the mean.

    A rank can get all tokens, or each token once for each of its experts.
    """
    return min(config.parallelism.expert_parallel_degree, model.num_experts / model.top_k)


@cache
def step_loads(routing: str, num_experts: int, num_ranks: int, num_rows: int) -> list[float]:
    """Return the tokens of the busiest rank over the mean, in each of some steps."""
    rng, each = random.Random(0), num_experts // num_ranks
    loads = []
    for step in range(_STEPS):
        busiest = []
        for shares in layer_shares(routing, num_experts, num_ranks, step=step):
            if routing.startswith("zipf:"):
                rng.shuffle(shares)
            ranks = [sum(shares[n : n + each]) for n in range(0, num_experts, each)]
            tokens = (q + rng.gauss(0, sqrt(q * (1 - q) / num_rows)) for q in ranks)
            busiest.append(num_ranks * max(tokens))
        loads.append(fmean(busiest))
    return loads


def layer_shares(
    routing: str, num_experts: int, num_ranks: int, *, step: int = 0
) -> list[list[float]]:
    """Return the shares of experts in each layer of a step. One layer stands for all, if they are alike.

    Raises:
        ConfigError: the file of simulator.routing is wrong.
    """
    if routing.startswith("zipf:"):
        return [zipf(float(routing[5:]), num_experts)]
    if routing not in _HOT:
        return read_shares(routing, num_experts)
    hot = set(_HOT[routing](step, num_experts, num_ranks))
    if not hot:
        return [[1 / num_experts] * num_experts]
    of_hot = 1.0 if routing == "W5" else _HOT_SHARE
    rest = (1 - of_hot) / num_experts
    return [[rest + of_hot / len(hot) * (n in hot) for n in range(num_experts)]]


def zipf(exponent: float, count: int) -> list[float]:
    """Return the shares of `count` experts, the busiest first."""
    weights = [(n + 1) ** -exponent for n in range(count)]
    total = sum(weights)
    return [weight / total for weight in weights]


def read_shares(path: str, num_experts: int) -> list[list[float]]:
    """Read each layer's shares from an experts.json.

    Raises:
        ConfigError: the file is no experts.json, or of another model.
    """
    try:
        loads = read_json(Path(path), _Counts).loads
        for layer in loads or [[]]:
            if len(layer) != num_experts:
                raise InputError(
                    f"{path}: counts {len(layer)} experts, the model has {num_experts}"
                )
            if not any(layer):
                raise InputError(f"{path}: a layer has no tokens")
        return [[count / sum(layer) for count in layer] for layer in loads]
    except InputError as error:
        message = f"{error}; name a run's experts.json"
        raise ConfigError([Problem("simulator.routing", 0, "", message)]) from None
