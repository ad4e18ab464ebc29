"""Compare the layout that `parallelism.layout = "auto"` chooses with the best of a full `titan plan`, on jobs of train_configs/.

    python scripts/bench/auto_layouts.py llama3_8b:16 qwen3_30b_a3b:16 [--simulate 24] [--hardware h100-sxm] [--section.key=value ...]

The plan is of the job as it is. "auto" gets the job without its degrees and without its recomputation, and with its global batch. One
row for each job: the speeds by simulation, in tokens/s/GPU, and their ratio. The exit code is 1 if a ratio is below 95%.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from titan.config.load import load_from_argv
from titan.config.toml import format_value, read_toml
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.search.auto import choose
from titan.sim.search.candidates import LayoutSearch
from titan.sim.search.plan import plan
from titan.sim.search.variants import simulate_variants


def left_open(job: Path, folder: Path, sequences: int) -> Path:
    """Write a job without degrees and recomputation into a folder, and return its path."""
    data = read_toml(job)[0]
    data.pop("activation_checkpoint", None)
    kept = {k: v for k, v in data.get("parallelism", {}).items() if "degree" not in k}
    kept = {k: v for k, v in kept.items() if not k.startswith(("pipeline_", "fsdp_reshard"))}
    data["parallelism"] = kept | {"layout": "auto"}
    data["training"] |= {"global_batch_size": sequences}
    # Lists of tables come before the first section.
    sections = sorted(data.items(), key=lambda item: isinstance(item[1], dict))
    lines: list[str] = []
    for name, value in sections:
        if not isinstance(value, dict):
            lines.append(f"{name} = {format_value(value)}")
            continue
        lines += [
            f"[{name}]",
            *(f"{key} = {format_value(inner)}" for key, inner in value.items()),
        ]
    path = folder / job.name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def compare(name: str, ranks: int, more: list[str], profile: Profile, budget: int) -> tuple[str, float]:  # fmt: skip
    """Return the row of a job, and the ratio of the two speeds."""
    job = Path(f"train_configs/{name}.toml")
    argv = [str(job), *more]
    search = LayoutSearch(argv, load_from_argv(argv), profile, world_size=ranks)
    with tempfile.TemporaryDirectory() as folder:
        words = [str(left_open(job, Path(folder), search.global_batch)), *more]
        start = time.monotonic()
        config = load_from_argv(words)
        choice = choose(words, config, profile, world_size=ranks, simulate=True)
        wall_s = time.monotonic() - start
        # Models that the formula alone decides are simulated here.
        (chosen,) = simulate_variants(
            words, [choice.settings], world_size=ranks, profiles=[profile]
        )
    start = time.monotonic()
    found = plan(search, budget=budget)
    plan_s = time.monotonic() - start
    point, best = found.ranked[0]
    share = chosen.speed * chosen.fits / max(best.speed, chosen.speed * chosen.fits)
    about = choice.settings["parallelism.layout_reason"].partition(": ")[0]
    where = f"{name}, {' '.join(more)}" if more else name
    row = (
        f"| {where} | {ranks} | {search.global_batch:,} | {about} | {chosen.speed:,.0f} | {point}, ZeRO-{point.zero}, batch {point.batch}, "
        f"AC {point.recompute} | {best.speed:,.0f} | {share:.1%} | {wall_s:.0f} | {len(search.seen)} in {plan_s:.0f} |"
    )
    return row, share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("jobs", nargs="+", metavar="NAME:RANKS")
    parser.add_argument("--simulate", type=int, default=24)
    parser.add_argument("--hardware", default="h100-sxm")
    options, more = parser.parse_known_args()
    profile, shares = load_profile(options.hardware), []
    for text in options.jobs:
        name, _, ranks = text.partition(":")
        row, share = compare(name, int(ranks), more, profile, options.simulate)
        shares.append(share)
        print(row, flush=True)
    return int(min(shares) < 0.95)


if __name__ == "__main__":
    raise SystemExit(main())
