"""Benchmarks of a device, its memory and its links, for `titan preflight`.

Bandwidth of collectives is bus bandwidth, as nccl-tests define it, so that figures of any number of
ranks compare with a link's. For B bytes over n ranks in t seconds it is

    all-reduce                 2 (n - 1) / n B / t
    all-gather, all-to-all       (n - 1) / n B / t      B: bytes of the gathered tensor

Bytes are decimal: 1 GB is 10^9.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[], Any]


def rounds_s(
    work: Work, device: torch.device, *, calls: int = 1, rounds: int = 5
) -> list[float]:
    """Time `work` in rounds, after one round to warm up.

    Ranks that measure a collective together must use the same counts.

    Args:
        work: function to time.
        device: device of the work.
        calls: calls in a round.
        rounds: number of rounds.

    Returns:
        Seconds of one call, for each round.
    """
    seconds = []
    for _ in range(rounds + 1):
        _wait_for(device)
        start_s = time.perf_counter()
        for _ in range(calls):
            work()
        _wait_for(device)
        seconds.append((time.perf_counter() - start_s) / calls)
    return seconds[1:]


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matmul(device: torch.device, dtype: torch.dtype, *, width: int) -> Work:
    """Return a function that multiplies two square matrices, 2 `width`^3 operations.

    Args:
        device: device of the matrices.
        dtype: dtype of the matrices.
        width: number of rows and columns.
    """
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def copy(device: torch.device, num_bytes: int) -> Work:
    """Return a function that copies within the device."""
    data, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(data, non_blocking=True)


def link_gb_per_s(device: torch.device, num_bytes: int) -> float | None:
    """Measure the better of this rank's links to the ranks before and after it; None for a single rank.

    The better link counts, because a slow rank spoils one link of each neighbour, but both links of
    the slow rank.
    """
    seconds = links_s(device, num_bytes).values()
    return 2 * num_bytes / min(seconds) / 1e9 if seconds else None


def links_s(
    device: torch.device,
    num_bytes: int,
    *,
    group: dist.ProcessGroup | None = None,
    rounds: int = 5,
) -> dict[int, float]:
    """Measure the seconds to send bytes to each neighbour of this rank, and to receive as many.

    Each link is measured with no other traffic of its two ends. The fastest round counts: links are
    shared, and only a slow round has a reason.

    Args:
        device: this rank's device.
        num_bytes: bytes in each direction.
        group: the ranks; None: all.
        rounds: number of rounds.

    Returns:
        Seconds by the number of the neighbour: the rank before and the rank after this one.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds: dict[int, float] = {}
    # First the pairs (0, 1), (2, 3), ..., then (1, 2), (3, 4), ...
    for phase in (0, 1) if world > 1 else ():
        # All ranks begin a phase together, so that no other pair's traffic is still on the links.
        dist.barrier(group)
        is_first = rank % 2 == phase
        peer = rank + 1 if is_first else rank - 1
        # An even number of ranks closes the ring with the link between the last and the first rank.
        if world % 2 == 0:
            peer %= world
        if 0 <= peer < world:
            swap = partial(_there_and_back, block, ranks[peer], is_first, group)
            took_s = min(rounds_s(swap, device, rounds=rounds))
            # With two ranks, both phases measure the same link.
            seconds[ranks[peer]] = min(took_s, seconds.get(ranks[peer], took_s))
    return seconds


def _there_and_back(
    block: torch.Tensor, peer: int, is_first: bool, group: dist.ProcessGroup | None
) -> None:
    for sends in (is_first, not is_first):
        # A batch uses the group's communicator. A single send would create a communicator for the pair.
        operation = dist.P2POp(dist.isend if sends else dist.irecv, block, peer, group)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()


def collectives_gb_per_s(
    device: torch.device,
    num_bytes: int,
    *,
    kinds: tuple[str, ...],
    group: dist.ProcessGroup,
) -> dict[str, float]:
    """Measure the bus bandwidth of collectives.

    Args:
        device: this rank's device.
        num_bytes: bytes of the whole tensor, rounded down to a multiple of the ranks.
        kinds: kinds to measure, in this order: "all-reduce", "all-gather" or "all-to-all".
        group: the ranks. All groups of a mesh axis measure at once, as they
            communicate in training.

    Returns:
        GB/s by kind.
    """
    n = dist.get_world_size(group)
    # A multiple of the ranks, in fp32.
    whole = torch.zeros(num_bytes // 4 // n * n, device=device)
    part, other = whole[: len(whole) // n].clone(), torch.empty_like(whole)
    sent = whole.numel() * 4 * (n - 1) / n
    works: dict[str, tuple[Work, float]] = {
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * sent),
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part, group=group), sent),
        "all-to-all": (lambda: dist.all_to_all_single(other, whole, group=group), sent),
    }
    rates = {}
    with warnings.catch_warnings():
        # all_gather_into_tensor has a new name, which torch 2.11 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        for kind in kinds:
            work, bus_bytes = works[kind]
            rates[kind] = bus_bytes / min(rounds_s(work, device, calls=2)) / 1e9
    return rates
