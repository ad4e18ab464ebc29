"""A model that was pretrained in float8 is fine-tuned without it, and the other way round."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.jobs import job
from tests.support.runs import logged_rows, saved_tensors
from tests.support.trainers import Trainer, run_to_end
from titan.config.schema import JobConfig
from titan.models.llama3 import FLAVORS, build_model
from titan.parallel.init_weights import canonical_name

pytest.importorskip("torchao")

PRETRAINED, TUNED = 4, 5  # steps


def config(folder: Path, recipe: str, *, steps: int, start: Path | None = None) -> JobConfig:
    """Return a job in float8 if there is a recipe. start: the step whose weights it begins with."""
    float8 = {"emulate": True, "recipe_name": recipe or None, "filter_fqns": ["output"]}
    sections: dict[str, Any] = {
        "model": {
            "flavor": "tiny",
            "overrides": {"n_layers": 2},
            "converters": ["quantize.linear.float8"] if recipe else [],
        },
        "quantize": {"linear": {"float8": float8}},
        "optimizer": {"lr": 3e-3},
        "training": {"steps": steps},
        "checkpoint": {"initial_load_path": None if start is None else str(start)},
        "debug": {"seed": 7 if start is None else 8},  # other samples
    }
    return job(folder, **sections)


def train(config: JobConfig, weights: dict[str, Tensor] | None = None) -> list[float]:
    """Return the loss of each step. weights: to copy into the model by hand."""
    trainer = Trainer(config)
    first = trainer.loader.state_dict()["position"]
    assert first == 0 and trainer.step == 0  # nothing but weights is taken over
    if weights is not None:
        (model,) = trainer.train_step.model_parts
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[f"model.{canonical_name(name)}"])
    run_to_end(trainer)
    return [row["loss"] for row in logged_rows(trainer.run_dir)]


def loss_of(weights: dict[str, Tensor], config: JobConfig) -> float:
    """Return the loss of the job's first batch, computed by a plain model and torch's cross entropy."""
    trainer = Trainer(config)
    [batch] = trainer.loader.next_step()
    trainer.close()
    model = build_model(dataclasses.replace(FLAVORS["tiny"], n_layers=2))
    named = {name: weights[f"model.{name}"] for name, _ in model.named_parameters()}
    nn.Module.load_state_dict(model, named, strict=False)
    logits = model(batch.tokens_BS).flatten(0, 1)
    return F.cross_entropy(logits, batch.labels_BS.flatten()).item()


@pytest.mark.parametrize(
    ("before", "after"),
    [("tensorwise", ""), ("rowwise", ""), ("", "tensorwise"), ("tensorwise", "rowwise")],
)
def test_fine_tuning_begins_with_the_saved_weights(
    before: str, after: str, tmp_path: Path
) -> None:
    pretrained = train(config(tmp_path / "before", before, steps=PRETRAINED))
    step = tmp_path / "before" / "checkpoint" / f"step-{PRETRAINED}"
    weights = saved_tensors(step)
    tuned = train(config(tmp_path / "after", after, steps=TUNED, start=step))
    # A fresh run of the same samples, whose weights are copied in by hand.
    plain = config(tmp_path / "plain", after, steps=TUNED).model_copy(
        update={"debug": config(tmp_path, after, steps=TUNED, start=step).debug}
    )
    assert train(plain, weights) == tuned
    assert all(map(math.isfinite, tuned)) and len(tuned) == TUNED
    first = loss_of(weights, plain.model_copy(update={"job": job(tmp_path / "one").job}))
    if after:
        assert (
            1e-6 < abs(tuned[0] - first) / first < 1e-2
        )  # the rounding of 8 bits, and no more
    else:
        assert tuned[0] == pytest.approx(first, rel=1e-6)
    # Not the weights of the beginning: a run that loads nothing has another loss.
    fresh = train(plain.model_copy(update={"job": job(tmp_path / "fresh").job}))
    assert abs(fresh[0] - tuned[0]) > 1e-3
    assert pretrained[0] != tuned[0]
