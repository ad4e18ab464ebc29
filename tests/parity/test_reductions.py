"""How FSDP reduces gradients changes no number: once a step in place of each micro-batch, or in a separate group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.layouts import (
    ALWAYS,
    BOUND,
    NEVER,
    REPLICAS,
    Layout,
    cp,
    differences,
    each,
    fsdp,
    job_of,
    pp,
    schedule,
    train,
)
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.parallel import build_mesh
from titan.parallel.fsdp_compat import parameter_groups

ONCE, APART = (("fsdp_reduce_gradients", "step"),), (("fsdp_separate_reduce_scatter", True),)
STAGES = (*APART, *schedule("Interleaved1F1B"))
EXPERTS: dict[str, Any] = {"model": ("qwen3", "tiny_moe"), "documents": False}
SPLIT_EXPERTS = (("expert_parallel_degree", 2), *APART)
LAYOUTS = [
    Layout("FSDP2, ZeRO-2, once", fsdp(2), 4, settings=(*ONCE, *NEVER)),
    Layout("HSDP, ZeRO-3, once", (*REPLICAS, *fsdp(2)), 2, settings=(*ONCE, *ALWAYS)),
    Layout("FSDP2 x CP, once", (*fsdp(2), *cp(2)), 4, settings=ONCE, repeats=True),
    Layout("FSDP2, full AC, once", fsdp(2), 2, settings=ONCE, recompute="full", repeats=True),
    Layout("FSDP2 on the host, once", fsdp(2), 2, settings=ONCE, offload=True, repeats=True),
    Layout("FSDP2, EP 2, apart, once", fsdp(4), 2, settings=(*SPLIT_EXPERTS, *ONCE), **EXPERTS),
    Layout("FSDP2, apart", fsdp(2), 2, settings=APART, repeats=True),
    Layout("HSDP, apart", (*REPLICAS, *fsdp(2)), 2, settings=APART, repeats=True),
    Layout("PP interleaved x FSDP2, apart", (*pp(2), *fsdp(2)), settings=STAGES),
]


@each(LAYOUTS, "{0.name}")
def test_equals_one_process(layout: Layout, references, pool: Pool) -> None:
    same = ("documents", "blocks", "model", "overrides", "optimizer")
    reference = references.run(**{key: getattr(layout, key) for key in same})
    found = differences(pool.run(layout.ranks, train, layout), reference)
    assert max(found.values()) < BOUND, found


def groups_of_units(layout: Layout) -> list[tuple[list[int], bool, int]]:
    """Return the ranks of each group of reduce-scatters, whether all-gathers share it, and how many units use it."""
    degrees = dict(layout.degrees)
    of = build_step(job_of(layout), build_mesh("cpu", **degrees))
    found: dict[Any, tuple[list[int], bool, int]] = {}
    modules = [module for part in of.model_parts for module in part.modules()]
    for unit in dict.fromkeys(unit for module in modules for unit in parameter_groups(module)):
        group, shard = unit._reduce_scatter_process_group, unit.mesh_info.shard_process_group
        _, shared, units = found.get(group, ([], False, 0))
        ranks = dist.get_process_group_ranks(group)
        found[group] = (ranks, shared or group == shard, units + 1)
    return sorted(found.values())


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # The embedding, four blocks, and norm with output. Experts are a unit more in each block, over other ranks.
        (Layout("", (*REPLICAS, *fsdp(2)), settings=APART), [([0, 1], False, 6)]),
        (
            Layout("", fsdp(4), settings=SPLIT_EXPERTS, **EXPERTS),
            [([0, 1, 2, 3], False, 6), ([0, 2], False, 4)],
        ),
        # The two stages of a pipeline rank share a group: an embedding and two blocks. Without the key, all-gathers do too.
        (Layout("", (*pp(2), *fsdp(2)), settings=STAGES), [([0, 1], False, 3)]),
        (Layout("", (*pp(2), *fsdp(2)), settings=STAGES[1:]), [([0, 1], True, 3)]),
        # Experts that one rank holds are not reduced, and get no group.
        (
            Layout("", fsdp(2), settings=SPLIT_EXPERTS, **EXPERTS),
            [([0], True, 4), ([0, 1], False, 6)],
        ),
    ],
)
def test_units_of_the_same_ranks_share_a_group_for_reduce_scatters(
    layout: Layout, expected: list[tuple[list[int], bool, int]], pool: Pool
) -> None:
    # An older torch has no group of their own.
    old = torch.__version__.startswith(("2.11", "2.12"))
    expected = [(ranks, shared or old, units) for ranks, shared, units in expected]
    assert pool.run(layout.ranks, groups_of_units, layout)[0] == expected
