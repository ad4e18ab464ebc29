"""A user's task whose loss knows nothing of layouts: it gets whole logits on each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.base.untrusted import InputError
from titan.data.base import Samples, TensorBatch
from titan.data.order import derive_key
from titan.models.llama3 import build_model
from titan.parallel import axis_rank, build_mesh, initialize
from titan.step.parallelize import default_dtype
from titan.tasks.base import Microbatch, Task
from titan.tasks.next_token import NextToken
from titan.tasks.trial import try_loss

CPU, LENGTH, BATCH = torch.device("cpu"), 16, 4


@dataclass(frozen=True, kw_only=True)
class Numbers(TensorBatch):
    ALONG_SEQUENCE = ("tokens_BS", "labels_BS")

    tokens_BS: Tensor
    labels_BS: Tensor


class Sums(Task):
    """Predict the sum of all numbers up to a place, with torch's cross entropy."""

    def dataset(self, split: str, *, rank: int, world: int) -> Samples: ...  # not needed here

    def collate(self, samples: Samples) -> Any: ...

    def describe(self) -> str:
        return "sums of drawn numbers"

    def fake_batch(self) -> Numbers:
        numbers = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        return Numbers(tokens_BS=numbers, labels_BS=numbers)

    def microbatch(self, batch: Numbers) -> Microbatch:
        count = torch.tensor(batch.labels_BS.numel())
        return Microbatch(batch.tokens_BS, batch.labels_BS, count)

    def loss(
        self, mesh: Any, *, output: Any, float8: Any
    ) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, labels: F.cross_entropy(
            out.flatten(0, 1).float(), labels.flatten(), reduction="sum"
        )


def drawn(first: int, count: int) -> Numbers:
    rows = [
        np.random.Generator(np.random.Philox(key=derive_key("sums", n))).integers(
            100, size=LENGTH
        )
        for n in range(first, first + count)
    ]
    tokens = torch.from_numpy(np.stack(rows))
    return Numbers(tokens_BS=tokens, labels_BS=tokens.cumsum(1) % 100)


def sums_job(**parallelism: Any) -> Any:
    training = {"seq_len": LENGTH, "mixed_precision_param": "float32"}
    training["local_batch_size"] = BATCH // parallelism.get("data_parallel_shard_degree", 1)
    return job(
        training=training, parallelism=parallelism, model={"name": "llama3", "flavor": "tiny"}
    )


def first_loss(degrees: dict[str, int]) -> float:
    names = {
        "tp": "tensor",
        "pp": "pipeline",
        "cp": "context",
        "dp_shard": "data_parallel_shard",
    }
    keys = {"dp_shard": "data_parallel_shard_degree"}
    settings = {keys.get(a, f"{names[a]}_parallel_degree"): n for a, n in degrees.items()}
    config = sums_job(**settings)
    mesh = build_mesh("cpu", **degrees)
    step = build_step(config, mesh, task=Sums(config))
    count = BATCH // degrees.get("dp_shard", 1)
    return step.train([drawn(axis_rank(mesh, "dp_shard") * count, count)], step=1).loss.item()


def test_the_first_loss_is_that_of_whole_logits(pool: Pool) -> None:
    config = sums_job()
    with default_dtype(torch.float32):
        model = build_model(config.model.sizes)
    initialize(model, seed=config.debug.seed, std_of=model.init_std)
    batch = drawn(0, BATCH)
    with torch.no_grad():
        logits = model(batch.tokens_BS)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten()).item()
    for degrees in ({}, {"tp": 2}, {"dp_shard": 2}, {"pp": 2}, {"cp": 2}):
        world = 2 if degrees else 1
        assert pool.run(world, first_loss, degrees) == pytest.approx(
            [expected] * world, rel=1e-5
        ), degrees


def test_a_class_with_another_loss_says_again_what_it_takes() -> None:
    class Smoothed(NextToken):
        def loss(self, mesh: Any, *, output: Any, float8: Any) -> Any: ...

    class Same(NextToken): ...

    assert not Smoothed.loss_can("applies_output")
    assert Same.loss_can("applies_output") and Same.loss_can("knows_shards")


def fails(*_: Any) -> Tensor:
    raise TypeError("no such thing")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
            "return a sum, since titan",
        ),
        (lambda out, y: out.sum(-1), r"torch.Size\(\[1, 16\]\), not a scalar"),
        (lambda out, y: out.sum().item(), "float, not a scalar"),
        (lambda out, y: out.detach().sum(), "has no gradient"),
        (lambda out, y: out.sum() / 0, "is not finite"),
        (fails, "TypeError: no such thing"),
    ],
)
def test_a_loss_is_tried_before_the_run(loss: Any, message: str) -> None:
    mesh: Any = None
    task = Sums(sums_job())
    task.loss = lambda *_, **__: loss
    with pytest.raises(InputError, match=f"the loss of Sums .*{message}"):
        try_loss(task, mesh, CPU)
    try_loss(Sums(sums_job()), mesh, CPU)
