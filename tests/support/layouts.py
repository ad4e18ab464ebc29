"""The layouts that the parity tests run, what each rank does, and how two runs are compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import degrees_of
from tests.support.steps import build_step
from titan.config.schema import JobConfig
from titan.config.toml import tomllib
from titan.data.base import TensorBatch
from titan.data.packing import IGNORED, Batch
from titan.numerics.certify.steps import BOUND as BOUND
from titan.numerics.certify.steps import WHAT, micro_batches, ratios, record
from titan.numerics.certify.steps import whole_gradients as whole_gradients
from titan.parallel import build_mesh

GLOBAL_BATCH, SEQUENCE, VOCABULARY = 8, 64, 2048
# Four blocks are enough for two ranks with two stages each, for a first, a last and two that are neither.
BLOCKS = 4


def text_batch(layout: Layout, step: int) -> TensorBatch:
    tokens, labels, documents = global_batch(step)
    return Batch(
        tokens_BS=tokens,
        labels_BS=labels,
        document_ids_BS=documents if layout.documents else None,
    )


@dataclass(frozen=True)
class Layout:
    name: str
    degrees: tuple[tuple[str, int], ...] = ()
    accumulation: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    recompute: str = "none"  # mode, or "2": every second block
    compiled: str = ""
    float8: str = ""  # recipe
    exact: tuple[str, ...] = ("output",)  # parts of names of layers that float8 leaves alone
    offload: bool = False
    blocks: int = BLOCKS
    # Other rows have the technique, or each pair of the techniques: this one runs with `-m slow`.
    repeats: bool = False
    model: tuple[str, str] = (
        "llama3",
        "tiny",
    )  # family and flavor, or "transformers" and a config.json
    overrides: tuple[tuple[str, Any], ...] = ()
    optimizer: tuple[tuple[str, Any], ...] = ()
    loss: tuple[tuple[str, Any], ...] = ()
    freeze: tuple[str, ...] = ()  # patterns of parameters
    documents: bool = True  # two documents in each sequence, and no attention between them
    batch: Callable[[Layout, int], TensorBatch] = text_batch  # the global batch of a step
    task: tuple[tuple[str, Any], ...] = ()  # options

    @property
    def ranks(self) -> int:
        ranks = 1
        for _, degree in self.degrees:
            ranks *= degree
        return ranks


def each(
    layouts: Iterable[Layout], name: str = "{0.name}-{0.ranks}x{0.accumulation}"
) -> pytest.MarkDecorator:
    """Return the decorator that runs a test on each layout. Those that repeat others are slow."""
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(x, id=name.format(x), marks=[pytest.mark.slow] if x.repeats else [])
            for x in layouts
        ],
    )


def layouts_of(table: str) -> list[Layout]:
    """Return a table of layouts.toml."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[table]
    return [Layout(**{name: _frozen(value) for name, value in row.items()}) for row in rows]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def tp(n: int) -> tuple[tuple[str, int], ...]:
    return (("tp", n),)


def pp(n: int) -> tuple[tuple[str, int], ...]:
    return (("pp", n),)


def schedule(name: str) -> tuple[tuple[str, str], ...]:
    return (("pipeline_parallel_schedule", name),)


def cp(n: int) -> tuple[tuple[str, int], ...]:
    return (("cp", n),)


def fsdp(n: int) -> tuple[tuple[str, int], ...]:
    return (("dp_shard", n),)


UNBALANCED = (("context_parallel_load_balancer", "none"),)
# It begins by predicting the token that it sees, and has to forget that.
TIED: Any = {"overrides": (("tied_embeddings", True),), "optimizer": (("lr", 2e-3),)}
ALWAYS = (("fsdp_reshard_after_forward", "always"),)
NEVER = (("fsdp_reshard_after_forward", "never"),)
IN_UNITS = (("fsdp_blocks_per_unit", 2),)
RING = (("context_parallel_rotate_method", "ring"),)
ULYSSES = (("context_parallel_rotate_method", "ulysses"),)
ZERO_BUBBLE = (("pipeline_parallel_schedule", "InterleavedZeroBubble"),)
REPLICAS = (("dp_replicate", 2),)
FOUR_AXES = (*pp(2), *fsdp(2), *cp(2), *tp(2))
TRACED = "aot_eager"
CUT = "aot_eager_decomp_partition"  # and chooses what to keep, as inductor does
LAYOUTS = layouts_of("dense")


def global_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and document ids of a step; sequences have very different numbers of valid labels."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    labels = rows[:, 1:].clone()
    for sequence in range(GLOBAL_BATCH):
        labels[sequence, : 7 * sequence] = IGNORED
    documents = (torch.arange(SEQUENCE) >= 20).long().expand(GLOBAL_BATCH, -1)
    return rows[:, :-1], labels, documents


def float8_settings(layout: Layout) -> dict[str, Any]:
    """Tensorwise under FSDP gathers in float8, with all scales in one reduction."""
    gather = layout.float8 == "tensorwise" and "dp_shard" in dict(layout.degrees)
    return {
        "emulate": bool(layout.float8),
        "recipe_name": layout.float8 or None,
        "filter_fqns": list(layout.exact),
        "enable_fsdp_float8_all_gather": gather,
        "precompute_float8_dynamic_scale_for_fsdp": gather,
    }


def num_steps() -> int:
    """Return how many steps a row trains.

    The default lane has three: a wrong gradient shows in the first, a wrong update or state in the second, a schedule in the third.
    """
    return int(os.environ.get("TITAN_PARITY_STEPS", "10"))


def job_of(layout: Layout, *, precision: str = "float32", steps: int = 0) -> JobConfig:
    """Return the job that a layout stands for."""
    degrees = dict(layout.degrees)
    return JobConfig.model_validate(
        {
            "training": {
                "mixed_precision_param": precision,
                "steps": steps or num_steps(),
                "enable_cpu_offload": layout.offload,
                "global_batch_size": GLOBAL_BATCH,
                "local_batch_size": GLOBAL_BATCH
                // (
                    degrees.get("dp_replicate", 1)
                    * degrees.get("dp_shard", 1)
                    * layout.accumulation
                ),
            },
            "data": {"document_mask": layout.documents},
            "lr_scheduler": {"warmup_steps": 2},
            # AdamW divides a gradient by its own size: with the usual eps of 1e-8, an element whose gradient is next to
            # nothing takes its rounding error as a full step, on one process as well as on many.
            "optimizer": {"lr": 1e-3, "eps": 1e-6, **dict(layout.optimizer)},
            "activation_checkpoint": {
                "mode": "selective" if layout.recompute == "2" else layout.recompute,
                "selective_ac_option": "2" if layout.recompute == "2" else "op",
            },
            "model": {
                "name": layout.model[0],
                "hf_path" if layout.model[0] == "transformers" else "flavor": layout.model[1],
                "converters": ["quantize.linear.float8"] if layout.float8 else [],
                "overrides": {"n_layers": layout.blocks, **dict(layout.overrides)},
                "freeze": list(layout.freeze),
            },
            "quantize": {"linear": {"float8": float8_settings(layout)}},
            "compile": {
                "enable": bool(layout.compiled),
                "backend": layout.compiled or "inductor",
            },
            "parallelism": {
                **degrees_of({"dp_shard": 1} | degrees),
                **dict(layout.settings),
            },
            "loss": {"chunk_tokens": 100, **dict(layout.loss)},
            "task": {"options": dict(layout.task)},
        }
    )


def train(layout: Layout, precision: str = "float32", steps: int = 0) -> dict[str, Any]:
    """Run on one rank: losses and norms of each step, whole gradients of the first, whole weights at the end."""
    mesh = build_mesh("cpu", **dict(layout.degrees))
    train_step = build_step(job_of(layout, precision=precision, steps=steps), mesh)
    whole = (layout.batch(layout, step) for step in range(1, (steps or num_steps()) + 1))
    loads: list[dict[str, Any]] = []
    balance = train_step.balance

    def batches() -> Iterator[Any]:
        for batch in whole:
            yield micro_batches(batch, mesh, layout.accumulation)
            if balance.loads is not None:
                loads.append(dict(zip(balance.moes, balance.loads.tolist(), strict=True)))

    found = record(train_step, batches())
    moes = balance.moes.items()
    biases = {name: moe.bias.tolist() for name, moe in moes if hasattr(moe, "bias")}
    return found | {"loads": loads, "biases": biases}


def largest(results: list[dict[str, Any]], reference: dict[str, Any], what: str) -> float:
    """Return the largest relative difference over ranks and over steps or parameters."""
    return max(ratios(results, reference, what).values(), default=0.0)


def differences(results: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference in each of what `train` returns."""
    first, *_, last = reference["losses"]
    assert last < first or num_steps() < 10  # it trains: not ten idle steps
    return {name: largest(results, reference, name) for name in WHAT}


def mesh_name(layout: Layout) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in layout.degrees) or "-"
