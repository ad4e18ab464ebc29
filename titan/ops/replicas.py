"""Check that replicas of weights have equal bits. A run would otherwise train on after a bit flip in one replica.

Each rank hashes every parameter's local tensor on its device. The hashes are compared along the mesh axes over which the parameter
is replicated: DDP and HSDP replicas, and parameters that tensor parallelism does not split. It costs one pass over the weights and
a few bytes for each parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan.base.failure import RunFailure, list_ranks
from titan.parallel.float8 import plain

ReplicaGroups = dict[dist.ProcessGroup, list[tuple[str, Tensor]]]


class ReplicaError(RunFailure):
    """Different weights on replicas. The message names ranks and parameters."""

    kind = "replicas_differ"


@torch.no_grad()
def require_equal_replicas(parts: Iterable[nn.Module]) -> None:
    """Raise ReplicaError on all ranks if any replicas differ. All ranks call it, and it waits for the device.

    Args:
        parts: models of this rank (pipeline stages).

    Raises:
        ReplicaError: replicas differ.
        ValueError: no rank has a parameter that is replicated.
    """
    parts, differences = list(parts), []
    groups = replicated(parts)
    for group, named in groups.items():
        # One integer for each parameter, so a gather moves a few bytes.
        mine = torch.stack([torch.hash_tensor(local).view(torch.int64) for _, local in named])
        of_ranks = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(of_ranks, mine, group=group)
        hashes = torch.stack(of_ranks).tolist()
        if any(row != hashes[0] for row in hashes):
            ranks = dist.get_process_group_ranks(group)
            differences.append(_describe(hashes, ranks, [name for name, _ in named]))
    # Every rank raises, even if its own replicas agree.
    of_all: list[tuple[list[str], int]] = [([], 0)] * dist.get_world_size()
    dist.all_gather_object(of_all, (differences, len(groups)))
    if not any(count for _, count in of_all):
        kinds = (
            ", ".join(sorted({type(part).__name__.removeprefix("FSDP") for part in parts}))
            or "no model"
        )
        raise ValueError(
            f"no parameter of {kinds} is replicated, so there is nothing to compare: it looked for DTensors with the placement Replicate "
            "over two ranks or more, as apply_ddp, apply_tp and an apply_fsdp over dp_replicate and dp_shard make them"
        )
    if texts := sorted({text for texts, _ in of_all for text in texts}):
        raise ReplicaError(
            f"replicas hold different weights: {'; '.join(texts)}. Memory or a link is broken on one of them, or an "
            "operation gives other bits on some ranks"
        )


def replicated(parts: Iterable[nn.Module]) -> ReplicaGroups:
    """Return local tensors, with their names, by the group whose ranks must hold equal ones.

    Args:
        parts: models of this rank (pipeline stages).
    """
    groups: ReplicaGroups = defaultdict(list)
    for part in parts:
        for name, parameter in part.named_parameters():
            # Only a DTensor says over which ranks it is replicated.
            if not isinstance(parameter, DTensor):
                continue
            whole = plain(parameter)
            assert isinstance(whole, DTensor)
            for axis, place in enumerate(whole.placements):
                if isinstance(place, Replicate) and whole.device_mesh.size(axis) > 1:
                    group = whole.device_mesh.get_group(axis)
                    groups[group].append((name, whole.to_local()))
    return groups


def _describe(hashes: list[list[int]], ranks: list[int], names: list[str]) -> str:
    differing: dict[str, list[int]] = {}
    tied = False
    for column, name in enumerate(names):
        # The majority counts as right. With a tie, no rank is known to be right.
        [(usual, count), *rest] = Counter(row[column] for row in hashes).most_common()
        if rest:
            tied |= rest[0][1] == count
            differing[name] = [
                rank
                for rank, row in zip(ranks, hashes, strict=True)
                if tied or row[column] != usual
            ]
    bad = sorted({rank for ranks_of in differing.values() for rank in ranks_of})
    first, more = next(iter(differing)), len(differing) - 1
    return (
        f"{list_ranks(bad)} of {', '.join(map(str, ranks))}"
        + (" (no majority says which is right)" if tied else "")
        + f" in {first}"
        + (f" and {more} more parameters" if more else "")
    )
