"""Training in float16: the loss scale against torch's GradScaler, layouts against one process, and a resumed run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.support.jobs import SMALL, job
from tests.support.layouts import (
    REPLICAS,
    TRACED,
    Layout,
    fsdp,
    job_of,
    largest,
    pp,
    text_batch,
    tp,
    train,
)
from tests.support.ranks import Pool
from tests.support.runs import logged_rows
from tests.support.steps import build_step
from tests.support.tables import tabled
from tests.support.trainers import Trainer, run_to_end
from titan.config.schema import JobConfig
from titan.models.common.attention import InnerAttention
from titan.models.llama3 import FLAVORS, build_model
from titan.numerics.certify.steps import micro_batches, record, whole
from titan.parallel import build_mesh, initialize
from titan.step import loss_scale
from titan.step.loss_scale import LossScale

STEPS = 12
TOO_LARGE = 2.0**24  # the gradients of the first steps overflow
STRIKE = 2.0**40
STOP = 7  # where a run is stopped and resumed
# Without document masks, and with torch's own cross entropy on all logits: what a plain loop computes.
PLAIN: Any = {"documents": False, "loss": (("chunk_tokens", 0), ("chunk_output", False))}


def steps_of(layout: Layout, scale: float, struck: tuple[int, ...] = ()) -> dict[str, Any]:
    """Train on one rank. Return the record, and the scale after each step.

    Args:
        layout: layout of the ranks.
        scale: first scale.
        struck: steps before which the scale is multiplied so that every gradient overflows, on any layout.
    """
    mesh = build_mesh("cpu", **dict(layout.degrees))
    step = build_step(job_of(layout, precision="float16", steps=STEPS), mesh)
    scaling: Any = step.loss_scale
    scaling.value = scale
    scales: list[float] = []

    def noting() -> Any:
        for number in range(1, STEPS + 1):
            raised = STRIKE if number in struck else 1.0
            scaling.value *= raised
            yield micro_batches(text_batch(layout, number), mesh, layout.accumulation)
            scaling.value /= raised
            scales.append(scaling.value)

    return record(step, noting()) | {"scales": scales}


def plain_steps(scale: float) -> dict[str, Any]:
    """Train as a plain loop does: fp32 weights that are cast for each pass, torch's AdamW, clipping and GradScaler."""
    layout = Layout("one process", **PLAIN)
    config = job_of(layout, precision="float16", steps=STEPS)
    model = build_model(dataclasses.replace(FLAVORS["tiny"], n_layers=layout.blocks))
    initialize(model, seed=config.debug.seed, std_of=model.init_std)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    section = config.optimizer
    betas = (section.beta1, section.beta2)
    # As titan does: torch 2.11 rounds its two programs for CPUs differently.
    optimizer = torch.optim.AdamW(
        groups, lr=section.lr, betas=betas, eps=section.eps, fused=True
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    step = build_step(config, build_mesh("cpu"))  # for its learning rates alone
    losses, norms, scales = [], [], []
    for number in range(1, STEPS + 1):
        batch: Any = text_batch(layout, number)
        half = {name: p.half() for name, p in model.named_parameters()}
        logits = functional_call(model, half, batch.tokens_BS)
        total = F.cross_entropy(
            logits.float().flatten(0, 1), batch.labels_BS.flatten(), reduction="sum"
        )
        loss = total / (batch.labels_BS != -100).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        # torch's own norm on a CPU adds one by one, and is off by 1e-5.
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        squares = [grad.double().square().sum() for grad in grads]
        norm = torch.stack(squares).sum().sqrt().float()
        nn.utils.clip_grads_with_norm_(model.parameters(), config.training.max_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = step.set_learning_rate(number)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
        scales.append(scaler.get_scale())
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "scales": scales}


def test_equals_a_plain_loop_with_torchs_scaler(pool: Pool) -> None:
    [ours] = pool.run(1, steps_of, Layout("one process", **PLAIN), TOO_LARGE)
    [theirs] = pool.run(1, plain_steps, TOO_LARGE)
    skipped = sum(not math.isfinite(norm) for norm in theirs["norms"])
    assert 2 <= skipped < STEPS - 4 and ours["scales"][-1] == TOO_LARGE / 2**skipped
    assert ours["scales"] == theirs["scales"]
    assert [math.isfinite(norm) for norm in ours["norms"]] == [
        math.isfinite(norm) for norm in theirs["norms"]
    ]
    good = range(skipped, STEPS)
    for name in ("losses", "norms"):
        a, b = ([run[name][n] for n in good] for run in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert min(ours["losses"][-3:]) < ours["losses"][0]
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-6, atol=1e-6)


def test_the_scale_is_torchs_for_any_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loss_scale.GROWTH_INTERVAL == 2000 and LossScale().value == 65536
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", growth_interval=4)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    values = set()
    for draw in torch.rand(100, generator=torch.Generator().manual_seed(0)):
        is_good = bool(draw > 0.15)
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((3,), 1.0 if is_good else math.inf)
        before = weight.detach().clone()
        theirs.step(optimizer)
        theirs.update()
        assert ours.update(1.0 if is_good else math.inf) == is_good
        assert torch.equal(weight, before) != is_good
        assert ours.value == theirs.get_scale()
        values.add(ours.value)
    assert len(values) > 5


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> dict[str, Any]:
    """Return the record of one process, in which three steps overflow."""
    return pool.run(1, steps_of, Layout("one process"), 65536.0, (3, 4, 7))[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout("FSDP2", fsdp(2)),
        Layout("FSDP2, 2 micro-batches", fsdp(2), accumulation=2),
        Layout("DDP", REPLICAS),
        Layout("TP+SP", tp(2)),
        Layout("PP", pp(2)),
        Layout("FSDP2, recomputed, compiled", fsdp(2), recompute="full", compiled=TRACED),
    ],
    ids=lambda layout: layout.name,
)
def test_layouts_equal_one_process(
    layout: Layout, one_process: dict[str, Any], pool: Pool
) -> None:
    """To the rounding of float16, whose sums differ in their order. Ranks with parts of a batch also overflow at other scales, so that
    the steps that overflow are chosen here.
    """
    alone = dict(one_process)
    results = pool.run(layout.ranks, steps_of, layout, 65536.0, (3, 4, 7))
    for run in (alone, *results):
        assert run["scales"] == [65536.0] * 2 + [32768.0] + [16384.0] * 3 + [8192.0] * 6
        assert [n for n, x in enumerate(run["norms"], 1) if not math.isfinite(x)] == [3, 4, 7]
        run["norms"] = [norm for norm in run["norms"] if math.isfinite(norm)]
    assert largest(results, alone, "losses") < 1e-4
    assert largest(results, alone, "norms") < 2e-3
    # AdamW takes an element whose gradient is next to nothing as a full step, of the size lr.
    assert largest(results, alone, "weights") < 4e-2


def test_gradients_are_those_of_fp32(pool: Pool) -> None:
    """Also those of the terms that balance experts, which have no part in the loss: at any scale, to float16's bits."""
    dense = Layout("one process", loss=(("chunk_tokens", 0),))
    terms = {"sequence_balance_coeff": 1.0, "global_balance_coeff": 1.0}
    terms["router_z_loss_coeff"] = 1.0
    moe = Layout(
        "one process", model=("qwen3", "tiny_moe"), blocks=2, overrides=tuple(terms.items())
    )
    for layout in (dense, moe):
        [exact] = pool.run(1, train, layout)
        for scale in (1024.0, 65536.0):
            [found] = pool.run(1, steps_of, layout, scale)
            differences = {
                name: ((found["gradients"][name] - g).norm() / g.norm()).item()
                for name, g in exact["gradients"].items()
            }
            assert 1e-5 < max(differences.values()) < 1e-2, (layout.model, scale, differences)


def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale falls in the first steps and grows later, and its counter crosses the restart."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)

    def rows(folder: Path, *stops: int) -> list[dict[str, Any]]:
        for steps in stops:
            trainer = Trainer(
                job(
                    folder,
                    training={"mixed_precision_param": "float16", "steps": steps},
                    lr_scheduler={"warmup_steps": 2, "total_steps": 14},
                )
            )
            if trainer.step == 0:
                scaling: Any = trainer.train_step.loss_scale
                scaling.value = TOO_LARGE
            run_to_end(trainer)
        return logged_rows(folder)

    names = ("step", "loss", "grad_norm", "loss_scale", "num_skipped")
    whole_run, parts = (
        [[row[name] for name in names] for row in rows(tmp_path / folder, *stops)]
        for folder, stops in (("whole", (14,)), ("parts", (STOP, 14)))
    )
    assert parts == whole_run
    # A skipped step counts, and its row has no norm.
    are_skipped = [row[2] is None for row in whole_run]
    skipped = sum(are_skipped)
    assert 2 <= skipped < 10 and are_skipped[0]
    assert [row[4] for row in whole_run] == [sum(are_skipped[:n]) for n in range(1, 15)]
    scales = [TOO_LARGE, *(row[3] for row in whole_run)]
    factors = [after / before for before, after in itertools.pairwise(scales)]
    assert [factor == 0.5 for factor in factors] == are_skipped
    grown = [step for step, factor in enumerate(factors, 1) if factor == 2]
    assert any(STOP < step < STOP + 4 for step in grown), grown  # counted on both sides
    said = (tmp_path / "whole" / "logs" / "rank-0.log").read_text()
    assert said.count("gradients overflow float16: half the loss scale. NO UPDATE") == skipped


def test_operations_on_a_cpu() -> None:
    """The operations of a step exist in float16, so these tests need no accelerator."""
    q = torch.randn(1, 2, 8, 16).half()
    assert InnerAttention()(q, q, q, None).dtype == torch.float16


@tabled("changes, reason")
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], reason: str) -> None:
    from titan.checks.rules import check

    def problems(**sections: Any) -> str:
        training = {"mixed_precision_param": "float16", **sections.pop("training", {})}
        config: JobConfig = job(base=SMALL, training=training, **sections)
        return " ".join(problem.message for problem in check(config))

    assert problems() == ""
    assert reason in problems(**changes)
