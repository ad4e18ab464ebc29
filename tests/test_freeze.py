"""model.freeze: weights that stay, what is saved of them, what they save, and mistakes. tests/parity has its layouts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sim.test_trace_jobs import left_behind, trace_of
from tests.support import traces
from tests.support.jobs import job as any_job
from tests.support.runs import numbers
from tests.support.trainers import Trainer
from tests.test_trainer import BASE, run
from titan.base.untrusted import InputError
from titan.checkpoint.manager import CheckpointError
from titan.sim.record.trace import Allocate

FROZEN = ["tok_embeddings.*", "layers.0.*", "layers.*.attention.wv.weight"]


def job(folder: Path, *, freeze: list[str] = FROZEN, **sections: Any) -> Any:
    return any_job(folder, base=BASE, model={"freeze": freeze}, **sections)


def test_frozen_weights_stay_and_a_resume_is_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer = Trainer(job(whole))
    model = trainer.train_step.model_parts[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.run()
    stayed = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    state = trainer.train_step.optimizer.state
    trainer.close()
    assert stayed == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert (
        "layers.0.feed_forward.w1.weight" in stayed and "layers.1.attention.wv.weight" in stayed
    )
    assert len(state) == len(before) - len(stayed)
    run(job(parts, training={"steps": 5}))
    run(job(parts))
    assert numbers(parts) == numbers(whole)


def test_thawed_weights_need_an_optimizer_that_knows_them(tmp_path: Path) -> None:
    run(job(tmp_path, training={"steps": 5}))
    with pytest.raises(
        CheckpointError, match=r"lacks optimizer\.tok_emb.*other parameters frozen"
    ):
        run(job(tmp_path, freeze=[]))
    dist.destroy_process_group()
    # More may be frozen, and weights alone are enough for a new run.
    run(job(tmp_path, freeze=[*FROZEN, "output.weight"]))
    start = {"initial_load_path": str(tmp_path / "checkpoint/step-5")}
    run(job(tmp_path / "next", freeze=[], checkpoint=start))


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (
            ["tok_embedding.weight"],
            'matches "tok_embedding.weight"; near it are tok_embeddings',
        ),
        (["*"], "every parameter matches"),
    ],
)
def test_mistakes(freeze: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"model.freeze: .*{message}"):
        run(job(tmp_path, freeze=freeze))
    dist.destroy_process_group()


def test_the_start_says_how_many_are_frozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(job(tmp_path))
    frozen = sum(p.numel() for p in trainer.train_step.model_parts[0].parameters() if not p.requires_grad)  # fmt: skip
    trainer.close()
    assert frozen and re.search(rf"frozen +{frozen:,} parameters\n", capsys.readouterr().out)


def test_the_simulator_counts_no_gradients_and_states_of_them() -> None:
    """Compared with the sizes of the frozen matrices, on two ranks."""
    model = {"freeze": ["tok_embeddings.*", "layers.0.*"]}
    whole, frozen = (trace_of(traces.job(model=m), world=2) for m in ({}, model))
    sizes = traces.job().model.sizes
    block = (sizes.num_params - 2 * sizes.vocab_size * sizes.dim - sizes.dim) // sizes.n_layers
    saved = 4 * (block + sizes.vocab_size * sizes.dim) // 2

    def gradients(trace: Any) -> int:
        made = [e for e in trace.step if isinstance(e, Allocate)]
        return sum(e.size_bytes for e in made if e.category == "gradients")

    def left(trace: Any) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for event in left_behind(trace):
            sizes[event.category] += event.size_bytes
        return sizes

    assert gradients(whole) - gradients(frozen) == saved
    states = left(whole)["optimizer"] - left(frozen)["optimizer"]
    assert states == pytest.approx(2 * saved, rel=0.001)  # and the numbers of steps
    assert left(whole)["parameters"] == left(frozen)["parameters"]
