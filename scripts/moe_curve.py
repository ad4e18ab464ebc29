"""Train a small mixture of experts and its dense twin of equal active parameters on the demo's text, and draw what came out.

    python scripts/moe_curve.py run        # one thread, one run after the other; runs that are done are left as they are
    python scripts/moe_curve.py draw       # docs/pictures/moe_curve.png, moe_loads.png, and the table of docs/moe.md

The twin has one feed-forward layer as wide as the experts that a token meets. Data, seed and schedule are the same in all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "outputs" / "moe_curve"
COMMON = [
    *("--model.name=qwen3", "--model.flavor=demo_moe", "--debug.seed=1"),
    *("--training.steps=200", "--training.local_batch_size=4", "--metrics.enable_tensorboard=false"),
    *("--validation.freq=40", "--validation.steps=8", "--checkpoint.enable=false"),
]


def coefficients(*, bias: float, loss: float) -> list[str]:
    """Return the settings of the two balance terms: the step of the routing bias, and the global-batch loss."""
    return [
        f"--model.overrides.load_balance_coeff={bias}",
        f"--model.overrides.global_balance_coeff={loss}",
    ]


RUNS = {
    "balanced": coefficients(bias=1e-2, loss=1e-2),
    "unbalanced": coefficients(bias=0.0, loss=0.0),
    "dense": ["--model.overrides.num_experts=0", "--model.overrides.ffn_dim=512"],
}


def run() -> None:
    for name, settings in RUNS.items():
        if (OUT / name / "status.json").exists():
            continue
        command = [sys.executable, "-m", "titan.cli", "train", "train_configs/demo.toml", *COMMON]
        command += [f"--job.dump_folder={OUT / name}", *settings]
        # One thread, so that it disturbs nobody and gives the same bits each time.
        subprocess.run(
            command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


if __name__ == "__main__":
    run()
