"""`titan diff` on a model that chooses its keys: where choices differ, it reports a tie or a flip, and not a wrong number."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.hf_families import std_of
from tests.support.layouts import Layout, job_of, tp
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.contrib.transformers.sparse_attention import SparseAttention
from titan.numerics.certify.steps import micro_batches
from titan.numerics.diff.compare import compare
from titan.numerics.recorded import RecordedStep
from titan.numerics.recording import StepRecorder
from titan.parallel import build_mesh, initialize

from .test_indexer_ranks import model_of

NAME = "layers.1.self_attn.indexer"


def choose(bug: str, sparse: SparseAttention, *scored: Any) -> Tensor:
    """Choose the latest of equal scores, as other code may ("tie"), or leave out the best key, too ("flip")."""
    found = []
    for _, scores in sparse._candidates(*scored):
        order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        chosen = scores.shape[-1] - 1 - order[..., : sparse.keys].int()
        if bug == "flip":
            chosen[..., 0] = chosen[..., -1]
        found.append(chosen)
    return torch.cat(found, dim=2)


def recorded(layout: Layout, bug: str, perturbed: int) -> RecordedStep:
    """Run on each rank: one step, in which the second layer chooses other keys."""
    mesh = build_mesh("cpu", **dict(layout.degrees))
    step = build_step(job_of(layout, steps=1), mesh)
    [model] = step.model_parts
    initialize(model, seed=0, std_of=std_of)
    if bug:
        sparse: Any = model.get_submodule("layers.1.self_attn.sparse")
        sparse.choose = partial(choose, bug, sparse)
    recorder = StepRecorder(step, perturbed=perturbed)
    batches = micro_batches(layout.batch(layout, 1), mesh, layout.accumulation)
    recorder.begin(batches)
    return recorder.end(1, step.train(batches, step=1))


def test_a_choice_that_differs_is_told(pool: Pool, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "deepseek_v32")

    def of(bug: str = "", degrees: Any = (), perturbed: int = 0) -> Any:
        layout = Layout("", degrees, 2, model=model)
        return pool.run(layout.ranks, recorded, layout, bug, perturbed)[:1]

    alone, spread = of(), of(perturbed=1)
    for bug in ("tie", "flip"):
        found = compare(alone, of(bug), spread)
        (choice, *others), cut = found.differences, ("cut", NAME)
        assert (choice.kind, choice.name) == ("choice", NAME)
        assert found.first.startswith(f"{NAME}: its choice; a {bug}: ")
        assert "output" in {other.kind for other in others}
        assert (cut in {(other.kind, other.name) for other in others}) == (bug == "flip")
    # Choices are recorded by position in the whole sequence.
    [split] = of(degrees=tp(2))
    assert not compare(alone, [split], spread).differences
    assert cut in {(tensor.kind, tensor.name) for tensor in split.tensors}
