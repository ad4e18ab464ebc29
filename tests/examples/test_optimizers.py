"""The optimizers of examples/optimizers: their formulas, the same numbers on two layouts, and a resume on another one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import finished
from tests.support.metadata import write_metadata
from tests.support.runs import logged_rows, saved_tensors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "optimizers"
spec = importlib.util.spec_from_file_location(
    "titan_optimizer_steps", FOLDER / "titan_optimizer_steps.py"
)
assert spec is not None and spec.loader is not None
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
JOB = """
[job]
dump_folder = "{folder}"
[model]
name = "llama3"
flavor = "tiny"
overrides = {{ n_layers = 2 }}
[tokenizer]
name = "bytes"
[optimizer]
name = "{name}"
lr = 1e-3
{eps}
[lr_scheduler]
warmup_steps = 2
[training]
dataset = "synthetic"
seq_len = 32
steps = 6
local_batch_size = 4
global_batch_size = 8
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 3
[validation]
enable = true
dataset = "synthetic"
freq = 2
steps = 1
"""
NAMES = ("Lion", "ScheduleFree", "SOAP")


def train(folder: Path, path: Path, name: str, *settings: str) -> list[dict[str, float]]:
    """Train with the package installed; return the rows of metrics."""
    job = folder.with_suffix(".toml")
    # A rounding error must not be a step: the default of 1e-8 makes one of a gradient of zero.
    eps = "eps = 1e-4" if name != "Lion" else ""
    job.write_text(JOB.format(folder=folder, name=name, eps=eps))
    command = [sys.executable, *f"-m titan.cli train {job}".split()]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, FOLDER, ROOT)))}
    finished([*command, *settings], cwd=ROOT, env=variables)
    return logged_rows(folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with what pip would leave of the package's metadata."""
    write_metadata(FOLDER, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process_and_resumes_on_another_layout(name: str, path: Path) -> None:
    # Each data-parallel rank validates on as many batches.
    alone = train(path / "alone", path, name, "--validation.steps=2")
    sharded = train(path / "sharded", path, name, "--nproc=2")
    # The last three steps again, with tensor parallelism, from the checkpoint of the sharded run.
    shutil.copytree(path / "sharded/checkpoint/step-3", path / "again/checkpoint/step-3")
    again = train(
        path / "again",
        path,
        name,
        "--nproc=2",
        "--parallelism.tensor_parallel_degree=2",
        "--validation.steps=2",
    )
    for key in ("loss", "grad_norm", "validation_loss"):
        for run in (sharded, again):
            found = {row["step"]: row[key] for row in run if key in row}
            expected = {row["step"]: row[key] for row in alone[-len(run) :] if key in row}
            assert found == pytest.approx(expected, rel=1e-5), key
    one = saved_tensors(path / "alone" / "checkpoint" / "step-6")
    for run in ("sharded", "again"):
        other = saved_tensors(path / run / "checkpoint" / "step-6")
        assert other.keys() == one.keys()
        for key in one:
            if key.startswith("model."):
                assert (one[key] - other[key]).norm() <= 1e-5 * one[key].norm(), (run, key)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(6.0).view(2, 3))


def test_lion_moves_by_signs() -> None:
    p = weight()
    optimizer = steps.Lion([p], betas=(0.9, 0.99))
    optimizer.param_groups[0] |= {"lr": 0.1, "weight_decay": 0.5}
    p.grad = torch.tensor([[1.0, -2, 0], [3, 0, -1]])
    optimizer.step()
    expected = torch.arange(6.0).view(2, 3) * 0.95 - 0.1 * p.grad.sign()
    torch.testing.assert_close(p.detach(), expected)
    torch.testing.assert_close(optimizer.state[p]["momentum"], 0.01 * p.grad)


def test_schedule_free_keeps_an_average_of_its_points() -> None:
    """With one rate, x is the plain mean of z after each step, and y lies between them."""
    p, generator = weight(), torch.Generator().manual_seed(0)
    optimizer = steps.ScheduleFree([p], betas=(0.9, 0.999), eps=1e-8)
    points = []
    for _ in range(4):
        p.grad = torch.randn(2, 3, generator=generator)
        optimizer.step()
        points.append(optimizer.state[p]["z"].clone())
    mean, y = torch.stack(points).mean(0), p.detach().clone()
    torch.testing.assert_close(y, 0.1 * points[-1] + 0.9 * mean)
    optimizer.eval()
    torch.testing.assert_close(p.detach(), mean)
    optimizer.train()
    assert torch.equal(p.detach(), y)


def test_soap_is_adam_in_a_rotated_basis() -> None:
    """Without factors it is AdamW; with them, the step turns as the gradients do."""

    def trained(turn: torch.Tensor | None, max_dim: int) -> torch.Tensor:
        p, generator = torch.nn.Parameter(torch.zeros(3, 3)), torch.Generator().manual_seed(0)
        optimizer = steps.SOAP([p], betas=(0.9, 0.95), eps=1e-8, basis_freq=1, max_dim=max_dim)
        for _ in range(5):
            grad = torch.randn(3, 3, generator=generator)
            p.grad = grad if turn is None else turn @ grad
            optimizer.step()
        return p.detach()

    plain, generator = torch.nn.Parameter(torch.zeros(3, 3)), torch.Generator().manual_seed(0)
    adam = torch.optim.AdamW([plain], lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    for number in range(5):
        plain.grad = torch.randn(3, 3, generator=generator)
        if number:  # SOAP's first step only finds the basis
            adam.step()
    torch.testing.assert_close(trained(None, max_dim=2), plain.detach())
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
    turned = trained(turn, max_dim=3)
    torch.testing.assert_close(turned, turn @ trained(None, max_dim=3), rtol=1e-3, atol=1e-6)
    assert not torch.allclose(
        trained(turn, max_dim=2), turn @ trained(None, max_dim=2), rtol=1e-2
    )
