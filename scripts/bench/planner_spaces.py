"""Simulate all layouts of two small spaces, ten minutes on two cores: `python scripts/bench/planner_spaces.py`.

It writes tests/sim/planner_spaces.json, with which tests/sim/test_planner_spaces.py compares what plan and auto find.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan.config.load import load_from_argv
from titan.sim.price.profiles import load_profile
from titan.sim.search.candidates import LayoutSearch

FILE = Path(__file__).parents[2] / "tests" / "sim" / "planner_spaces.json"
HELD = [
    "parallelism.context_parallel_degree",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.pipeline_parallel_degree",
]
EAGER = ["--compile.enable=false", "--training.local_batch_size=1"]
# Job, ranks, hardware, and the largest degree of tensor parallelism.
SPACES: dict[str, tuple[list[str], int, str, int]] = {
    "1B on 8 A100": (
        ["train_configs/llama3_1b.toml", *EAGER, "--training.global_batch_size=16"],
        8,
        "a100-80g",
        2,
    ),
    "8B on 16 H100": (
        [
            "train_configs/llama3_8b.toml",
            *EAGER,
            "--training.global_batch_size=32",
            "--parallelism.data_parallel_shard_degree=-1",
        ],
        16,
        "h100-sxm",
        2,
    ),
}


def enumerated(name: str) -> dict[str, Any]:
    """Return a space with the simulation of each of its layouts."""
    job, world, hardware, most = SPACES[name]
    search = LayoutSearch(
        job, load_from_argv(job), load_profile(hardware), world_size=world, held=HELD
    )
    points = [p for p in search.points if p.tp <= most and search.legal(p)]
    variants = search(map(search.settings, points))
    rows = [
        {
            "point": asdict(point),
            "speed": round(variant.speed, 1),
            "needed_gib": round(variant.needed_gib, 3),
            "fits": variant.fits,
            "tight": variant.is_tight,
        }
        for point, variant in zip(points, variants, strict=True)
    ]
    return {"job": job, "world": world, "hardware": hardware, "held": HELD, "rows": rows}


def main() -> None:
    spaces = {name: enumerated(name) for name in SPACES}
    FILE.write_text(json.dumps(spaces, indent=None) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
