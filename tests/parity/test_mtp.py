"""Multi-token prediction on every layout computes what one process does, and shows the same loss of further tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import layouts
from tests.support.jobs import SMALL, job, with_changes
from tests.support.layouts import FOUR_AXES, REPLICAS, TIED, Layout, cp, fsdp, pp, schedule, tp
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer, run_to_end

# Two modules, of a weight that shows in the gradients.
TWO = (("num_mtp_modules", 2), ("mtp_coeff", 1.0))
EP: Any = {"model": ("deepseek_v3", "tiny"), "settings": (("expert_parallel_degree", 2),)}
FULL: Any = {"recompute": "full"}
BY_OP: Any = {"recompute": "selective", "compiled": layouts.TRACED}
WHOLE = (("disable_loss_parallel", True),)
UNBALANCED = (*layouts.ULYSSES, *layouts.UNBALANCED)


def stages(name: str) -> dict[str, Any]:
    """Two blocks in each of four stages, and both modules in the last: the ends count for nothing."""
    ends = [(f"pipeline_parallel_{end}_stage_less_layers", 0) for end in ("first", "last")]
    return {"settings": (*schedule(name), *ends), "blocks": 6}


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one process": ((), {"accumulation": 2}),
    "FSDP2": (fsdp(2), {}),
    "FSDP2, two blocks in a unit": (fsdp(2), {"settings": layouts.IN_UNITS}),
    "FSDP2, tied embeddings": (fsdp(2), TIED),
    "DDP": (REPLICAS, {"accumulation": 2}),
    "TP+SP": (tp(2), {}),
    "TP+SP, whole logits": (tp(2), {"settings": WHOLE}),
    "CP all-gather": (cp(2), {}),
    "CP ring, one document": (cp(2), {"settings": layouts.RING, "documents": False}),
    "CP Ulysses, not balanced": (cp(2), {"settings": UNBALANCED}),
    "PP 1F1B": (pp(2), {"accumulation": 2}),
    "PP interleaved 1F1B": (pp(2), stages("Interleaved1F1B")),
    "PP zero bubble": (pp(2), stages("InterleavedZeroBubble")),
    "PP DualPipeV x FSDP2": ((*pp(2), *fsdp(2)), stages("DualPipeV")),
    "FSDP2 x TP+SP, compiled, full AC": ((*fsdp(2), *tp(2)), {**BY_OP, **FULL}),
    "FSDP2 x CP, compiled, selective AC": ((*fsdp(2), *cp(2)), BY_OP),
    "PP x FSDP2 x CP x TP+SP, full AC": (FOUR_AXES, FULL),
    "experts FSDP2, EP 2": (fsdp(2), EP),
    "experts TP+SP, EP 2": (tp(2), EP),
    "experts PP x FSDP2, EP 2": ((*pp(2), *fsdp(2)), EP),
    "experts CP x TP+SP, EP 2, full AC": ((*cp(2), *tp(2)), {**EP, **FULL}),
    "experts FSDP2, EP 2, compiled, selective AC": (fsdp(2), {**EP, **BY_OP}),
}


def layout_of(name: str) -> Layout:
    degrees, options = LAYOUTS[name]
    overrides = (*TWO, *options.get("overrides", ()))
    return Layout(name, degrees, **options | {"overrides": overrides})


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_process(name: str, references, pool: Pool) -> None:
    layout = layout_of(name)
    same = ("documents", "blocks", "model", "overrides", "optimizer")
    reference = references.run(**{key: getattr(layout, key) for key in same})
    found = layouts.differences(pool.run(layout.ranks, layouts.train, layout), reference)
    assert max(found.values()) < layouts.BOUND, found


VALIDATED = {"enable": True, "freq": 1, "steps": 1}


def run(folder: Path, parallelism: dict[str, int]) -> None:
    changes = {"parallelism": parallelism, "model": {"overrides": {"n_layers": 3, **dict(TWO)}}}
    training = {"global_batch_size": 8, "local_batch_size": 2, "steps": 2}
    config = job(
        folder, base=with_changes(SMALL, training=training, validation=VALIDATED, **changes)
    )
    run_to_end(PoolTrainer(config))


def test_the_loss_of_further_targets_is_a_column(pool: Pool, tmp_path: Path) -> None:
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
        assert alone["mtp_loss"] > 1 and alone["mtp_loss"] != pytest.approx(
            alone["loss"], rel=1e-4
        )
        assert pipeline["mtp_loss"] == pytest.approx(alone["mtp_loss"], rel=1e-5)
        for name in ("loss", "validation_loss"):
            assert pipeline[name] == pytest.approx(alone[name], rel=1e-5)
