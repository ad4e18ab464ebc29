"""What a run does with a step of another model: not load it, not delete it, and begin from it only where the job says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import SMALL, with_changes
from tests.support.jobs import job as any_job
from tests.support.tables import tabled
from tests.support.trainers import Trainer
from titan.checkpoint.manager import CheckpointError, model_state
from titan.config.model import families, family
from titan.config.schema import JobConfig
from titan.models.llama3 import build_model

BASE = with_changes(SMALL, training={"seq_len": 16, "steps": 2}, checkpoint={"interval": 2})
job = partial(any_job, base=BASE)
FOUR, TWO = {"overrides": {"n_layers": 4}}, {"overrides": {"n_layers": 2}}


def train(config: JobConfig, *, steps: bool = True) -> dict[str, torch.Tensor]:
    """Train to the end, or only start; return the weights."""
    trainer = Trainer(config)
    try:
        assert not (steps and trainer.run())
        return {k: v.clone() for k, v in model_state(trainer.train_step.model_parts).items()}
    finally:
        trainer.close()


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Expect a start to be refused, and end the process group that it leaves, as the process would."""
    with pytest.raises(CheckpointError, match=message):
        yield
    torch.distributed.destroy_process_group()


start = partial(train, steps=False)


def forget_the_model(step: Path, *keys: str) -> None:
    """Make a step one of an older titan, which wrote less into titan.json."""
    saved = json.loads((step / "titan.json").read_text())
    (step / "titan.json").write_text(
        json.dumps({k: v for k, v in saved.items() if k not in keys})
    )


def test_the_load_refuses_what_the_start_could_not_see(tmp_path: Path) -> None:
    """A newest step that is damaged: the one before is another model's, and nothing is renamed."""
    train(job(tmp_path, model=FOUR, training={"steps": 2}))
    step = tmp_path / "checkpoint/step-2"
    shutil.copytree(step, tmp_path / "checkpoint/step-4")
    forget_the_model(tmp_path / "checkpoint/step-4", "model", "config")
    with refused(r"n_layers: 2, but .*step-2 was saved with 4"):
        Trainer(job(tmp_path, model=TWO, training={"steps": 6}))
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4"]


def test_weights_without_a_place_are_refused(tmp_path: Path) -> None:
    """Steps without a record of their model still load, and only those that the model has a place for."""
    trained = train(job(tmp_path, model=FOUR))
    forget_the_model(tmp_path / "checkpoint/step-2", "model", "config")
    off: dict[str, Any] = {
        "checkpoint": {"interval": 2, "verify": "off"},
        "training": {"steps": 4},
    }
    with refused(r"step-2 holds model\.layers\.2\..* and 15 more, which this model has no place for"):  # fmt: skip
        Trainer(job(tmp_path, model=TWO, **off))
    wide = {"overrides": {**FOUR["overrides"], "ffn_dim": 256}}
    with refused("other shapes: .*saved from another model"):
        Trainer(job(tmp_path, model=wide, **off))
    weights = start(job(tmp_path, model=FOUR, **off))
    assert all(torch.equal(weights[name], trained[name]) for name in trained)


def test_retention_keeps_the_steps_of_another_model(tmp_path: Path) -> None:
    """As runs of earlier versions have left them, who took them for their own."""
    train(job(tmp_path / "other", model=FOUR))
    how = {"interval": 1, "keep_latest_k": 1}
    train(job(tmp_path / "mine", model=TWO, checkpoint=how))
    folder = tmp_path / "mine/checkpoint"
    shutil.copytree(tmp_path / "other/checkpoint/step-2", folder / "step-1")
    train(job(tmp_path / "mine", model=TWO, checkpoint=how, training={"steps": 4}))
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-4"]


@tabled("change, said")
def test_a_run_may_begin_with_another_model_where_it_says_so(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer context, fewer blocks, more blocks: what both have is taken over, and the rest is said."""
    trained = train(job(tmp_path / "old"))
    [key] = change
    model = {"overrides": {"n_layers": 2} | change}
    fresh = start(job(tmp_path / "fresh", model=model))
    load = {"initial_load_path": str(tmp_path / "old/checkpoint/step-2")}
    new = partial(job, tmp_path / "new", model=model)
    with refused(f"model.overrides.{key}: "):
        start(new(checkpoint=load))
    capsys.readouterr()
    weights = start(new(checkpoint=load | {"initial_load_changes": [f"model.overrides.{key}"]}))
    assert said in capsys.readouterr().out
    for name, tensor in weights.items():
        fits = name in trained and trained[name].shape == tensor.shape
        assert torch.equal(tensor, trained[name] if fits else fresh[name]), name


@pytest.mark.parametrize(
    "name", sorted({*families()} - {"flux", "llava", "transformers"})
)  # need more than tokens
def test_what_may_change_at_a_resume_changes_no_output(name: str) -> None:
    """The fields that a resume lets pass: the same weights give the same logits."""
    import dataclasses

    from titan.checkpoint.identity import _OF_TRAINING

    package = family(name)
    sizes = min(package.FLAVORS.values(), key=lambda sizes: sizes.num_params)
    tokens = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    fields = [f.name for f in dataclasses.fields(sizes) if f.name in _OF_TRAINING]
    assert fields

    def logits(changes: dict[str, float], weights: dict[str, torch.Tensor] | None) -> Any:
        model = package.build_model(dataclasses.replace(sizes, **changes))
        state = model.state_dict()
        if weights is None:
            weights = {
                k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) / 8
                for k, v in state.items()
            }
        # Of the loads of the step before, which only a loss reads.
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert all(key.endswith(".last_loads") for key in (*missing, *unexpected))
        with torch.no_grad():
            return model.eval()(tokens), weights

    expected, weights = logits({}, None)
    for field in fields:
        for value in (0.7, 0.0):
            found, _ = logits({field: value}, weights)
            assert torch.equal(found, expected), field


def test_rope_does_change_the_output() -> None:
    """So the test above could fail."""
    import dataclasses

    from titan.models.llama3 import FLAVORS

    tokens = torch.arange(16)[None]
    with torch.no_grad():
        model = build_model(FLAVORS["tiny"])
        other = build_model(dataclasses.replace(FLAVORS["tiny"], rope_theta=1e4))
        other.load_state_dict(model.state_dict())
        assert not torch.equal(model(tokens), other(tokens))
