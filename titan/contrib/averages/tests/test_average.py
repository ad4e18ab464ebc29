"""The average of the weights: its formula on every layout, validation with it, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.layouts import REPLICAS, Layout, cp, fsdp, job_of, pp, text_batch, tp
from tests.support.ranks import Pool
from tests.support.steps import build_step
from tests.support.trainers import PoolTrainer
from titan.config.schema import JobConfig
from titan.contrib.averages.average import WeightAverage
from titan.contrib.averages.section import AverageSection
from titan.numerics.digests import whole
from titan.parallel import build_mesh
from titan.parallel.mesh import axis_rank, axis_size
from titan.step.train_step import TrainStep

AVERAGE = {"enable": True, "decay": 0.4, "start_step": 2}
STEPS = 5


def mine(layout: Layout, of: TrainStep, step: int) -> Any:
    world, rank = (f(of.mesh, "dp_replicate", "dp_shard") for f in (axis_size, axis_rank))
    return text_batch(layout, step).map(lambda _, t: t.chunk(world)[rank])


def train(layout: Layout, precision: str) -> tuple[list[float], list[float], float]:
    """Return the losses of steps, those of the average after them, and how far it is from the formula."""
    mesh, results = build_mesh("cpu", **dict(layout.degrees)), []
    for enable in (True, False):
        section = AverageSection.model_validate(AVERAGE | {"enable": enable})
        config = job_of(layout, precision=precision, steps=STEPS)
        config = config.model_copy(update={"average": section})
        of = build_step(config, mesh)
        losses, validated, expected, apart = [], [], {}, 0.0
        for step in range(1, STEPS + 1):
            # The second time step 4 has no update.
            accept: Any = lambda *_, step=step: step != 4  # noqa: E731
            losses.append(
                of.train([mine(layout, of, step)], step=step, accept=accept).loss.item()
            )
            if of.average is None:
                continue
            assert isinstance(of.average, WeightAverage)
            share = {3: 1 - 2 / 11, 5: 1 - min(0.4, 4 / 13)}.get(
                step, 0.0 if step == 4 else 1.0
            )
            for name, parameter in of.average.parameters.items():
                value = whole(parameter).double()
                old = expected.get(name, value)
                expected[name] = old + share * (value - old)
                average = whole(of.average.tensors[name]).double()
                # In units of fp32's rounding, which five steps make.
                errors = (average - expected[name]).abs() / expected[name].abs().clamp(min=1)
                apart = max(apart, errors.max().item() * 2**24)
            # Evaluated as the weights would be, were they the average; and nothing is left of it in the next step.
            of.evaluate([mine(layout, of, 99)])
            with of.average.in_place():
                assert all(
                    torch.equal(whole(p), whole(of.average.tensors[n]))
                    for n, p in of.average.parameters.items()
                )
                validated.append(of.evaluate([mine(layout, of, 99)])[0].item())
        results.append((losses, validated, apart))
    assert results[0][0] == results[1][0]
    return results[0]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[float]:
    [(_, validated, _)] = pool.run(1, train, Layout("one process"), "float32")
    assert len({*validated}) == STEPS - 1  # all but the step that is not accepted differ
    return validated


@pytest.mark.parametrize(
    "degrees",
    [
        fsdp(2),
        *(
            pytest.param(degrees, marks=pytest.mark.slow)
            for degrees in ((), tp(2), cp(2), pp(2), REPLICAS, (*REPLICAS, *fsdp(2)))
        ),
    ],
    ids=str,
)
def test_the_average_is_that_of_the_formula(
    degrees: Any, pool: Pool, alone: list[float]
) -> None:
    layout = Layout("", degrees)
    for _, validated, apart in pool.run(layout.ranks, train, layout, "float32"):
        assert apart < STEPS
        assert validated == pytest.approx(alone, rel=1e-5)


def test_a_single_rank_that_casts_its_weights_uses_the_average(pool: Pool) -> None:
    [(_, validated, apart)] = pool.run(1, train, Layout(""), "bfloat16")
    assert len({*validated}) == STEPS - 1 and apart < STEPS


def trainer(layout: Layout, folder: str, steps: int, **sections: Any) -> PoolTrainer:
    config = job_of(layout, steps=steps).model_dump()
    config["job"]["dump_folder"] = folder
    config["training"]["dataset"] = "synthetic"
    config["checkpoint"] = {"interval": 3}
    return PoolTrainer(JobConfig.model_validate(config | {"average": AVERAGE} | sections))


def run(layout: Layout, folder: str, steps: int) -> dict[str, Tensor]:
    """Return the average of a run that resumes if it can."""
    of = trainer(layout, folder, steps)
    assert of.run() == 0
    average = of.train_step.average
    of.close()
    assert average is not None
    return {name: whole(tensor) for name, tensor in average.tensors.items()}


def test_a_checkpoint_holds_it_for_any_layout(pool: Pool, tmp_path: Path) -> None:
    one, sharded, split = (
        Layout("", degrees, documents=False) for degrees in ((), fsdp(2), tp(2))
    )
    expected = pool.run(2, run, sharded, str(tmp_path), 3)[0]
    for layout in (one, split):  # nothing is left to do: loaded, to the bit
        for found in pool.run(layout.ranks, run, layout, str(tmp_path), 3):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    resumed = pool.run(2, run, sharded, str(tmp_path), 6)[0]
    through = pool.run(2, run, sharded, str(tmp_path / "through"), 6)[0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in through.items())
    assert any((through[name] != tensor).any() for name, tensor in expected.items())
