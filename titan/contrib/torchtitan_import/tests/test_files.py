"""TorchTitan v0.2.2's files and commands, as files.toml lists them: what loads, what is refused, and that runs agree with one process.

TorchTitan's runner starts `torchrun ... --job.config_file base_config.toml --job.dump_folder OUT/NAME ARGUMENTS` in the root of its
repository, through a shell, one command of an entry after the other. Here a folder stands for that root: job files with a tiny
model, a tokenizer, text, and the CSV, at the places that the arguments name.
"""

from __future__ import annotations

import json
import os
import shlex
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import Pool
from tests.support.runs import logged_rows
from tests.support.trainers import PoolTrainer, run_to_end
from titan.checks.rules import load_to_run
from titan.config.errors import ConfigError
from titan.config.load import parse_args
from titan.config.toml import tomllib
from titan.contrib.torchtitan_import.differences import Differences, differences
from titan.tools.generate import main as generate
from titan.tools.tokenizer import main as tokenizer_main

TABLE = tomllib.loads(Path(__file__).with_name("files.toml").read_text())
RUN = [row for row in TABLE["entry"] if "refused" not in row]
BOUND = 1e-5  # relative, as in tests/parity
# The numbers of a step that a layout must not change.
NUMBERS = ("step", "tokens", "lr", "loss", "grad_norm", "validation_loss")
# What one process leaves out: how to parallelise, compile, recompute, read.
LEFT_OUT = (
    "parallelism.",
    "compile.",
    "activation_checkpoint.",
    "profiling.",
    "metrics.",
    "training.dataloader.",
    "optimizer.implementation",
)
Row = dict[str, Any]
Rows = list[dict[str, float]]


def name(row: Row) -> str:
    return row.get("name", row["commands"][0])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks, to these commands, like the root of TorchTitan's repository."""
    root = tmp_path_factory.mktemp("root")
    assets = root / "tests/assets"
    (assets / "c4_test").mkdir(parents=True)
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"))[:60]
    rows = [json.dumps({"text": source.read_text("utf-8")[:4000]}) for source in sources]
    (assets / "c4_test/data.json").write_text("\n".join(rows) + "\n")
    train = f"train --input {sources[0]} --vocab-size 300".split()
    assert tokenizer_main([*train, "--output", str(assets / "tokenizer")]) == 0
    for file, text in TABLE["files"].items():
        (root / file).write_text(text)
    return root


def words(row: Row) -> list[list[str]]:
    """The arguments of each command, as a shell passes them on."""
    files = [row.get("job", "base_config.toml")]
    if "job" not in row:
        files.append(row.get("overlay", "grouped.toml"))
    return [[*files, *shlex.split(command)] for command in row["commands"]]


@pytest.mark.parametrize("row", [*TABLE["key"], *TABLE["file"], *TABLE["entry"]], ids=name)
def test_loads_or_is_refused(row: Row, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    for argv in words(row):
        try:
            config, _ = load_to_run(argv, world_size=row.get("ranks", 4), warn=False)
        except ConfigError as error:
            keys = {problem.key for problem in error.problems}
            assert sorted(keys) == row.get("refused"), error
            continue
        assert "refused" not in row
        warnings = config.source_map.warnings
        found = [warning.partition(": ")[2] for warning in warnings]
        assert found == row.get("warns", found)
        for key, value in row.get("sets", {}).items():
            assert reduce(getattr, key.split("."), config) == value
        lines = differences(config)
        assert lines == row.get("differs", lines)
        assert Differences().facts(config, {})["differences"] == (lines if warnings else [])


def measured(root: Path, argv: list[str], folder: str, pool: Pool, ranks: int) -> Rows:
    """Run, and return the numbers of each step."""
    pool.run(ranks, train, root, [*argv, f"--job.dump_folder={folder}"])
    return [{n: row[n] for n in NUMBERS if n in row} for row in logged_rows(root / folder)]


def train(root: Path, argv: list[str]) -> None:
    """Run on one rank."""
    os.chdir(root)
    config, _ = load_to_run(argv, world_size=dist.get_world_size(), warn=False)
    trainer = PoolTrainer(config)
    run_to_end(trainer)


def alone(argv: list[str], ranks: int) -> list[str]:
    """The same training on one process: without the ways to run it, and with the same global batch."""
    config, layout = load_to_run(argv, world_size=ranks, warn=False)
    batch = config.training.local_batch_size * layout.dp * layout.accumulation
    kept = [o for o in parse_args(argv).overrides if not o.startswith(LEFT_OUT)]
    return [*argv[:2], *(f"--{o}" for o in kept), f"--training.global_batch_size={batch}"]


@pytest.fixture(scope="module")
def references() -> dict[str, list[Rows]]:
    """Measurements of one process, by its commands: most entries share theirs."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("entry", RUN, ids=name)
def test_agrees_with_one_process(
    entry: Row,
    root: Path,
    references: dict[str, list[Rows]],
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    commands, ranks = words(entry), entry.get("ranks", 4)
    folder = f"artifacts-to-be-uploaded/{entry['name']}"
    found = [measured(root, argv, folder, pool, ranks) for argv in commands]
    commands = [alone(argv, ranks) for argv in commands]
    key = str(commands)
    if key not in references:
        place = f"alone/{len(references)}"
        references[key] = [measured(root, argv, place, pool, 1) for argv in commands]
    expected = references[key]
    assert len(expected[-1]) >= 10 and expected[0][9]["loss"] < expected[0][0]["loss"]
    for rows, expected_rows in zip(found, expected, strict=True):
        assert rows == [pytest.approx(row, rel=BOUND) for row in expected_rows]
    # After it, TorchTitan's runner generates from the checkpoint.
    if entry["name"] == "test_generate":
        step = str(root / folder / "checkpoint/step-10")
        assert generate(["--checkpoint", step, "--prompt", "What is", "--device", "cpu"]) == 0
