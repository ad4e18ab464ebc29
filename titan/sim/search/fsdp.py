"""Search of `titan plan --only fsdp`: units, prefetch and kept blocks of FSDP, so that a job fits and takes the least time.

    fsdp_blocks_per_unit             1, 2, 3, 4 and 8
    fsdp_prefetch                    -1 (1 for experts, else 0) and 2
    fsdp_kept_blocks                 any number of units

Blocks that stay gathered only save time and only cost memory. So a simulation that keeps all of
them bounds the speed of all other choices with its units and prefetch, and bisection finds the most
blocks that fit. Units whose bound is no better than the best choice so far are left out. The result
equals that of an exhaustive search (tests/sim/test_plan_fsdp.py). The job as it is counts as a
choice, too.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from titan.checks.rules import check_to_run
from titan.config.schema import JobConfig
from titan.sim.report.text import say

from .command import show
from .point import Settings
from .variants import Search, Variant

UNITS, PREFETCH = (1, 2, 3, 4, 8), (-1, 2)
_KEY = "parallelism.fsdp_"


def settings(*, unit: int, prefetch: int, kept: int) -> Settings:
    """Return a choice as settings of a job.

    Args:
        unit: blocks of an FSDP unit.
        prefetch: units that are gathered ahead.
        kept: blocks that stay gathered.
    """
    return {
        _KEY + "blocks_per_unit": f"{unit}",
        # Not "never", even if all blocks stay: that keeps the embedding, too, which no backward
        # pass needs.
        _KEY + "reshard_after_forward": "always",
        _KEY + "kept_blocks": f"{kept}",
        _KEY + "prefetch": f"{prefetch}",
    }


Simulate: TypeAlias = Callable[[list[Settings]], list[Variant]]


def choose(
    simulate: Simulate, *, now: Variant, num_blocks: int, limit_gib: float
) -> Variant | None:
    """Return the fastest choice that needs at most `limit_gib`, or None.

    Args:
        simulate: simulates several choices at a time.
        now: the job as it is.
        num_blocks: blocks of a pipeline rank.
        limit_gib: memory that may be used, inside and outside of the allocator.
    """
    found: list[Variant] = []

    def fits(variant: Variant) -> bool:
        """Return whether a choice runs and fits, and note it if it does."""
        fitting = bool(variant.facts) and variant.needed_gib <= limit_gib
        found.extend([variant] if fitting else [])
        return fitting

    fits(now)
    ways = [(u, p) for u in UNITS if u <= num_blocks for p in PREFETCH]
    everything = simulate([settings(unit=u, prefetch=p, kept=num_blocks) for u, p in ways])
    # The fastest bound first: the choices found with it rule out most other bounds.
    order = sorted(range(len(ways)), key=lambda n: -everything[n].speed)
    for number in order:
        bound, (unit, prefetch) = everything[number], ways[number]
        if fits(bound) or bound.speed <= max((v.speed for v in found), default=0):
            continue
        # In units: `low` fit (0: none was tried), `high` do not.
        low, high = 0, -(-num_blocks // unit)
        while high - low > 1:
            middle = (low + high) // 2 if low else 1
            kept = settings(unit=unit, prefetch=prefetch, kept=middle * unit)
            low, high = (middle, high) if fits(simulate([kept])[0]) else (low, middle)
    return max(found, key=lambda v: (v.speed, -v.needed_gib), default=None)


def run(options: Namespace, search: Search, config: JobConfig) -> int:
    """Run `titan plan --only fsdp`. Return 1 if no choice fits."""
    check_to_run(config, world_size=search.world_size)
    # Without a limit the allocator never gives memory back, which would be slow and hide the job's
    # need.
    profile = search.profile
    roomy = profile.model_copy(update={"memory_gib": 2.0**20})
    simulate = replace(search, profile=roomy, what="choices simulated")
    [now] = simulate([{}])
    num_blocks = config.model.sizes.n_layers // config.parallelism.pipeline_parallel_degree
    limit_gib = profile.usable_gib
    best = choose(simulate, now=now, num_blocks=num_blocks, limit_gib=limit_gib)
    say("")
    if best is None:
        reason = now.problem or f"it needs {now.needed_gib:.1f} GiB as it is"
        where = f"{limit_gib:.1f} of {profile.memory_gib:g} GiB"
        print(f"no choice fits in {where}; {reason}", file=sys.stderr)
        return 1
    results = {"as it is": now, "fsdp": best}
    show(options, search, config, {"settings": best.settings}, results, best.settings)
    return 0
