"""The first step of a pipeline: all stages compile at the same time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.parallel import build_mesh, extract_stages, pipeline
from titan.parallel.schedules import build_schedule

DENSE = {"flavor": "tiny", "overrides": {"n_layers": 4}}


def first_step(sections: dict[str, Any]) -> dict[str, Any]:
    """Train a step; return, in order, what ran on this rank, its loss and its gradient norm."""
    events: list[str] = []
    forward = pipeline.Stage.forward_one_chunk

    def microbatch(self: Any, number: int, *args: Any, **options: Any) -> Any:
        events.append(f"microbatch {number}")
        return forward(self, number, *args, **options)

    pipeline.Stage.forward_one_chunk = microbatch
    trainer = PoolTrainer(job(None, base=sections))
    try:
        for part in trainer.train_step.model_parts:
            for block in part.get_submodule("layers").children():
                block.register_forward_pre_hook(lambda *_: events.append("block"))
        trainer.train_one_step()
        numbers = [trainer.result.loss, trainer.result.grad_norm]
    finally:
        pipeline.Stage.forward_one_chunk = forward
        trainer.close()
    return {"events": events, "numbers": numbers}


def sections(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}
    return {
        "model": model,
        "parallelism": parallelism | changes.pop("parallelism", {}),
        "training": {"seq_len": 128, "local_batch_size": 4, "steps": 2, "dataset": "synthetic"},
        "checkpoint": {"enable": False},
        **changes,
    }


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_compile_before_the_first_exchange(schedule: str, pool: Pool) -> None:
    """Each before its first microbatch, for which later stages wait; and without a trace in the step."""
    layout = {"pipeline_parallel_schedule": schedule}
    eager = pool.run(2, first_step, sections(DENSE, parallelism=layout))
    compiled = {"enable": True, "backend": "eager"}
    for found, expected in zip(
        pool.run(2, first_step, sections(DENSE, parallelism=layout, compile=compiled)),
        eager,
        strict=True,
    ):
        events = found["events"]
        assert events.index("block") < events.index("microbatch 0")
        assert found["numbers"] == pytest.approx(expected["numbers"], rel=1e-6)
        assert torch.tensor(found["numbers"]).isfinite().all()


class Widened(nn.Module):
    """A model of two layers, whose first appends a further input to the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleDict({str(n): nn.Linear(8, 8) for n in range(2)})

    def forward(self, x_BSD: Tensor, more_BTD: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x_BSD = layer(x_BSD if name == "1" else torch.cat([x_BSD, more_BTD], 1))
        return x_BSD


def losses_by_length(lengths: list[int]) -> list[tuple[float, float]]:
    """Return a step's loss in a pipeline of two stages, and in one process, for each length of the further input."""
    torch.manual_seed(0)
    model, size = Widened(), {"num_ranks": 2, "num_stages": 2, "num_microbatches": 2}
    schedule = build_schedule("1F1B", **size)
    mesh = build_mesh("cpu", pp=2)["pp"]
    rank = mesh.get_local_rank()
    stages = extract_stages(model, [["layers.0"], ["layers.1"]], numbers=[rank])
    pipe = pipeline.Pipeline(
        stages,
        schedule=schedule,
        mesh=mesh,
        device=torch.device("cpu"),
        loss_fn=lambda output, _: output.square().sum(),
        boundary=lambda x, more: torch.empty(
            len(x), x.shape[1] + more["more_BTD"].shape[1], 8, device="meta"
        ),
    )
    found = []
    for length in lengths:
        x, more = torch.randn(4, 3, 8), torch.randn(4, length, 8)
        parts = pipe.step(x, torch.zeros(4, 1), more_BTD=more)
        expected = model(x, more).square().sum().item()
        found.append((sum(part.item() for part in parts) if rank else expected, expected))
    return found


def test_further_inputs_of_another_length_change_what_stages_send(pool: Pool) -> None:
    for found in pool.run(2, losses_by_length, [2, 5, 2]):
        for loss, expected in found:
            assert loss == pytest.approx(expected, rel=1e-5)
