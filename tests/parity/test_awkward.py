"""Models that are not like ours, on layouts: each trait equals one process, or is refused by name. docs/parallelism.md has the table."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.awkward import awkward, install, mixed_batch
from tests.support.jobs import job
from tests.support.layouts import (
    BOUND,
    IN_UNITS,
    NEVER,
    REPLICAS,
    TRACED,
    ZERO_BUBBLE,
    Layout,
    cp,
    fsdp,
    job_of,
    largest,
    pp,
    schedule,
    tp,
    train,
)
from tests.support.ranks import Pool, RankFailed
from tests.support.runs import saved_tensors
from tests.support.steps import build_step
from titan.data.packing import IGNORED
from titan.parallel import axis_rank, build_mesh
from titan.parallel.mesh import axis_size
from titan.step.train_step import TrainStep

STEPS = 3
ONE = Layout("one process", accumulation=2)
HSDP = Layout("HSDP", (*REPLICAS, *fsdp(2)), 2)
MUON = (("name", "Muon"), ("ns_dtype", "float32"))
PAIRS = (*pp(2), *fsdp(2))
LAYOUTS = [
    Layout("DDP", REPLICAS, 2),
    Layout("FSDP2", fsdp(2), 2),
    Layout("FSDP2, ZeRO-2", fsdp(2), 2, settings=NEVER),
    Layout("FSDP2, two blocks in a unit", fsdp(2), 2, settings=IN_UNITS),
    Layout("FSDP2, Muon", fsdp(2), 2, optimizer=MUON),
    Layout("FSDP2, parameters on the host", fsdp(2), 2, offload=True),
    Layout("FSDP2, full AC", fsdp(2), 2, recompute="full"),
    Layout("FSDP2, selective AC", fsdp(2), 2, recompute="selective"),
    Layout("FSDP2, compiled", fsdp(2), 2, compiled=TRACED),
    HSDP,
    Layout("TP+SP", tp(2), 2),
    Layout("FSDP2 x TP+SP", (*fsdp(2), *tp(2)), 2),
    Layout("CP", cp(2), 2),
    Layout("PP 1F1B", pp(2)),
    Layout("PP interleaved 1F1B x FSDP2", PAIRS, 2, settings=schedule("Interleaved1F1B")),
    Layout("PP zero bubble x FSDP2", PAIRS, 2, settings=ZERO_BUBBLE),
]
TRAITS = ("skips", "exits", "tower", "unused", "subclass", "buffer", "padding")
# What each is most likely to break. All others run with `-m slow`.
CHOSEN = {
    *(("skips", name) for name in ("DDP", "HSDP", "FSDP2, full AC", "PP zero bubble x FSDP2")),
    *(("exits", name) for name in ("FSDP2, ZeRO-2", "PP interleaved 1F1B x FSDP2")),
    *(("tower", name) for name in ("HSDP", "FSDP2 x TP+SP")),
    *(("unused", name) for name in ("FSDP2, Muon", "TP+SP", "PP 1F1B")),
    *(("subclass", name) for name in ("TP+SP", "FSDP2, compiled")),
    ("buffer", "FSDP2, two blocks in a unit"),
    ("padding", "FSDP2 x TP+SP"),
}
ROWS = [
    pytest.param(
        trait,
        layout,
        id=f"{trait}, {layout.name}",
        marks=[] if (trait, layout.name) in CHOSEN else pytest.mark.slow,
    )
    for trait in TRAITS
    for layout in LAYOUTS
]


def trained(layout: Layout) -> dict[str, Any]:
    install()
    return train(layout, steps=STEPS)


@pytest.mark.parametrize(("trait", "layout"), ROWS)
def test_equals_one_process(trait: str, layout: Layout, pool: Pool) -> None:
    one = Layout(ONE.name, accumulation=2, optimizer=layout.optimizer)
    [reference] = pool.run(1, trained, awkward(one, trait))
    results = pool.run(layout.ranks, trained, awkward(layout, trait))
    for what in ("losses", "norms", "gradients", "weights"):
        assert largest(results, reference, what) < BOUND, what


CAPPED = Layout("TP+SP, chunk_output = false", tp(2), 2, loss=(("chunk_output", False),))
REFUSED = [
    ("shared", LAYOUTS[1], r"InputError: layers\.0\.feed_forward\.w1\.weight and layers\.2\.feed_forward\.w1\.weight are one parameter"),
    ("max_norm", LAYOUTS[0], r"module 'tok_embeddings' \(Embedding\) shortens rows"),
    ("max_norm", LAYOUTS[10], r"module 'tok_embeddings' \(Embedding\) shortens rows"),
    ("soft_cap", ONE, "Awkward computes with what its output layer returns.*set loss.chunk_output = false"),
    ("replicated", LAYOUTS[10], r"module 'layers\.0\.attention\.drop' draws random numbers for a tensor that each"),
    ("functional", Layout("full AC", recompute="full"), "activation_checkpoint.preserve_rng_state = true"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("trait", "layout", "message"), REFUSED, ids=[f"{row[0]}, {row[1].name}" for row in REFUSED]
)
def test_is_refused_by_name(trait: str, layout: Layout, message: str, pool: Pool) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(layout.ranks, trained, awkward(layout, trait))


def test_a_soft_cap_works_where_the_loss_leaves_the_output_layer_alone(pool: Pool) -> None:
    one = Layout("one process", accumulation=2, loss=CAPPED.loss)
    [reference] = pool.run(1, trained, awkward(one, "soft_cap"))
    results = pool.run(2, trained, awkward(CAPPED, "soft_cap"))
    assert max(largest(results, reference, what) for what in ("losses", "gradients")) < BOUND


# ---- random numbers ------------------------------------------------------------------------------


def dropped(layout: Layout) -> dict[str, Any]:
    """Gradient norms of three steps, the slope of the loss along the gradient by differences, and hashes of the masks."""
    install()
    mesh = build_mesh("cpu", **dict(layout.degrees))
    config = job_of(layout)
    step = build_step(config, mesh)
    masks: dict[str, list[int]] = {}

    def note(name: str, _: nn.Module, args: tuple[Tensor, ...], kept: Tensor) -> None:
        bits = ((kept == 0) & (args[0] != 0)).flatten()[:256].tolist()
        if any(bits):  # torch 2.11 learns shapes from zeros
            masks.setdefault(name, []).append(hash(tuple(bits)))

    for part in step.model_parts:
        for name, module in part.named_modules():
            if isinstance(module, nn.Dropout) and module.p:
                module.register_forward_hook(partial(note, name))
    world, rank = (
        axis_size(mesh, "dp_replicate", "dp_shard"),
        axis_rank(mesh, "dp_replicate", "dp_shard"),
    )
    count = world * layout.accumulation
    whole = mixed_batch(layout, 1)
    batches = [
        whole.map(lambda _, t, i=i: t.chunk(count)[i]) for i in range(rank, count, world)
    ]
    gradients: list[tuple[Tensor, Tensor]] = []

    def refuse(loss: Tensor, norm: Tensor) -> bool:
        if not gradients:  # after clipping, so of length 1
            scale = 1 / min(1.0, norm.item())
            gradients.extend(
                (p, p.grad.clone() * scale) for p in step.parameters if p.grad is not None
            )
        return False

    first = step.train(batches, step=1, accept=refuse)
    found = {name: tuple(hashes) for name, hashes in masks.items()}
    losses = []
    for move in (2e-3, -4e-3):
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter += move * gradient
        losses.append(step.train(batches, step=1, accept=refuse).loss.item())
    return {"norm": first.grad_norm.item(), "loss": first.loss.item(), "slope": (losses[0] - losses[1]) / 4e-3, "masks": found}  # fmt: skip


RANDOM = [
    Layout("full AC", accumulation=2, recompute="full"),
    Layout("selective AC", accumulation=2, recompute="selective"),
    Layout("compiled, full AC", accumulation=2, recompute="full", compiled=TRACED),
    Layout("FSDP2, full AC", fsdp(2), recompute="full"),
    Layout("DDP", REPLICAS, 2),
    Layout("TP+SP, full AC", tp(2), recompute="full"),
    Layout("CP, full AC", cp(2), recompute="full"),
    Layout("PP, full AC", pp(2), recompute="full"),
    Layout("TP+SP, compiled", tp(2), compiled=TRACED),
]


@pytest.mark.parametrize("layout", RANDOM, ids=lambda layout: layout.name)
def test_gradients_with_dropout_are_those_of_the_forward_pass(
    layout: Layout, pool: Pool
) -> None:
    results = pool.run(layout.ranks, dropped, awkward(layout, "dropout"))
    assert results[0]["slope"] == pytest.approx(results[0]["norm"], rel=2e-3)
    again = pool.run(layout.ranks, dropped, awkward(layout, "dropout"))
    assert [(r["loss"], r["norm"]) for r in again] == [(r["loss"], r["norm"]) for r in results]
    if layout.ranks == 2 and not layout.compiled:
        # Other samples, another part of the sequence, or other layers: no mask comes twice.
        hashes = [
            h
            for result in results
            for of_module in result["masks"].values()
            for h in set(of_module)
        ]
        assert len(hashes) == len({*hashes}) > 4


# ---- runs ----------------------------------------------------------------------------------------


def run_in(folder: str, settings: dict[str, Any], traits: str) -> None:
    """Train to step 4 in a folder, from what is there."""
    from tests.support.trainers import PoolTrainer

    install()
    model = {
        "name": "awkward",
        "flavor": "tiny",
        "overrides": {"n_layers": 4, "traits": traits},
    }
    sections: dict[str, Any] = {"training": {"steps": 4}, "checkpoint": {"interval": 2}}
    for name, section in settings.items():
        sections[name] = sections.get(name, {}) | section
    trainer = PoolTrainer(job(folder, model=model, **sections))
    trainer.run()
    trainer.close()


def sharded(n: int) -> dict[str, Any]:
    return {"data_parallel_shard_degree": n}


RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "AdamW": ({}, {}, 1, 1),
    "AdamW, FSDP2": ({}, sharded(2), 2, 2),
    "AdamW, from FSDP2 to one rank": ({}, sharded(2), 2, 1),
    "AdamW8bit": ({"name": "AdamW8bit"}, {}, 1, 1),
    "Muon, FSDP2": ({"name": "Muon"}, sharded(2), 2, 2),
    "AdamW, PP": ({}, {"pipeline_parallel_degree": 2}, 2, 2),
}


@pytest.mark.parametrize("row", RESUMES)
def test_a_run_resumes_with_unused_parameters_and_dropout(
    row: str, pool: Pool, tmp_path: Path
) -> None:
    optimizer, layout, before, after = RESUMES[row]
    optimizer = (
        {"implementation": "foreach"} | optimizer
        if optimizer.get("name") != "Muon"
        else optimizer
    )
    traits = "unused,dropout" if before == after else "unused"
    settings: dict[str, Any] = {"optimizer": optimizer, "parallelism": layout}
    pool.run(before, run_in, str(tmp_path / "whole"), settings, traits)
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "parts/checkpoint/step-2")
    if before != after:
        settings = {"optimizer": optimizer, "training": {"steps": 4, "local_batch_size": 4}}
    pool.run(after, run_in, str(tmp_path / "parts"), settings, traits)
    whole, parts = (
        saved_tensors(tmp_path / name / "checkpoint/step-4") for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    for name, expected in whole.items():
        if before == after:
            assert torch.equal(parts[name], expected), name
        else:
            torch.testing.assert_close(parts[name], expected, rtol=1e-4, atol=1e-5)
    spare = [name for name in whole if "spare" in name and not name.startswith("model.")]
    assert spare and all(
        not whole[name].any() for name in spare
    )  # a state as before the first step


def labelled(layout: Layout) -> list[bool]:
    """Whether the weights changed in a step without any label, and in the next one."""
    mesh = build_mesh("cpu", **dict(layout.degrees))
    step = build_step(job_of(layout), mesh)
    changed = []
    rank, world = (
        axis_rank(mesh, "dp_replicate", "dp_shard"),
        axis_size(mesh, "dp_replicate", "dp_shard"),
    )
    count = world * layout.accumulation
    for number, has_targets in enumerate((True, False, True), 1):
        whole = layout.batch(layout, number)
        if not has_targets:
            whole = whole.map(
                lambda name, t: torch.full_like(t, IGNORED) if name == "labels_BS" else t
            )
        batches = [
            whole.map(lambda _, t, i=i: t.chunk(count)[i]) for i in range(rank, count, world)
        ]
        weights = [p.detach().clone() for p in step.parameters]
        report = step.train(batches, step=number)
        assert report.has_targets == has_targets and report.loss.isfinite()
        changed.append(
            any(not _same(p, w) for p, w in zip(step.parameters, weights, strict=True))
        )
    return changed


def _same(a: Any, b: Any) -> bool:
    a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (a, b))
    return torch.equal(a, b)


EARLY = (("name", "AdamW"), ("early_step_in_backward", True))


@pytest.mark.parametrize(
    "layout",
    [
        ONE,
        Layout("early steps", accumulation=2, optimizer=EARLY),
        Layout("FSDP2", fsdp(2), 2),
        Layout("PP x TP", (*pp(2), *tp(2))),
        Layout("experts", fsdp(2), model=("qwen3", "tiny_moe")),
    ],
    ids=lambda layout: layout.name,
)
def test_a_step_without_labels_updates_nothing(layout: Layout, pool: Pool) -> None:
    for changed in pool.run(layout.ranks, labelled, layout):
        assert changed == [True, False, True]


def early(layout: Layout) -> list[float]:
    install()
    mesh = build_mesh("cpu")
    step: TrainStep = build_step(job_of(layout), mesh)
    whole = layout.batch(layout, 1)
    batches = [whole.map(lambda _, t, i=i: t.chunk(2)[i]) for i in range(2)]
    return [step.train(batches, step=n).loss.item() for n in (1, 2, 3)]


def test_early_steps_update_what_the_last_micro_batch_does_not_use(pool: Pool) -> None:
    """Layers after the exit have a gradient of the first micro-batch only."""
    settings = {"accumulation": 2}
    usual, soon = (
        pool.run(1, early, awkward(Layout("", optimizer=optimizer, **settings), "exits"))[0]
        for optimizer in ((("name", "AdamW"),), EARLY)
    )
    assert soon == pytest.approx(usual, rel=1e-5)
