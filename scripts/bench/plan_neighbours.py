"""Compare the planner with what anybody would try by hand, and the fit advisor with a smaller batch.

    python scripts/bench/plan_neighbours.py JOB WORLD_SIZE [--simulate 24 4] [--hardware h100-sxm]
    python scripts/bench/plan_neighbours.py JOB WORLD_SIZE --batch 16

The first prints plan-1 for each number of candidates, and each single change of recomputation, ZeRO and tensor parallelism, which
are written here as overrides of the job, and not asked of the planner. The second makes the job's local batch so large that it does
not fit, and compares what `titan check` advises with each smaller batch that keeps the global one. JOB: a name in train_configs/.
The exit code is 1 if anything by hand is faster.
"""

from __future__ import annotations

import argparse
import time

from titan.checks.rules import resolve_layout
from titan.config.load import load_from_argv
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.search.candidates import LayoutSearch
from titan.sim.search.fit_advisor import find_changes
from titan.sim.search.plan import plan
from titan.sim.search.variants import Variant, simulate_variants

BATCH = "training.local_batch_size"


def by_hand(
    job: list[str], settings: list[dict[str, str]], world_size: int, profile: Profile
) -> list[Variant]:
    """Return the variants of a job that fit, the fastest first; print all."""
    variants = simulate_variants(job, settings, world_size=world_size, profiles=[profile])
    for variant in variants:
        what = " ".join(
            f"{key.split('.')[-1]}={value}" for key, value in variant.settings.items()
        )
        speed = (
            f"{variant.speed:10,.0f}  {variant.memory} GiB" if variant.facts else "  cannot run"
        )
        print(f"  {speed:32}  {what} {variant.problem[:80]}", flush=True)
    return sorted((v for v in variants if v.fits), key=lambda v: -v.speed)


def compare_plans(
    job: list[str], world_size: int, profile: Profile, budgets: list[int]
) -> list[str]:
    """Return a row of the table for each budget."""
    config = load_from_argv(job)
    whole = LayoutSearch(job, config, profile, world_size=world_size).global_batch
    same = {"training.global_batch_size": str(whole)}
    modes = [{"activation_checkpoint.mode": mode} for mode in ("none", "selective", "full")]
    modes.append(modes[1] | {"activation_checkpoint.selective_ac_option": "2"})
    zeros = [{"parallelism.fsdp_reshard_after_forward": name} for name in ("always", "never")]
    tps = [{"parallelism.tensor_parallel_degree": str(tp)} for tp in (1, 2, 4, 8)]
    best, *_ = [
        *by_hand(job, [same | s for s in modes + zeros + tps], world_size, profile),
        None,
    ]
    rows = []
    for budget in budgets:
        start = time.monotonic()
        search = LayoutSearch(job, config, profile, world_size=world_size)
        found = plan(search, budget=budget)
        point, first = found.ranked[0]
        print(f"  plan-1 of {budget}: {first.speed:,.0f} {first.memory} GiB {point}")
        hand = best.speed if best else 0.0
        verdict = "yes" if first.speed >= hand * (1 - 1e-9) else "NO"
        rows.append(
            f"| {job[0].split('/')[-1]} | {world_size} | {budget} | {found.job.speed:,.0f} | {hand:,.0f} | {first.speed:,.0f} | "
            f"{verdict} | {time.monotonic() - start:.0f} |"
        )
    return rows


def compare_advice(job: list[str], world_size: int, profile: Profile, batch: int) -> list[str]:
    """Return the row of a job with a local batch that is too large."""
    job = [*job, f"--{BATCH}={batch}"]
    config = load_from_argv(job)
    layout = resolve_layout(config, world_size)
    whole = str(batch * layout.dp * layout.accumulation)
    sizes = [str(size) for size in range(1, batch) if batch % size == 0]
    settings = [{BATCH: size, "training.global_batch_size": whole} for size in sizes]
    best, *_ = [*by_hand(job, settings, world_size, profile), None]
    start = time.monotonic()
    first, *_ = [*find_changes(job, config, layout, profile), None]
    hand, advised = (variant.speed if variant else 0.0 for variant in (best, first))
    what = (
        " ".join(f"{k.split('.')[-1]}={v}" for k, v in first.settings.items()) if first else "-"
    )
    verdict = "yes" if advised >= hand * (1 - 1e-9) else "NO"
    return [
        f"| {job[0].split('/')[-1]}, batch {batch} | {world_size} | {hand:,.0f} | {advised:,.0f} | {what} | {verdict} | "
        f"{time.monotonic() - start:.0f} |"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("job")
    parser.add_argument("world_size", type=int)
    parser.add_argument("--simulate", type=int, nargs="+", default=[24, 4])
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--batch", type=int, default=0)
    options = parser.parse_known_args()
    known, rest = options
    job, profile = [f"train_configs/{known.job}.toml", *rest], load_profile(known.hardware)
    if known.batch:
        rows = compare_advice(job, known.world_size, profile, known.batch)
    else:
        rows = compare_plans(job, known.world_size, profile, known.simulate)
    print("\n".join(rows), flush=True)
    return int(any("| NO |" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
