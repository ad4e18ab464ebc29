"""Assumed numbers of tokens for experts. A recording has no tokens, so their routing is unknown.

A run asks the device once for each layer (`titan.parallel.token_order.host_counts`), and the host waits
for the answer. A recording assumes that each rank sends equally many tokens to every rank, and that
the current rank is the busiest rank of each layer: it receives `busiest` times the tokens that it
sends, as titan.sim.routing says. All its experts get equal shares.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titan.models.common import moe
from titan.parallel import expert
from titan.sim.record.device import current_stream
from titan.sim.record.trace import Event, Synchronize


def assume_token_counts(busiest: float, record: Callable[[Event], None]) -> None:
    """Replace the counts of tokens by an assumption, for the life of the process.

    Args:
        busiest: number of tokens that arrive, as a multiple of the number of tokens sent.
        record: receives the host's waits for the counts.
    """

    def wait() -> None:
        record(Synchronize(current_stream(), "rows of experts are counted"))

    def of_experts(counts: Tensor, *, num_tokens: int) -> list[int]:
        wait()
        return split_evenly(num_tokens, len(counts))

    def of_ranks(counts: Tensor, *, num_tokens: int) -> list[int]:
        wait()
        # Tokens sent to each rank, then tokens received from each rank: at most all tokens.
        ranks = len(counts) // 2
        arriving = round(num_tokens * min(busiest, ranks))
        return [*split_evenly(num_tokens, ranks), *split_evenly(arriving, ranks)]

    moe.host_counts, expert.host_counts = of_experts, of_ranks


def split_evenly(total: int, parts: int) -> list[int]:
    """Return a total as a list of parts that differ by at most 1."""
    each, rest = divmod(total, parts)
    return [each + (n < rest) for n in range(parts)]
