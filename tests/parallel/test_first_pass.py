"""What a pipeline does before and in its first step: no pass over zeros, and all stages compile at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.parallel import pipeline
from titan.parallel.expert import Exchange

MOE = {"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 4}}
DENSE = {"flavor": "tiny", "overrides": {"n_layers": 4}}


def first_step(sections: dict[str, Any]) -> dict[str, Any]:
    """Train a step; return, in order, what ran on this rank, the rows that came to its experts, its loss and its gradient norm."""
    events: list[str] = []
    rows: list[int] = []
    forward, counts = pipeline._Stage.forward_one_chunk, Exchange._exchange_counts

    def exchanged(self: Any, *args: Any) -> Any:
        found = counts(self, *args)
        rows.append(sum(found[2]))
        return found

    def microbatch(self: Any, number: int, *args: Any, **options: Any) -> Any:
        events.append(f"microbatch {number}")
        return forward(self, number, *args, **options)

    pipeline._Stage.forward_one_chunk = microbatch
    Exchange._exchange_counts = exchanged
    ask = dist.recv_object_list
    dist.recv_object_list = lambda *a, **k: (events.append("asked"), ask(*a, **k))[1]
    trainer = PoolTrainer(job(None, base=sections))
    try:
        for part in trainer.train_step.model_parts:
            for block in part.get_submodule("layers").children():
                block.register_forward_pre_hook(lambda *_: events.append("block"))
        trainer.train_one_step()
        numbers = [trainer.result.loss, trainer.result.grad_norm]
    finally:
        pipeline._Stage.forward_one_chunk, Exchange._exchange_counts = forward, counts
        dist.recv_object_list = ask
        trainer.close()
    return {"events": events, "rows": rows, "numbers": numbers}


def sections(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}
    return {
        "model": model,
        "parallelism": parallelism | changes.pop("parallelism", {}),
        "training": {"seq_len": 128, "local_batch_size": 4, "steps": 2, "dataset": "synthetic"},
        "checkpoint": {"enable": False},
        **changes,
    }


def test_experts_get_their_share_from_the_first_microbatch_on(pool: Pool) -> None:
    """In a pass over zeros all tokens have the same experts, and a rank would get all rows."""
    for found in pool.run(4, first_step, sections(MOE, parallelism={"expert_parallel_degree": 2})):
        assert found["events"].index("block") > found["events"].index("microbatch 0")
        mean = sum(found["rows"]) / len(found["rows"])
        assert 0.6 * mean < found["rows"][0] < 1.4 * mean, found["rows"]


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
        assert events.index("block") < events.index("microbatch 0") and "asked" not in events
        assert found["numbers"] == pytest.approx(expected["numbers"], rel=1e-6)
        assert torch.tensor(found["numbers"]).isfinite().all()
