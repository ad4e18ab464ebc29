"""`titan average`: the mean of checkpoints, which the other tools read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.commands import Shell
from tests.support.runs import Run, saved_tensors
from tests.support.tables import tabled


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average") / "run"
    assert Run(folder, "--training.steps=3", "--checkpoint.interval=1").end() == 0
    return folder


def test_the_mean_is_that_of_a_formula_and_other_tools_read_it(
    run: Path, tmp_path: Path, shell: Shell
) -> None:
    steps = [run / "checkpoint" / f"step-{number}" for number in (1, 2, 3)]
    held = [saved_tensors(step) for step in steps]
    for name, arguments, weights in (
        ("equal", f"{run} --last 3".split(), (1, 1, 1)),
        ("weighted", [*map(str, steps), "--weights", "1,2,5"], (1, 2, 5)),
    ):
        out = tmp_path / name
        assert (
            "the mean of step-1, step-2, step-3"
            in shell("average", *arguments, f"--output={out}").out
        )
        mean = saved_tensors(out / "checkpoint" / "step-3")
        assert mean.keys() == {key for key in held[0] if key.startswith("model.")}
        for key, tensor in mean.items():
            of_steps = torch.stack([state[key].double() for state in held])
            shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
            expected = torch.einsum("s,s...->...", shares, of_steps)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-9)
        shell(f"generate --checkpoint={out} --max-new-tokens=2")
        shell(f"convert to-hf {out} {tmp_path / f'{name}-hf'}")


@tabled("arguments, message")
def test_mistakes_are_one_line(
    run: Path,
    tmp_path: Path,
    shell: Shell,
    arguments: list[str],
    message: str,
) -> None:
    error = shell.refuse(f"average {run} --output={tmp_path}/out", *arguments)
    assert message in error and error.count("\n") == 1
