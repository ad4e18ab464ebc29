"""Load of the busiest rank of an expert-parallel dispatch. Imports no torch.

It follows from the spread of tokens over experts. A dispatch ends when its busiest rank is done, so
this rank sets the time of each layer. `simulator.routing` gives the shares p of E experts; C ranks
hold E / C of them each, and all ranks together route N tokens (counted once per expert) in a
forward pass:

    even       p = 1/E, and no noise
    zipf:s     p of the i-th busiest expert is i^-s / sum of all; experts are on ranks by chance, in each layer in another order
    a file     p of each layer as a run counted them (experts.json), in the order of its experts

The tokens of a rank are drawn from a normal distribution with the mean N q and the variance N q (1
- q) of a multinomial one, where q is the sum of its experts' shares. The figure is the mean over
draws of the busiest rank's tokens, divided by N / C. Draws are seeded, so equal jobs give equal
figures. Tokens of a text are alike, so the real noise is larger than a multinomial one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from titan.config.errors import ConfigError, Problem
from titan.config.layout import Layout
from titan.config.schema import JobConfig

_DRAWS = 200


def busiest_rank(config: JobConfig, model: Any, layout: Layout) -> float:
    """Return the tokens that the busiest rank of a dispatch gets, divided by the mean.

    Args:
        config: the job.
        model: sizes of the model.
        layout: layout of the ranks.

    Raises:
        ConfigError: the file of simulator.routing is wrong.
    """
    section, ep = config.simulator, config.parallelism.expert_parallel_degree
    if ep == 1 or not model.num_experts:
        return 1.0
    most = most_imbalance(config, model)
    if ep > model.num_experts:  # a search asks before the layout is refused
        return most
    if section.expert_imbalance is not None:
        return min(section.expert_imbalance, most)
    if section.routing == "even" or config.debug.moe_force_load_balance:
        return 1.0
    sequences = config.training.local_batch_size
    if layout.pp > 1:
        sequences = config.parallelism.pipeline_parallel_microbatch_size
    tokens = sequences * config.training.seq_len // (layout.cp * layout.tp)
    found = _expected(section.routing, model.num_experts, ep, ep * tokens * model.top_k)
    return min(found, most)


def most_imbalance(config: JobConfig, model: Any) -> float:
    """Return the largest load of a rank over the mean.

    A rank can get all tokens, or each token once for each of its experts.
    """
    return min(config.parallelism.expert_parallel_degree, model.num_experts / model.top_k)


@cache
def _expected(routing: str, num_experts: int, num_ranks: int, num_rows: int) -> float:
    """Return the expected tokens of the busiest rank over the mean.

    It is rounded to 0.01, since stored traces depend on it.
    """
    rng, busiest = random.Random(0), 0.0
    is_zipf = routing.startswith("zipf:")
    layers = (
        [zipf(float(routing[5:]), num_experts)]
        if is_zipf
        else read_shares(routing, num_experts)
    )
    repeats = ceil(_DRAWS / len(layers))
    for shares in layers * repeats:
        if is_zipf:
            rng.shuffle(shares)
        each = num_experts // num_ranks
        ranks = [sum(shares[n : n + each]) for n in range(0, num_experts, each)]
        busiest += max(q + rng.gauss(0, sqrt(q * (1 - q) / num_rows)) for q in ranks)
    return round(num_ranks * busiest / (repeats * len(layers)), 2)


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
        loads: Sequence[Sequence[int]] = json.loads(Path(path).read_text("utf-8"))["loads"]
        shares = [[count / sum(layer) for count in layer] for layer in loads]
        if {*map(len, shares)} != {num_experts}:
            raise ValueError(f"counts {len(shares[0])} experts, the model has {num_experts}")
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        message = f"{path} has no counts of these experts: {error}; name a run's experts.json"
        raise ConfigError([Problem("simulator.routing", 0, "", message)]) from None
    return shares
