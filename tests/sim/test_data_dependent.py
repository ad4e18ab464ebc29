"""A model whose shapes depend on data: the simulator says where, and the way out of docs/simulator.md works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.commands import finished

ROOT = Path(__file__).parents[2]
OPT = ROOT / "examples" / "opt_family"
FAMILY = """
import torch
from titan_opt import FLAVORS, TENSOR_PLAN, build_model as build_opt
from titan_opt.model import FeedForward

{choice}

class Routed(FeedForward):
    def forward(self, x):
        tokens = x.flatten(0, 1)
        rows = chosen(tokens[:, 0] > 0)
        return torch.zeros_like(tokens).index_add(0, rows, super().forward(tokens[rows])).view_as(x)

def build_model(config):
    model = build_opt(config)
    for block in model.layers.values():
        block.feed_forward = Routed(config)
    return model
"""
DEPENDENT = "def chosen(mask): return mask.nonzero().squeeze(1)"


def simulate(folder: Path, choice: str) -> subprocess.CompletedProcess[str]:
    metadata = folder / "routed-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: routed\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[titan.models]\nrouted = routed")
    (folder / "routed.py").write_text(FAMILY.format(choice=choice))
    job = f"{ROOT}/train_configs/debug_model.toml --model.name=routed".split()
    job += [
        "--model.flavor=tiny",
        "--training.seq_len=64",
        "--world-size=2",
        "--hardware=h100-sxm",
    ]
    command = [sys.executable, "-m", "titan.cli", "sim", *job, f"--json={folder}/sim.json"]
    path = os.pathsep.join(map(str, (folder, OPT, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder)}
    return finished(command, env=environment, cwd=folder, code=None)


def test_the_place_and_the_way_out_are_named(tmp_path: Path) -> None:
    result = simulate(tmp_path, DEPENDENT)
    # On a slow machine lines on the progress come first.
    [line] = [one for one in result.stderr.splitlines() if "cannot be traced" in one]
    assert result.stderr.endswith(f"{line}\n") and "Traceback" not in result.stderr
    assert result.returncode == 2 and "module layers.0.feed_forward" in line
    assert line.endswith('for fake tensors (docs/simulator.md, "Shapes that depend on data")')


def test_the_assumption_of_the_docs_is_simulated(tmp_path: Path) -> None:
    page = (
        (ROOT / "docs" / "simulator.md").read_text().split("## Shapes that depend on data")[1]
    )
    match = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert match
    result = simulate(tmp_path, match[1])
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "sim.json").read_text())["step_time_s"] > 0
