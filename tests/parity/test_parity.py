"""One process, FSDP2, HSDP and DDP, with and without accumulation: the same losses, norms, gradients and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pool import Pool
from titan.config.sections import JobConfig
from titan.data.packing import IGNORED
from titan.parallel import build_mesh
from titan.parallel.mesh import axis_rank, axis_size
from titan.program import build_program

STEPS, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 10, 8, 64, 2048
BOUND = 1e-5


@dataclass(frozen=True)
class Batch:
    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor | None = None
    document_ids_BS: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    name: str
    degrees: tuple[tuple[str, int], ...] = ()
    accumulation: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    documents: bool = True  # two documents in each sequence, and no attention between them

    @property
    def ranks(self) -> int:
        ranks = 1
        for _, degree in self.degrees:
            ranks *= degree
        return ranks


def tp(n: int, **more: int) -> tuple[tuple[str, int], ...]:
    return (*more.items(), ("tp", n))


def pp(n: int, **more: int) -> tuple[tuple[str, int], ...]:
    return (("pp", n), *more.items())


def schedule(name: str) -> tuple[tuple[str, str], ...]:
    return (("pipeline_parallel_schedule", name),)


def cp(n: int, **more: int) -> tuple[tuple[str, int], ...]:
    return (*more.items(), ("cp", n))


def rotate(method: str) -> tuple[tuple[str, str], ...]:
    return (("context_parallel_rotate_method", method),)


def fsdp(n: int) -> tuple[tuple[str, int], ...]:
    return (("dp_shard", n),)


UNBALANCED = (("context_parallel_load_balancer", "none"),)
NEVER = (("fsdp_reshard_after_forward", "never"),)
LAYOUTS = [
    Layout("one process", accumulation=2),
    Layout("one process", accumulation=4),
    Layout("FSDP2, ZeRO-3", fsdp(2)),
    Layout("FSDP2, ZeRO-3", fsdp(2), accumulation=2),
    Layout("FSDP2, ZeRO-3", fsdp(2), accumulation=4),
    Layout("FSDP2, ZeRO-2", fsdp(2), settings=NEVER),
    Layout("FSDP2, ZeRO-3, 4 ranks", fsdp(4)),
    Layout("FSDP2, ZeRO-3, 4 ranks", fsdp(4), accumulation=2),
    Layout("FSDP2, ZeRO-2, 4 ranks", fsdp(4), settings=NEVER),
    Layout("DDP", (("dp_replicate", 2),)),
    Layout("DDP", (("dp_replicate", 2),), accumulation=2),
    Layout("DDP", (("dp_replicate", 2),), accumulation=4),
    Layout("TP+SP", tp(2)),
    Layout("TP+SP, whole logits", tp(2), settings=(("disable_loss_parallel", True),)),
    Layout("TP+SP, 4 ranks on 2 key/value heads", tp(4)),
    Layout("FSDP2 x TP+SP", tp(2, dp_shard=2)),
    Layout("DDP x TP+SP", tp(2, dp_replicate=2)),
    Layout("CP all-gather", cp(2)),
    Layout("CP ring", cp(2), settings=rotate("ring"), documents=False),
    Layout("CP ring, 4 ranks", cp(4), settings=rotate("ring"), documents=False),
    Layout(
        "CP ring, not balanced",
        cp(2),
        settings=(*rotate("ring"), *UNBALANCED),
        documents=False,
    ),
    Layout("CP Ulysses", cp(2), settings=rotate("ulysses")),
    Layout("CP Ulysses, 4 ranks on 2 key/value heads", cp(4), settings=rotate("ulysses")),
    Layout("FSDP2 x CP", cp(2, dp_shard=2)),
    Layout("DDP x CP", cp(2, dp_replicate=2)),
    Layout("CP x TP+SP", (*cp(2), *tp(2))),
    Layout("PP 1F1B", pp(2)),
    Layout("PP GPipe", pp(2), settings=schedule("GPipe")),
    Layout("PP interleaved 1F1B", pp(2), settings=schedule("Interleaved1F1B")),
    Layout("PP looped BFS", pp(2), settings=schedule("LoopedBFS")),
    Layout("PP interleaved zero bubble", pp(2), settings=schedule("InterleavedZeroBubble")),
    Layout("PP ZBV zero bubble", pp(2), settings=schedule("ZBVZeroBubble")),
    Layout("PP DualPipeV", pp(2), settings=schedule("DualPipeV")),
    Layout("PP 1F1B", pp(2), accumulation=2),
    Layout("PP 1F1B, 4 ranks", pp(4)),
    Layout("PP x FSDP2", pp(2, dp_shard=2)),
    Layout("PP x TP+SP", (*pp(2), *tp(2))),
    Layout("PP x CP", (*pp(2), *cp(2))),
    Layout(
        "PP interleaved zero bubble x FSDP2",
        pp(2, dp_shard=2),
        settings=schedule("InterleavedZeroBubble"),
    ),
    Layout("PP x FSDP2 x TP+SP", (*pp(2, dp_shard=2), *tp(2))),
    Layout("HSDP", (("dp_replicate", 2), ("dp_shard", 2))),
    Layout("HSDP", (("dp_replicate", 2), ("dp_shard", 2)), accumulation=2),
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


def train(layout: Layout, precision: str = "float32") -> dict[str, Any]:
    """Run on one rank: losses and norms of each step, whole gradients of the first, whole weights at the end."""
    mesh = build_mesh("cpu", **dict(layout.degrees))
    config = JobConfig.model_validate(
        {
            "training": {
                "mixed_precision_param": precision,
                "steps": STEPS,
                "local_batch_size": GLOBAL_BATCH
                // (axis_size(mesh, "dp_replicate", "dp_shard") * layout.accumulation),
            },
            "lr_scheduler": {"warmup_steps": 2},
            # AdamW divides a gradient by its own size: with the usual eps of 1e-8, an element whose gradient is next to
            # nothing takes its rounding error as a full step, on one process as well as on many.
            "optimizer": {"lr": 1e-3, "eps": 1e-6},
            "parallelism": {
                "pipeline_parallel_degree": dict(layout.degrees).get("pp", 1),
                **dict(layout.settings),
            },
            "loss": {"chunk_tokens": 100},
        }
    )
    program = build_program(config, device=torch.device("cpu"), mesh=mesh)
    parameters = {n: p for part in program.parts for n, p in part.named_parameters()}
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        if not gradients:
            gradients.update({n: _whole(p.grad) for n, p in parameters.items()})

    program.optimizer.register_step_pre_hook(keep_gradients)
    world = axis_size(mesh, "dp_replicate", "dp_shard")
    rank = axis_rank(mesh, "dp_replicate", "dp_shard")
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        parts = [t.chunk(world * layout.accumulation) for t in global_batch(step)]
        mine = range(rank, world * layout.accumulation, world)
        batches = [
            Batch(
                parts[0][i], parts[1][i], document_ids_BS=parts[2][i] if layout.documents else None
            )
            for i in mine
        ]
        report = program.train_step(batches, step=step)
        losses.append(report.loss.item())
        norms.append(report.grad_norm.item())
    weights = {n: _whole(p).clone() for n, p in parameters.items()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.fixture(scope="module")
def references(pool: Pool) -> dict[bool, dict[str, Any]]:
    """One process, with and without documents."""
    return {d: pool.run(1, train, Layout("one process", documents=d))[0] for d in (True, False)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.name}-{x.ranks}x{x.accumulation}")
def test_equals_one_process(layout: Layout, references, pool: Pool, parity_table) -> None:
    reference = references[layout.documents]
    parity_table.expected = len(LAYOUTS)
    results = pool.run(layout.ranks, train, layout)
    assert (
        reference["losses"][-1] < reference["losses"][0]
    )  # it trains: these are not ten idle steps
    differences = {
        "loss": _largest(results, reference, "losses"),
        "norm": _largest(results, reference, "norms"),
        "gradients": _largest(results, reference, "gradients"),
        "weights": _largest(results, reference, "weights"),
    }
    assert max(differences.values()) < BOUND, differences
    parity_table.add(
        layout.name,
        ranks=layout.ranks,
        accumulation=layout.accumulation,
        differences=differences,
        bound=BOUND,
    )


def test_bf16_computes_the_same_on_every_layout(references, pool: Pool) -> None:
    """bf16 compute, fp32 reduction. Against itself on one process the difference is that of fp32 sums, where a value
    falls on the other side of a bf16 rounding; against fp32 it is bf16's 8 bits.
    """
    reference = references[True]
    alone = pool.run(1, train, Layout("one process"), "bfloat16")[0]
    assert alone["gradients"]["norm.weight"].dtype == torch.float32
    for layout in (Layout("FSDP2", fsdp(2)), Layout("DDP", (("dp_replicate", 2),))):
        results = pool.run(2, train, layout, "bfloat16")
        assert _largest(results, alone, "losses") < 1e-4
        assert _largest(results, alone, "norms") < 2e-3
        assert _largest(results, reference, "losses") < 1e-3
        gradients = _largest(results, reference, "gradients")
        assert 1e-3 < gradients < 4e-2  # and it is bf16 that was used


def _largest(results: list[dict[str, Any]], reference: dict[str, Any], what: str) -> float:
    """Largest relative difference over ranks and over steps or parameters."""
    expected = reference[what]
    if isinstance(expected, dict):
        assert set().union(*(result[what] for result in results)) == expected.keys()
    largest = 0.0
    for result in results:
        if isinstance(expected, dict):
            pairs = [
                (
                    torch.linalg.vector_norm(result[what][n] - e).item(),
                    torch.linalg.vector_norm(e).item(),
                )
                for n, e in expected.items()
                if n in result[what]  # else it is another pipeline stage's
            ]
        else:
            pairs = [(abs(a - b), abs(b)) for a, b in zip(result[what], expected, strict=True)]
        largest = max(largest, *(difference / size for difference, size in pairs))
    return largest
