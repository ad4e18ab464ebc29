"""Runs compiled by inductor in fresh processes, as users start them: every way of recomputing, dense and with experts.

The layouts of test_parity.py and test_moe.py run in warm processes, mostly with a backend that writes no kernels. What only
Inductor's own programs do, or only the first compilation of a process, shows here alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.jobs import ROOT
from tests.support.runs import logged_rows

FAMILIES = {"dense": ("llama3", "tiny"), "experts": ("qwen3", "tiny_moe")}
LAYOUTS = {
    "one rank": ["--nproc=1"],
    "FSDP 2": ["--nproc=2"],
    "EP 2": ["--nproc=2", "--parallelism.expert_parallel_degree=2"],
}
MODES = {
    "none": [],
    "op": ["--activation_checkpoint.mode=selective"],
    "full": ["--activation_checkpoint.mode=full"],
    "every 2": [
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=2",
    ],
}
CELLS = [
    cell
    for cell in product(FAMILIES, MODES, LAYOUTS)
    if cell[0] == "experts" or cell[2] != "EP 2"
]
# Those that failed when each technique and each pair passed.
QUICK = [("experts", "op", "EP 2"), ("experts", "full", "one rank")]
Start = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return what trains three steps in bf16 in new processes, and gives the rows that they log."""
    # One cache for all runs: a program of an earlier run comes from it, as after a restart.
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    known: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def train(family: str, layout: str, *settings: str) -> list[dict[str, Any]]:
        key = (family, layout, *settings)
        if key not in known:
            folder = tmp_path_factory.mktemp("run")
            known[key] = _train(
                folder, FAMILIES[family], [*LAYOUTS[layout], *settings], variables
            )
        return known[key]

    return train


def _train(
    folder: Path, model: tuple[str, str], settings: list[str], variables: dict[str, str]
) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "titan.cli", "train", "train_configs/debug_model.toml"]
    command += [f"--job.dump_folder={folder}", "--checkpoint.enable=false", *settings]
    command += [f"--model.name={model[0]}", f"--model.flavor={model[1]}"]
    command += ["--model.overrides.n_layers=2", "--training.dataset=synthetic"]
    command += ["--training.seq_len=32", "--training.local_batch_size=2", "--training.steps=3"]
    command += ["--training.mixed_precision_param=bfloat16"]
    done = finished(command, cwd=ROOT, env=variables)
    # With every second block wrapped, FSDP's type is the wrapper's in one block and the block's in the next: two programs.
    alike = not any("selective_ac_option" in setting for setting in settings)
    assert not alike or "recompiled" not in done.stdout, done.stdout
    assert "graph break" not in done.stdout, done.stdout
    return logged_rows(folder)


@pytest.mark.parametrize(
    ("family", "mode", "layout"),
    [
        pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow, id=", ".join(c))
        for c in CELLS
    ],
)
def test_equals_the_uncompiled_run(family: str, mode: str, layout: str, start: Start) -> None:
    expected = start(family, layout)
    rows = start(family, layout, "--compile.enable=true", *MODES[mode])
    assert len(rows) == len(expected) == 3
    for row, other in zip(rows, expected, strict=True):
        # bf16 rounds to 8 bits, and a compiler rounds elsewhere than single operations do.
        assert row["loss"] == pytest.approx(other["loss"], rel=2**-10)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=2**-6)


@pytest.mark.slow
def test_programs_from_the_cache_are_kept_too(start: Start) -> None:
    settings = ["--compile.enable=true", *MODES["op"]]
    first = start("experts", "one rank", *settings)
    again = start("experts", "one rank", *settings, "--job.description=again")
    assert [row["loss"] for row in again] == [row["loss"] for row in first]
