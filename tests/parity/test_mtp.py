"""Multi-token prediction on every layout computes what one process does, and what its formula says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SMALL, job, with_changes
from tests.support.layouts import (
    BOUND,
    FOUR_AXES,
    IN_UNITS,
    REPLICAS,
    RING,
    TIED,
    TRACED,
    ULYSSES,
    UNBALANCED,
    ZERO_BUBBLE,
    Layout,
    cp,
    differences,
    fsdp,
    pp,
    schedule,
    tp,
    train,
)
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer

# Two modules, of a weight that shows in the gradients.
TWO = (("num_mtp_modules", 2), ("mtp_coeff", 1.0))
DEEPSEEK: Any = {"model": ("deepseek_v3", "tiny")}
EP = (("expert_parallel_degree", 2),)
# Two blocks in each of four stages, and both modules in the last: the ends count for nothing.
LESS = (
    ("pipeline_parallel_first_stage_less_layers", 0),
    ("pipeline_parallel_last_stage_less_layers", 0),
)
LAYOUTS = [
    Layout("one process", accumulation=2),
    Layout("FSDP2", fsdp(2)),
    Layout("FSDP2, two blocks in a unit", fsdp(2), settings=IN_UNITS),
    Layout("FSDP2, tied embeddings", fsdp(2), **TIED),
    Layout("DDP", REPLICAS, accumulation=2),
    Layout("TP+SP", tp(2)),
    Layout("TP+SP, whole logits", tp(2), settings=(("disable_loss_parallel", True),)),
    Layout("CP all-gather", cp(2)),
    Layout("CP ring, one document", cp(2), settings=RING, documents=False),
    Layout("CP Ulysses, not balanced", cp(2), settings=(*ULYSSES, *UNBALANCED)),
    Layout("PP 1F1B", pp(2), accumulation=2),
    Layout("PP interleaved 1F1B", pp(2), settings=(*schedule("Interleaved1F1B"), *LESS), blocks=6),
    Layout("PP zero bubble", pp(2), settings=(*ZERO_BUBBLE, *LESS), blocks=6),
    Layout(
        "PP DualPipeV x FSDP2",
        (*pp(2), *fsdp(2)),
        settings=(*schedule("DualPipeV"), *LESS),
        blocks=6,
    ),
    Layout(
        "FSDP2 x TP+SP, compiled, full AC", (*fsdp(2), *tp(2)), recompute="full", compiled=TRACED
    ),
    Layout(
        "FSDP2 x CP, compiled, selective AC",
        (*fsdp(2), *cp(2)),
        recompute="selective",
        compiled=TRACED,
    ),
    Layout("PP x FSDP2 x CP x TP+SP, full AC", FOUR_AXES, recompute="full"),
    Layout("experts FSDP2, EP 2", fsdp(2), settings=EP, **DEEPSEEK),
    Layout("experts TP+SP, EP 2", tp(2), settings=EP, **DEEPSEEK),
    Layout("experts PP x FSDP2, EP 2", (*pp(2), *fsdp(2)), settings=EP, **DEEPSEEK),
    Layout(
        "experts CP x TP+SP, EP 2, full AC",
        (*cp(2), *tp(2)),
        settings=EP,
        recompute="full",
        **DEEPSEEK,
    ),
    Layout(
        "experts FSDP2, EP 2, compiled, selective AC",
        fsdp(2),
        settings=EP,
        recompute="selective",
        compiled=TRACED,
        **DEEPSEEK,
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_equals_one_process(layout: Layout, references, pool: Pool) -> None:
    layout = replace(layout, overrides=(*TWO, *layout.overrides))
    same = ("documents", "blocks", "model", "overrides", "optimizer")
    reference = references.run(**{name: getattr(layout, name) for name in same})
    found = differences(pool.run(layout.ranks, train, layout), reference)
    assert max(found.values()) < BOUND, found


def run(folder: Path, parallelism: dict[str, int]) -> None:
    changes = {"parallelism": parallelism, "model": {"overrides": {"n_layers": 3, **dict(TWO)}}}
    training = {"global_batch_size": 8, "local_batch_size": 2, "steps": 2}
    config = job(folder, base=with_changes(SMALL, training=training, **changes))
    trainer = PoolTrainer(config)
    assert trainer.run() == 0
    trainer.close()


def test_the_loss_of_further_tokens_is_a_column(pool: Pool, tmp_path: Path) -> None:
    """Also over the micro-batches of a pipeline, on the rank that has none of it."""
    rows = []
    for ranks, layout in (
        (1, {}),
        (2, {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1}),
    ):
        folder = tmp_path / str(ranks)
        pool.run(ranks, run, folder, layout)
        rows.append(read_json_lines(folder / "metrics.jsonl"))
    for alone, pipeline in zip(*rows, strict=True):
        assert alone["mtp_loss"] > 1 and alone["mtp_loss"] != pytest.approx(alone["loss"], rel=1e-4)
        assert pipeline["mtp_loss"] == pytest.approx(alone["mtp_loss"], rel=1e-5)
        assert pipeline["loss"] == pytest.approx(alone["loss"], rel=1e-5)
