"""The layouts that the parity tests run, what each rank does, and how two runs are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.steps import build_step
from titan.config.schema import JobConfig
from titan.data.base import TensorBatch
from titan.data.packing import IGNORED, Batch
from titan.numerics.certify.steps import BOUND as BOUND
from titan.numerics.certify.steps import WHAT, largest, micro_batches, record
from titan.numerics.certify.steps import whole_gradients as whole_gradients
from titan.parallel import build_mesh

# The default lane trains three: a wrong gradient shows in the first, a wrong update or state in the second, a schedule in the third.
STEPS = int(os.environ.get("TITAN_PARITY_STEPS", "10"))
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
    keep_in: str = "device"  # or "host": activations wait there
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
# The embedding, all of a block and a matrix of each of the others.
FROZEN = ("tok_embeddings.*", "layers.0.*", "layers.*.attention.wv.weight")
TRACED = "aot_eager"
CUT = "aot_eager_decomp_partition"  # and chooses what to keep, as inductor does
LAYOUTS = [
    # Data parallelism and accumulation
    Layout("one process", accumulation=2),
    Layout("one process", accumulation=4, repeats=True),
    Layout("FSDP2, ZeRO-3", fsdp(2)),
    Layout("FSDP2, ZeRO-3", fsdp(2), accumulation=2),
    Layout("FSDP2, ZeRO-3", fsdp(2), accumulation=4, repeats=True),
    Layout("FSDP2, ZeRO-3", fsdp(4), repeats=True),
    Layout("FSDP2, ZeRO-3", fsdp(4), accumulation=2, repeats=True),
    Layout("FSDP2, ZeRO-3", fsdp(8), repeats=True),
    Layout("FSDP2, ZeRO-2", fsdp(2), settings=NEVER),
    Layout("FSDP2, ZeRO-2", fsdp(2), 2, settings=NEVER),
    Layout("FSDP2, ZeRO-2", fsdp(4), settings=NEVER, repeats=True),
    Layout("FSDP2, two blocks ahead", fsdp(2), settings=(("fsdp_prefetch", 2),)),
    Layout("FSDP2, two blocks in a unit", fsdp(2), settings=IN_UNITS, blocks=5),
    Layout(
        "FSDP2, two blocks in a unit", fsdp(2), 2, settings=IN_UNITS, blocks=5, repeats=True
    ),
    Layout(
        "FSDP2, two blocks in a unit, ZeRO-2", fsdp(2), settings=(*IN_UNITS, *NEVER), blocks=5
    ),
    Layout("FSDP2, three blocks kept", fsdp(2), settings=(("fsdp_kept_blocks", 3),), blocks=5),
    Layout("FSDP2, parameters on the host", fsdp(2), offload=True),
    Layout("FSDP2, tied embeddings", fsdp(2), **TIED),
    Layout("DDP, tied embeddings", REPLICAS, repeats=True, **TIED),
    Layout("FSDP2 x TP+SP, tied embeddings", (*fsdp(2), *tp(2)), repeats=True, **TIED),
    Layout("DDP", REPLICAS),
    Layout("DDP", REPLICAS, accumulation=2),
    Layout("DDP", REPLICAS, accumulation=4, repeats=True),
    Layout("HSDP", (*REPLICAS, *fsdp(2))),
    Layout("HSDP", (*REPLICAS, *fsdp(2)), accumulation=2),
    # Tensor parallelism
    Layout("TP+SP", tp(2)),
    Layout("TP+SP", tp(2), accumulation=2, repeats=True),
    Layout("TP+SP, whole logits", tp(2), settings=(("disable_loss_parallel", True),)),
    Layout("TP+SP, more ranks than key/value heads", tp(4)),
    Layout("FSDP2 x TP+SP", (*fsdp(2), *tp(2))),
    Layout("FSDP2 x TP+SP", (*fsdp(2), *tp(2)), accumulation=2, repeats=True),
    Layout("FSDP2 x TP+SP", (*fsdp(4), *tp(2)), repeats=True),
    Layout("FSDP2 x TP+SP", (*fsdp(2), *tp(4)), repeats=True),
    Layout("DDP x TP+SP", (*REPLICAS, *tp(2))),
    Layout("HSDP x TP+SP", (*REPLICAS, *fsdp(2), *tp(2)), repeats=True),
    # Context parallelism
    Layout("CP all-gather", cp(2)),
    Layout("CP all-gather, not balanced", cp(2), settings=UNBALANCED),
    Layout("CP ring", cp(2), settings=RING, documents=False),
    Layout("CP ring", cp(4), settings=RING, documents=False, repeats=True),
    Layout("CP ring, document masks", cp(2), settings=RING),
    Layout("CP ring, document masks", cp(4), settings=RING, repeats=True),
    Layout("CP ring x TP+SP, document masks", (*cp(2), *tp(2)), settings=RING, repeats=True),
    Layout("CP ring, document masks, not balanced", cp(2), settings=(*RING, *UNBALANCED)),
    Layout("CP ring, document masks, compiled", cp(2), settings=RING, compiled=TRACED),
    Layout(
        "CP ring, document masks, selective AC", cp(2), settings=RING, recompute="selective"
    ),
    Layout("CP ring, not balanced", cp(2), settings=(*RING, *UNBALANCED), documents=False),
    Layout("CP Ulysses", cp(2), settings=ULYSSES),
    Layout("CP Ulysses, more ranks than key/value heads", cp(4), settings=ULYSSES),
    Layout("FSDP2 x CP", (*fsdp(2), *cp(2))),
    Layout("FSDP2 x CP ring", (*fsdp(2), *cp(2)), settings=RING, documents=False),
    Layout("DDP x CP", (*REPLICAS, *cp(2))),
    Layout("HSDP x CP", (*REPLICAS, *fsdp(2), *cp(2)), repeats=True),
    Layout("CP x TP+SP", (*cp(2), *tp(2))),
    Layout("CP ring x TP+SP", (*cp(2), *tp(2)), settings=RING, documents=False),
    Layout("FSDP2 x CP x TP+SP", (*fsdp(2), *cp(2), *tp(2)), repeats=True),
    # Pipeline parallelism
    Layout("PP 1F1B", pp(2)),
    Layout("PP 1F1B", pp(2), accumulation=2),
    Layout("PP 1F1B", pp(4), repeats=True),
    Layout("PP GPipe", pp(2), settings=schedule("GPipe")),
    Layout("PP interleaved 1F1B", pp(2), settings=schedule("Interleaved1F1B")),
    Layout("PP looped BFS", pp(2), settings=schedule("LoopedBFS")),
    Layout("PP interleaved zero bubble", pp(2), settings=ZERO_BUBBLE),
    Layout("PP ZBV zero bubble", pp(2), settings=schedule("ZBVZeroBubble")),
    Layout("PP DualPipeV", pp(2), settings=schedule("DualPipeV")),
    Layout(
        "PP interleaved 1F1B",
        pp(4),
        settings=schedule("Interleaved1F1B"),
        blocks=8,
        repeats=True,
    ),
    Layout("PP x FSDP2", (*pp(2), *fsdp(2))),
    Layout("PP x FSDP2", (*pp(2), *fsdp(2)), accumulation=2, repeats=True),
    Layout("PP interleaved zero bubble x FSDP2", (*pp(2), *fsdp(2)), settings=ZERO_BUBBLE),
    Layout("PP DualPipeV x FSDP2", (*pp(2), *fsdp(2)), settings=schedule("DualPipeV")),
    Layout("PP x DDP", (*pp(2), *REPLICAS)),
    Layout("PP x HSDP", (*pp(2), *REPLICAS, *fsdp(2)), repeats=True),
    Layout("PP x CP", (*pp(2), *cp(2))),
    Layout("PP x TP+SP", (*pp(2), *tp(2))),
    Layout("PP x DDP x TP+SP", (*pp(2), *REPLICAS, *tp(2)), repeats=True),
    Layout("PP x FSDP2 x TP+SP", (*pp(2), *fsdp(2), *tp(2))),
    Layout("PP x CP x TP+SP, FSDP2 over CP", (*pp(2), *cp(2), *tp(2)), repeats=True),
    Layout("PP x FSDP2 x CP x TP+SP", FOUR_AXES, repeats=True),
    # Frozen parameters
    Layout("FSDP2, frozen", fsdp(2), freeze=FROZEN),
    Layout("DDP, frozen", REPLICAS, freeze=FROZEN, repeats=True),
    Layout("FSDP2 x TP+SP, frozen", (*fsdp(2), *tp(2)), freeze=FROZEN),
    Layout("CP, frozen, full AC", cp(2), freeze=FROZEN, recompute="full"),
    Layout("PP x FSDP2, frozen", (*pp(2), *fsdp(2)), freeze=FROZEN),
    Layout(
        "PP zero bubble, frozen",
        pp(2),
        settings=(*ZERO_BUBBLE, ("pipeline_parallel_first_stage_less_layers", 0)),
        freeze=FROZEN,
        blocks=8,
    ),
    Layout(
        "FSDP2, frozen, compiled, full AC",
        fsdp(2),
        freeze=FROZEN,
        compiled=TRACED,
        recompute="full",
    ),
    Layout(
        "FSDP2, frozen, Muon",
        fsdp(2),
        freeze=FROZEN,
        optimizer=(("name", "Muon"), ("ns_dtype", "float32")),
    ),
    # Activation checkpointing
    Layout("one process, full AC", recompute="full"),
    Layout("one process, selective AC", recompute="selective"),
    Layout("FSDP2, full AC", fsdp(2), recompute="full"),
    Layout(
        "FSDP2, full AC, two blocks in a unit", fsdp(2), settings=IN_UNITS, recompute="full"
    ),
    Layout("FSDP2 x TP+SP, selective AC", (*fsdp(2), *tp(2)), recompute="selective"),
    Layout("CP x TP+SP, full AC", (*cp(2), *tp(2)), recompute="full"),
    Layout(
        "PP x FSDP2, two blocks in a unit", (*pp(2), *fsdp(2)), settings=(*IN_UNITS, *ALWAYS)
    ),
    Layout("PP x FSDP2, selective AC", (*pp(2), *fsdp(2)), recompute="selective"),
    Layout("PP zero bubble, full AC", pp(2), settings=ZERO_BUBBLE, recompute="full"),
    Layout(
        "PP zero bubble, every 2nd block AC",
        pp(2),
        settings=ZERO_BUBBLE,
        recompute="2",
        blocks=8,
    ),
    Layout(
        "PP ZBV, every 2nd block AC",
        pp(2),
        settings=schedule("ZBVZeroBubble"),
        recompute="2",
        repeats=True,
        blocks=8,
    ),
    Layout(
        "PP DualPipeV x FSDP2, every 2nd block AC",
        (*pp(2), *fsdp(2)),
        settings=schedule("DualPipeV"),
        recompute="2",
        repeats=True,
        blocks=8,
    ),
    Layout("one process, activations on the host", keep_in="host"),
    Layout("FSDP2 x TP+SP, activations on the host", (*fsdp(2), *tp(2)), keep_in="host"),
    Layout(
        "PP x FSDP2, full AC on the host", (*pp(2), *fsdp(2)), recompute="full", keep_in="host"
    ),
    Layout("PP zero bubble, on the host", pp(2), settings=ZERO_BUBBLE, keep_in="host"),
    Layout("CP, compiled, on the host", cp(2), compiled=TRACED, keep_in="host"),
    # Compiled blocks: by inductor once, elsewhere by the tracer alone, which has the same traps and is quick
    Layout("one process, compiled by inductor", compiled="inductor"),
    Layout("FSDP2, compiled", fsdp(2), compiled=TRACED),
    Layout(
        "FSDP2, compiled, two blocks in a unit", fsdp(2), settings=IN_UNITS, compiled=TRACED
    ),
    Layout("FSDP2 x TP+SP, compiled", (*fsdp(2), *tp(2)), compiled=TRACED),
    Layout("TP+SP, compiled, full AC", tp(2), compiled=TRACED, recompute="full"),
    Layout(
        "TP+SP, compiled, selective AC",
        tp(2),
        compiled=TRACED,
        recompute="selective",
        repeats=True,
    ),
    Layout("TP+SP, compiled, memory budget", tp(2), compiled=CUT, recompute="memory_budget"),
    Layout("CP ring, compiled", cp(2), settings=RING, documents=False, compiled=TRACED),
    Layout("PP x FSDP2, compiled", (*pp(2), *fsdp(2)), compiled=TRACED),
    Layout(
        "PP x FSDP2 x CP x TP+SP, compiled, selective AC",
        FOUR_AXES,
        compiled=TRACED,
        recompute="selective",
        repeats=True,
    ),
]


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


def job_of(layout: Layout, *, precision: str = "float32", steps: int = STEPS) -> JobConfig:
    """Return the job that a layout stands for."""
    degrees = dict(layout.degrees)
    return JobConfig.model_validate(
        {
            "training": {
                "mixed_precision_param": precision,
                "steps": steps,
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
                "cpu_offload": layout.keep_in == "host",
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
                "pipeline_parallel_degree": degrees.get("pp", 1),
                "data_parallel_replicate_degree": degrees.get("dp_replicate", 1),
                "data_parallel_shard_degree": degrees.get("dp_shard", 1),
                "tensor_parallel_degree": degrees.get("tp", 1),
                "context_parallel_degree": degrees.get("cp", 1),
                **dict(layout.settings),
            },
            "loss": {"chunk_tokens": 100, **dict(layout.loss)},
            "task": {"options": dict(layout.task)},
        }
    )


def train(layout: Layout, precision: str = "float32", steps: int = STEPS) -> dict[str, Any]:
    """Run on one rank: losses and norms of each step, whole gradients of the first, whole weights at the end."""
    mesh = build_mesh("cpu", **dict(layout.degrees))
    train_step = build_step(job_of(layout, precision=precision, steps=steps), mesh)
    whole = (layout.batch(layout, step) for step in range(1, steps + 1))
    return record(train_step, (micro_batches(b, mesh, layout.accumulation) for b in whole))


def differences(results: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference in each of what `train` returns."""
    first, *_, last = reference["losses"]
    assert last < first or STEPS < 10  # it trains: not ten idle steps
    return {name: largest(results, reference, name) for name in WHAT}


def mesh_name(layout: Layout) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in layout.degrees) or "-"
