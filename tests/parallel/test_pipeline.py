"""Pipelines on gloo ranks: the same numbers as one process, the order and the memory that the schedule promises."""

from __future__ import annotations

import contextlib
import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.tables import table, tabled
from titan.parallel import apply_ddp, apply_fsdp, build_mesh, initialize, materialize, pipeline
from titan.parallel.pipeline import Pipeline
from titan.parallel.schedules import (
    Action,
    build_schedule,
    canonical_schedule,
    check_schedule,
    read_schedule,
    splits_backward,
    stage_numbers,
)
from titan.parallel.stage_split import StageSplit, split_modules, split_stages
from titan.parallel.stages import extract_stage, extract_stages

LAYERS, WIDTH, VOCABULARY, BATCH, LENGTH = 8, 8, 11, 12, 5
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", *MULTI)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Only the names of children are those of models/. Positions reach every stage."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
            if positions is not None:
                x = x + 0.01 * positions[..., None]
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x)


def _weights(model: nn.Module) -> nn.Module:
    materialize(model, device="cpu")
    initialize(model, seed=1, std_of=lambda name: None if "norm" in name else 0.3)
    return model


def _meta_model(**options: bool) -> Model:
    with torch.device("meta"):
        return Model(**options)


def _data(batch: int = BATCH, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, batch, LENGTH), generator=generator)
    return tokens, targets, torch.arange(LENGTH).expand(batch, -1)


def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _sent(tokens: Tensor, _: Any) -> Tensor:
    return torch.empty(*tokens.shape, WIDTH, device="meta")


def _gradients(*modules: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for module in modules for n, p in module.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, f"no gradient: {missing}"
    return {
        name: (g.full_tensor() if isinstance(g, DTensor) else g).clone()
        for name, g in found.items()
        if g is not None
    }


def _reference(num_microbatches: int) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses of the microbatches, gradients and logits of one process."""
    model = _weights(_meta_model())
    tokens, targets, positions = _data()
    logits = model(tokens, positions)
    chunks = zip(logits.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
    losses = [_loss_sum(*chunk) for chunk in chunks]
    (torch.stack(losses).sum() / targets.numel()).backward()
    return [loss.item() for loss in losses], _gradients(model), logits.detach()


class _Recorder:
    """What a rank's torch stages really do: the order of computations, and how many microbatches' activations are in
    memory. (Weak references, since saved_tensors_hooks keep what a split backward pass has used alive.)"""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.activations: dict[tuple[int, int], list[StorageWeakRef]] = {}
        self.peak = 0

    @contextlib.contextmanager
    def watching(self, stage: nn.Module, key: tuple[int, int]) -> Iterator[None]:
        """Note the inputs of the stage's weight matrices, which its backward pass needs to the very end. Not
        those of `up`: they may be torch's receive buffers, which stay."""
        seen = self.activations[key] = []
        handles = [
            module.register_forward_pre_hook(
                lambda _, inputs: seen.append(StorageWeakRef(inputs[0].untyped_storage()))
            )
            for name, module in stage.named_modules()
            if name.rpartition(".")[2] in ("down", "output")
        ]
        yield
        for handle in handles:
            handle.remove()
        self.peak = max(self.peak, self.in_flight())

    def in_flight(self) -> int:
        kept = self.activations.values()
        return sum(any(not ref.expired() for ref in references) for references in kept)

    def stage_class(self) -> type:
        recorder = self

        class Recorded(pipeline.Stage):
            def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
                recorder.order.append(f"{self.stage_index}F{fwd_chunk_id}")
                with recorder.watching(self.submod, (self.stage_index, fwd_chunk_id)):
                    return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

            def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
                kind = "B" if kwargs.get("full_backward", True) else "I"
                recorder.order.append(f"{self.stage_index}{kind}{bwd_chunk_id}")
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

            def backward_weight_one_chunk(
                self, bwd_chunk_id: int, *args: Any, **kwargs: Any
            ) -> None:
                recorder.order.append(f"{self.stage_index}W{bwd_chunk_id}")
                super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

        return Recorded


def _build(plan: StageSplit, *, stage_class: type | None = None) -> Pipeline:
    """The pipeline of this rank, over all ranks."""
    mesh = init_device_mesh("cpu", (plan.schedule.num_ranks,), mesh_dim_names=("pp",))
    numbers = plan.schedule.stages_of(mesh.get_local_rank())
    stages = extract_stages(_meta_model(), plan.modules, numbers=numbers)
    for stage in stages.values():
        _weights(stage)
    built = Pipeline(
        stages,
        schedule=plan.schedule,
        mesh=mesh,
        device=torch.device("cpu"),
        loss_fn=_loss_sum,
        boundary=_sent,
    )
    if stage_class is not None:  # as what `Pipeline` builds its stages
        original, pipeline.Stage = pipeline.Stage, stage_class
        try:
            tokens, _, positions = _data()
            count, inputs = plan.schedule.num_microbatches, {"positions": positions}
            built.runner("train", tokens, count, inputs=inputs)
        finally:
            pipeline.Stage = original
    return built


def _run(plan: StageSplit) -> dict[str, Any]:
    """Evaluate, train, evaluate with other shapes, train again; what came out of it."""
    recorder = _Recorder()
    built = _build(plan, stage_class=recorder.stage_class())
    tokens, targets, positions = _data()
    evaluated = built.eval(tokens, targets, positions=positions)
    logits = built.forward(tokens, num_microbatches=3, positions=positions)
    losses = built.step(tokens, targets, divide_by=targets.numel(), positions=positions)
    result = {
        "order": recorder.order,
        "peak": recorder.peak,
        "left": recorder.in_flight(),
        "evaluated": [loss.item() for loss in evaluated],
        "losses": [loss.item() for loss in losses],
        "gradients": _gradients(*built.stages.values()),
        "logits": logits,
    }
    short = _data(2)
    built.eval(short[0], short[1], num_microbatches=1, positions=None)
    built.step(tokens, targets, divide_by=torch.tensor(targets.numel()), positions=positions)
    result["doubled"] = _gradients(*built.stages.values())
    return result


def _relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def _check(results: list[dict[str, Any]], plan: StageSplit) -> None:
    schedule = plan.schedule
    losses, gradients, logits = _reference(schedule.num_microbatches)
    found = {name for result in results for name in result["gradients"]}
    assert found == gradients.keys()
    for rank, result in enumerate(results):
        assert result["order"][: len(schedule.order[rank])] == list(
            map(str, schedule.order[rank])
        )
        assert result["peak"] == schedule.peak_in_flight(rank)
        assert result["left"] == 0, "a training step holds on to activations"
        for name, gradient in result["gradients"].items():
            assert _relative_error(gradient, gradients[name]) < 2e-6, name
            assert _relative_error(result["doubled"][name], 2 * gradients[name]) < 2e-6, name
        last = schedule.num_stages - 1 in schedule.stages_of(rank)
        assert result["losses"] == (pytest.approx(losses, rel=2e-6) if last else [])
        assert result["evaluated"] == (pytest.approx(losses, rel=2e-6) if last else [])
        if last:
            torch.testing.assert_close(result["logits"], logits)
        else:
            assert result["logits"] is None


# Ranks, schedule, microbatches: many, fewer than stages, several stages on the one rank there is.
CASES: list[tuple[int, str, int]] = [(*case,) for case in table(__file__, "cases")]


def _plan(case: tuple[int, str, int]) -> StageSplit:
    ranks, name, count = case
    # A stage with the embedding alone would have no activations to count.
    less = 0 if ranks == 4 else 1
    return split_stages(
        LAYERS,
        num_ranks=ranks,
        num_microbatches=count,
        schedule=name,
        first_less=less,
        last_less=less,
    )


def _run_cases(cases: list[tuple[int, str, int]]) -> list[dict[str, Any]]:
    return [_run(_plan(case)) for case in cases]


@pytest.fixture(scope="module")
def runs(pool) -> dict[tuple[int, str, int], list[dict[str, Any]]]:
    """What each rank reports of each case; one start of the ranks for all cases that have as many."""
    found = {}
    for ranks in sorted({case[0] for case in CASES}):
        cases = [case for case in CASES if case[0] == ranks]
        found |= zip(cases, zip(*pool.run(ranks, _run_cases, cases), strict=True), strict=True)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_compute_what_one_process_computes(runs, case: tuple[int, str, int]) -> None:
    _check(runs[case], _plan(case))


def test_schedule_from_csv(pool, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    # 1F1B with one weight gradient put off, and a stage to spare for rank 1.
    file.write_text(
        "0F0,0F1,,0B0,0F2,0I1,0B2,0W1\n,1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1,1F2,2F2,2I2,1B2,2W2\n"
    )
    plan = split_stages(LAYERS, num_ranks=2, num_microbatches=3, csv=file)
    assert [plan.schedule.stages_of(rank) for rank in (0, 1)] == [[0], [1, 2]]
    assert plan.schedule.splits_backward
    _check(pool.run(2, _run, plan), plan)


def _with_fsdp(name: str, kind: str, shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Gradients of batches of several sizes, summed, over 2 pipeline x 2 data-parallel ranks."""
    axis = "dp_replicate" if kind == "ddp" else "dp_shard"
    mesh = build_mesh("cpu", pp=2, **{axis: 2})
    plan = split_stages(LAYERS, num_ranks=2, num_microbatches=4, schedule=name)
    stages = {}
    for number in plan.schedule.stages_of(mesh.get_local_rank("pp")):
        stage: Any = extract_stage(_meta_model(), plan.modules[number])
        layers = list(stage.layers.values())
        if kind == "ddp":
            apply_ddp(stage, mesh=mesh[axis], blocks=layers, gradients="sum")
        else:
            zero3 = kind == "zero3"
            apply_fsdp(
                stage,
                mesh=mesh[axis],
                blocks=layers,
                gradients="sum",
                reshard_after_forward=zero3,
            )
        stages[number] = _weights(stage)
    built = Pipeline(
        stages,
        schedule=plan.schedule,
        mesh=mesh["pp"],
        device=torch.device("cpu"),
        loss_fn=_loss_sum,
        boundary=_sent,
    )
    for seed, batch in enumerate(shapes):
        tokens, targets, _ = _data(batch, seed=seed)
        half = mesh.get_local_rank(axis)
        built.step(tokens.chunk(2)[half], targets.chunk(2)[half], divide_by=100)
        built.eval(tokens.chunk(2)[half], targets.chunk(2)[half])
    return _gradients(*stages.values())


def _fsdp_error(results: list[dict[str, Tensor]], shapes: tuple[int, ...]) -> float:
    model = _weights(_meta_model())
    for seed, batch in enumerate(shapes):
        tokens, targets, _ = _data(batch, seed=seed)
        (_loss_sum(model(tokens), targets) / 100).backward()
    expected = _gradients(model)
    assert {name for result in results for name in result} == expected.keys()
    return max(_relative_error(g, expected[n]) for result in results for n, g in result.items())


FSDP_CASES = (
    ("1F1B", "zero3"),
    ("Interleaved1F1B", "zero3"),
    ("InterleavedZeroBubble", "zero2"),
    ("ZBVZeroBubble", "zero3"),
    ("DualPipeV", "ddp"),
)


def _with_fsdp_cases(shapes: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return [_with_fsdp(name, kind, shapes) for name, kind in FSDP_CASES]


def test_with_data_parallelism_over_batches_of_several_shapes(pool) -> None:
    """The second shape makes new stages of torch, with gradients of the first in place."""
    shapes = (8, 16)
    ranks = pool.run(4, _with_fsdp_cases, shapes)
    for number, case in enumerate(FSDP_CASES):
        assert _fsdp_error([results[number] for results in ranks], shapes) < 2e-6, case


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_textbook_bubbles_and_peaks(ranks: int, microbatches: int) -> None:
    gpipe = build_schedule(
        "GPipe", num_ranks=ranks, num_stages=ranks, num_microbatches=microbatches
    )
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    assert gpipe.bubble_fraction() == pytest.approx(bubble)
    assert [gpipe.peak_in_flight(rank) for rank in range(ranks)] == [microbatches] * ranks
    if microbatches < ranks:
        return
    one = build_schedule(
        "1f1b", num_ranks=ranks, num_stages=ranks, num_microbatches=microbatches
    )
    assert one.bubble_fraction() == pytest.approx(bubble)
    peaks = [min(microbatches, ranks - rank) for rank in range(ranks)]
    assert [one.peak_in_flight(rank) for rank in range(ranks)] == peaks


def test_textbook_values_of_the_others() -> None:
    ranks, count, loops = 4, 8, 2
    made = {
        name: build_schedule(
            name, num_ranks=ranks, num_stages=loops * ranks, num_microbatches=count
        )
        for name in MULTI
    }
    # Megatron-LM (arXiv:2104.04473): the bubble shrinks by the number of loops.
    bubble = (ranks - 1) / (loops * count + ranks - 1)
    assert made["Interleaved1F1B"].bubble_fraction() == pytest.approx(bubble)
    assert made["LoopedBFS"].bubble_fraction() == pytest.approx(bubble)
    warm_up = [2 * (ranks - 1 - rank) + (loops - 1) * ranks + 1 for rank in range(ranks)]
    assert [made["Interleaved1F1B"].peak_in_flight(rank) for rank in range(ranks)] == warm_up
    assert made["LoopedBFS"].peak_in_flight(0) == loops * count
    # Zero bubble (arXiv:2401.10241): 1F1B's memory, or that of a V, for a third of the bubble.
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert made[name].bubble_fraction() == pytest.approx(1 / 17)
    for rank in range(ranks):
        assert made["ZBVZeroBubble"].peak_in_flight(rank) == 2 * ranks
        assert made["DualPipeV"].peak_in_flight(rank) == 2 * ranks + 1


def test_split_counts_embedding_and_output() -> None:
    def sizes(*args: int, **options: Any) -> list[int]:
        names = split_modules(*args, **options)
        assert names[0][0] == "tok_embeddings" and names[-1][-2:] == ["norm", "output"]
        layers = [name for stage in names for name in stage if name.startswith("layers.")]
        assert layers == [f"layers.{i}" for i in range(args[0])]
        return [sum(name.startswith("layers.") for name in stage) for stage in names]

    assert sizes(6, num_stages=1) == [6]
    assert sizes(6, num_stages=2) == [3, 3]
    assert sizes(6, num_stages=4) == [1, 2, 2, 1]
    assert sizes(8, num_stages=4) == [1, 3, 3, 1]
    assert sizes(9, num_stages=4) == [2, 3, 3, 1]
    assert sizes(8, num_stages=4, first_less=0, last_less=0) == [2, 2, 2, 2]
    assert sizes(8, num_stages=8) == [0, 1, 1, 1, 1, 2, 2, 0]
    assert sizes(126, num_stages=16) == [7, *[8] * 14, 7]  # Llama 3 405B (arXiv:2407.21783)


@tabled("options, message")
def test_split_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_modules(6, **options)


def test_plan_takes_names_and_layers_per_stage() -> None:
    names = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    plan = split_stages(2, num_ranks=2, num_microbatches=2, modules=names)
    assert plan.modules == names and plan.schedule.name == "1F1B"
    plan = split_stages(
        6, num_ranks=2, num_microbatches=4, schedule="interleaved1f1b", layers_per_stage=2
    )
    assert plan.schedule.num_stages == 4
    with pytest.raises(ValueError, match="1 stage on each rank: 2 ranks take 2 stages, not 4"):
        split_stages(6, num_ranks=2, num_microbatches=4, layers_per_stage=2)


def test_take_stage_keeps_names_and_nothing_else() -> None:
    model = _meta_model()
    stage = extract_stage(model, ["layers.4", "norm", "output"])
    assert {name.rpartition(".")[0] for name, _ in stage.named_parameters()} == {
        "layers.4.up",
        "layers.4.down",
        "norm",
        "output",
    }
    assert stage.tok_embeddings is None and len(model.layers) == LAYERS
    with pytest.raises(ValueError, match=r"no module 'layer\.4'; did you mean 'layers\.4'"):
        extract_stage(model, ["layer.4"])


def test_every_module_has_one_stage() -> None:
    model = _meta_model()
    modules = split_modules(LAYERS, num_stages=2)
    assert sorted(extract_stages(model, modules, numbers=[1])) == [1]
    forgotten = [modules[0][:-1], modules[1]]
    with pytest.raises(ValueError, match=r"'layers\.3' is in no stage; put it into one"):
        extract_stages(model, forgotten, numbers=[0])
    twice = [modules[0], ["layers.0", *modules[1]]]
    with pytest.raises(ValueError, match=r"'layers\.0' is in stages 0 and 1; put it into one"):
        extract_stages(model, twice, numbers=[0])
    model.scale = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(ValueError, match="'scale' is in no module"):
        extract_stages(model, modules, numbers=[0])


def test_modules_without_parameters_may_be_in_several_stages_but_must_be_in_one() -> None:
    model, modules = _meta_model(), split_modules(LAYERS, num_stages=2)
    model.positions = nn.Identity()
    with pytest.raises(ValueError, match="'positions' is in no stage; put it into one"):
        extract_stages(model, modules, numbers=[0])
    first = extract_stages(model, [["positions", *modules[0]], modules[1]], numbers=[0, 1])
    assert first[0].positions is not None and first[1].positions is None
    both = extract_stages(model, [["positions", *names] for names in modules], numbers=[0, 1])
    assert all(stage.positions is not None for stage in both.values())


def test_a_list_of_layers_is_told_to_be_a_dict() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(
        ValueError, match=r"'blocks' is in no stage; .* must be an nn\.ModuleDict"
    ):
        extract_stages(model, [["blocks.0"], ["blocks.1"]], numbers=[0])


def test_tied_embeddings_are_refused_across_stages() -> None:
    model = _meta_model(tied=True)
    with pytest.raises(ValueError, match=r"output\.weight is tied"):
        extract_stage(model, ["tok_embeddings", "layers.0"])
    stage: Any = extract_stage(model, ["tok_embeddings", "layers.0", "output"])
    assert stage.output.weight is stage.tok_embeddings.weight


def test_names_and_stage_numbers() -> None:
    assert canonical_schedule("flexible_interleaved_1f1b") == "Interleaved1F1B"
    assert canonical_schedule("Flexible-Interleaved-1F1B") == "Interleaved1F1B"
    assert [name for name in SCHEDULES if splits_backward(name)] == list(MULTI[2:])
    with pytest.raises(
        ValueError, match="unknown pipeline schedule '1F2B'; did you mean '1F1B'"
    ):
        canonical_schedule("1F2B")
    assert stage_numbers(1, num_ranks=4, stages_per_rank=3) == [1, 5, 9]
    assert stage_numbers(1, num_ranks=4, stages_per_rank=2, style="v") == [1, 6]


@tabled("name, stages, microbatches, message")
def test_numbers_that_do_not_fit(
    name: str, stages: int, microbatches: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        check_schedule(name, num_ranks=4, num_stages=stages, num_microbatches=microbatches)


def test_csv_round_trip_and_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    made = build_schedule("DualPipeV", num_ranks=2, num_stages=4, num_microbatches=4)
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows(made.order)
    assert read_schedule(file).order == made.order
    assert made.order[0][0] == Action(0, "F", 0)
    for text, message in (
        ("0F0,0B0\n1F0,1SEND_F0,1B0\n", r"s\.csv:2: '1SEND_F0' is no computation"),
        ("0F0\n" + "0" * 200_000, r"s\.csv:2: '0{40}' is no computation"),
        ("0F0,0B0\n1F0\n", "microbatch 0 has the actions 'F' in stage 1"),
        ("0F0,0B0,1B0\n1F0\n", "stage 1 is on ranks"),
        ("0B0,0F0\n1F0,1B0\n", "microbatch 0 has the actions 'BF' in stage 0"),
        (
            "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
            "rank 0 at 0B0, rank 1 at 1F1 would wait forever",
        ),
        ("", "no actions"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_schedule(file)
    file.write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(ValueError, match="for 1 microbatches, and there are 4"):
        split_stages(2, num_ranks=2, num_microbatches=4, csv=file)
    with pytest.raises(ValueError, match="has 2 stages, and 1 layers in each would make 4"):
        split_stages(2, num_ranks=2, num_microbatches=1, csv=file, layers_per_stage=1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: cannot be read: it is not a regular file"):
        read_schedule(tmp_path / "pipe")
