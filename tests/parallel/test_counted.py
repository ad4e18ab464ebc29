"""Promises of layouts that no loss shows: how many collectives a step has and in which dtype, and the memory of a rank that starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.test_float8 import FSDP, GATHER, SCALES, build, steps
from tests.support.ranks import Pool
from titan.checkpoint import manager as checkpoints
from titan.config.schema import CheckpointSection

Sent = list[tuple[str, torch.dtype, int]]


class Collectives(TorchDispatchMode):
    """Record kind, dtype and number of elements of each gather and reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:  # its own collectives are dispatched inside
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        kind = name.replace("_", "")
        for known in ("allgather", "reducescatter", "allreduce"):
            if "c10d" in namespace and known in kind:
                tensor = args[1] if "base" in kind else args[0]
                tensor = tensor[0] if isinstance(tensor, list) else tensor
                self.sent.append((known, tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))


def collectives(
    recipe: str, degrees: dict[str, int], sections: dict[str, Any]
) -> tuple[Sent, list[float]]:
    """Return the collectives of a step, and the share of each parameter that the rank holds."""
    train_step = build(recipe, degrees, **sections)
    with Collectives() as mode:
        steps(train_step, range(1, 2))
    shares = [
        (p.to_local() if isinstance(p, DTensor) else p).numel() / p.numel()
        for part in train_step.model_parts
        for p in part.parameters()
    ]
    return mode.sent, shares


@pytest.mark.parametrize(
    ("degrees", "kinds"),
    [
        ({"dp_shard": 2}, {"reducescatter"}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"reducescatter", "allreduce"}),
        ({"dp_replicate": 2}, {"allreduce"}),
    ],
    ids=["FSDP2", "HSDP", "DDP"],
)
def test_gradients_of_bf16_are_reduced_in_fp32(
    degrees: dict[str, int], kinds: set[str], pool: Pool
) -> None:
    precision = {"training": {"mixed_precision_param": "bfloat16"}}
    ranks = 4 if len(degrees) == 2 else 2
    for sent, _ in pool.run(ranks, partial(collectives, "", degrees, precision)):
        # Loss, norm and tokens are single numbers.
        reduced = {(kind, dtype) for kind, dtype, size in sent if size > 100}
        expected = {(kind, torch.float32) for kind in kinds}
        if "dp_shard" in degrees:
            expected.add(("allgather", torch.bfloat16))
        assert reduced == expected


@pytest.mark.parametrize(("reshards", "gathers"), [("always", 6 + 3), ("never", 6)])
def test_shards_are_gathered_again_where_they_were_freed(
    reshards: str, gathers: int, pool: Pool
) -> None:
    """Units are embedding, four blocks, and norm with output. ZeRO-3 gathers all blocks but the last one again."""
    sections: dict[str, Any] = {
        "parallelism": {"fsdp_reshard_after_forward": reshards},
        "model": {"flavor": "tiny", "overrides": {"n_layers": 4}},
    }
    for sent, shares in pool.run(2, partial(collectives, "", FSDP, sections)):
        assert [kind for kind, _, _ in sent].count("allgather") == gathers
        assert set(shares) == {0.5}


def test_one_reduction_for_all_scales_and_one_gather_for_a_unit(pool: Pool) -> None:
    """A block has seven weights in float8 and two norms: without precomputed scales, each weight of each gather has its reduction."""
    plain, dynamic, precomputed = (
        pool.run(2, partial(collectives, recipe, FSDP, {"float8": settings} if recipe else {}))[
            0
        ][0]
        for recipe, settings in (("", {}), ("tensorwise", GATHER), ("tensorwise", SCALES))
    )
    count = {
        name: [kind for kind, _, _ in sent]
        for name, sent in (("plain", plain), ("each", dynamic), ("all", precomputed))
    }
    assert {kinds.count("allgather") for kinds in count.values()} == {4 + 1}
    others = count["plain"].count("allreduce")
    assert count["each"].count("allreduce") == others + 7 * 3
    assert count["all"].count("allreduce") == others + 1


def peak_mib(function: Any) -> int:
    """Return by how many MiB the memory of this process was larger while a function ran than before it."""
    status = Path("/proc/self/status")

    def value(key: str) -> int:
        (line,) = [line for line in status.read_text().splitlines() if line.startswith(key)]
        return int(line.split()[1]) >> 10

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = value("VmRSS")
    function()
    return value("VmHWM") - before


def memory_of_a_start(folder: Path) -> tuple[float, int, int]:
    """Return the MiB of the whole model, and those that a rank takes to build and initialize its shards, and to load them."""
    sizes = {"n_layers": 12, "dim": 512, "ffn_dim": 1024, "n_heads": 8, "n_kv_heads": 8}
    sections: dict[str, Any] = {"model": {"flavor": "tiny", "overrides": sizes}}
    build("", FSDP)  # what the first model of a process takes
    built: list[Any] = []
    started = peak_mib(lambda: built.append(build("", FSDP, **sections)))
    (train_step,) = built
    whole = sum(p.numel() for p in train_step.parameters) * 4 / 2**20
    state = checkpoints.model_state(train_step.model_parts)
    checkpoints.CheckpointManager(CheckpointSection(), run_dir=folder).save(
        1, state, metadata={}
    )
    path = folder / "checkpoint" / "step-1"
    return whole, started, peak_mib(lambda: checkpoints.load(path, state))


def test_no_rank_holds_the_whole_model(pool: Pool, tmp_path: Path) -> None:
    """Two ranks have a half each, and beside it one parameter at a time."""
    for whole, started, loaded in pool.run(2, memory_of_a_start, tmp_path):
        # Measured 128, 90 and 6; with the whole model, 128 more.
        assert whole > 100 and started > whole / 2
        assert max(started, loaded) < 0.9 * whole
