"""Float8 and MXFP8, emulated: that it is 8 bits, and that layouts, recomputation and compilation do not change its numbers.

Two runs that cast equal tensors compute equal numbers. Where layouts add in another order (TP, CP), a value may fall on the other
side of a float8 rounding: a step of 1/8 of it (e4m3) or 1/4 (e5m2), in one element of thousands, and what follows from it. FLIPS bounds
that; another scale would show as ROUNDING, tenfold and more.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.commands import Shell
from tests.support.jobs import degrees_of
from tests.support.losses import cross_entropy_sum
from tests.support.operations import Watch
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.checkpoint import manager as checkpoints
from titan.config.schema import CheckpointSection, JobConfig
from titan.data.packing import Batch
from titan.losses.loss import logits_fn_of
from titan.models.llama3 import FLAVORS, build_model
from titan.parallel import apply_float8, apply_fsdp, build_mesh
from titan.parallel.float8 import RECIPES, Float8Error, plain, require_hardware, table
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.step.train_step import TrainStep

pytest.importorskip("torchao")

GLOBAL_BATCH, SEQUENCE, VOCABULARY = 8, 64, 512
EXACT, FLIPS, ROUNDING = 1e-5, 1e-2, 0.15
GATHER = {"enable_fsdp_float8_all_gather": True}
SCALES = {**GATHER, "precompute_float8_dynamic_scale_for_fsdp": True}
SELECTIVE = {"activation_checkpoint": {"mode": "selective"}}
TRACED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["model"]}}


@dataclass
class Run:
    """What a rank computed: losses, gradients of the first step, weights after the last, all whole."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def job(recipe: str, degrees: dict[str, int], **sections: Any) -> JobConfig:
    """recipe "": no conversion. sections: merged into those of the job; `float8` are keys of the converter's."""
    name = "mx" if recipe.startswith("mx") else "float8"
    converter = {"emulate": True, "recipe_name": recipe, **sections.pop("float8", {})}
    dp = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    data: dict[str, dict[str, Any]] = {
        # As many key/value heads as others: parts of 32 rows for MXFP8, also on two ranks.
        "model": {
            "flavor": "tiny",
            "overrides": {
                "n_layers": 2,
                "n_kv_heads": 4,
                "vocab_size": VOCABULARY,
            },
        },
        "training": {
            "mixed_precision_param": "float32",
            "local_batch_size": GLOBAL_BATCH // dp,
        },
        "lr_scheduler": {"warmup_steps": 2},
        "optimizer": {"lr": 1e-3, "eps": 1e-6},
        "parallelism": degrees_of(degrees),
    }
    if recipe:
        data["model"]["converters"] = [f"quantize.linear.{name}"]
        data["quantize"] = {"linear": {name: converter}}
    for key, change in sections.items():
        data[key] = data.get(key, {}) | change
    return JobConfig.model_validate(data)


def build(recipe: str, degrees: dict[str, int], **sections: Any) -> TrainStep:
    config = job(recipe, degrees, **sections)
    return build_step(config, build_mesh("cpu", **degrees))


def global_batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)


def steps(train_step: TrainStep, numbers: range, *, split: int = 1) -> list[float]:
    """Train on this rank's part of each step's global batch, in `split` micro-batches; the losses."""
    axes = ("dp_replicate", "dp_shard")
    world, rank = axis_size(train_step.mesh, *axes), axis_rank(train_step.mesh, *axes)
    losses = []
    for number in numbers:
        parts = global_batch(number).chunk(world * split)
        mine = [
            Batch(tokens_BS=p[:, :-1], labels_BS=p[:, 1:].contiguous())
            for p in parts[rank::world]
        ]
        losses.append(train_step.train(mine, step=number).loss.item())
    return losses


def weights(train_step: TrainStep) -> dict[str, Tensor]:
    return {
        canonical_name(n): whole(p)
        for part in train_step.model_parts
        for n, p in part.named_parameters()
    }


def train(
    recipe: str, degrees: dict[str, int], *, num_steps: int = 1, split: int = 1, **sections: Any
) -> Run:
    train_step = build(recipe, degrees, **sections)
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        named = [pair for part in train_step.model_parts for pair in part.named_parameters()]
        if not gradients:
            gradients.update({canonical_name(n): whole(p.grad) for n, p in named})

    train_step.optimizer.register_step_pre_hook(keep_gradients)
    losses = steps(train_step, range(1, num_steps + 1), split=split)
    return Run(losses, gradients, weights(train_step))


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = plain(tensor.detach())
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter; `found` may be a pipeline stage's."""
    norm = torch.linalg.vector_norm
    return max((norm(x - expected[n]) / norm(expected[n])).item() for n, x in found.items())


# ---- one process -------------------------------------------------------------------------------


OUTPUT = "the output layer: its rounding would go straight into the loss"


def meta_model(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return build_model(dataclasses.replace(FLAVORS["tiny"], n_layers=2, **sizes))


def kept(model: nn.Module, **settings: Any) -> dict[str, str]:
    """Why which layers stay, those of block 0 and the rest."""
    report = apply_float8(model, emulate=True, **settings)
    return {c.name: c.kept for c in report if c.kept and not c.name.startswith("layers.1.")}


def test_which_layers_stay_in_high_precision_and_why() -> None:
    assert kept(meta_model()) == {"output": OUTPUT}
    assert kept(meta_model(), filter_fqns=[]) == {}
    assert kept(meta_model(tied_embeddings=True), filter_fqns=["w2"]) == {
        "layers.0.feed_forward.w2": 'filter_fqns has "w2"',
        "output": "shares its weight with another module",
    }
    assert kept(meta_model(ffn_dim=200), filter_fqns=[], keep={"output": "mine"}) == {
        "layers.0.feed_forward.w1": "200 x 64 does not divide by 16",
        "layers.0.feed_forward.w2": "64 x 200 does not divide by 16",
        "layers.0.feed_forward.w3": "200 x 64 does not divide by 16",
        "output": "mine",
    }
    small = kept(meta_model(), filter_fqns=["auto_filter_small_kn"])
    assert small["layers.0.attention.wq"] == "too small to gain (auto_filter_small_kn)"


def test_an_output_layer_of_any_name_stays_in_high_precision() -> None:
    """A list of blocks without one is converted whole."""

    def model(**others: nn.Module) -> nn.Module:
        blocks = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(32, 32)})])
        found = nn.Module()
        for name, part in {"stem": nn.Linear(32, 32), "h": blocks, **others}.items():
            found.add_module(name, part)
        return found

    assert kept(model()) == {}
    with_head = model(lm_head=nn.Linear(32, 64))
    assert kept(with_head) == {"lm_head": OUTPUT}
    assert type(with_head.get_submodule("lm_head")) is nn.Linear
    # A second call leaves alone what the first one converted.
    both = model(stem=with_head.get_submodule("stem"))
    assert kept(both) == {"stem": "what Float8Linear adds to nn.Linear would be lost"}


class Adapted(nn.Linear):
    """As a LoRA layer is: more parameters, another forward."""


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8_cublas"])
def test_a_subclass_of_linear_is_left_alone(recipe: str) -> None:
    model = nn.ModuleDict({"w": Adapted(32, 32), "plain": nn.Linear(32, 32)})
    assert kept(model, recipe=recipe) == {"w": "what Adapted adds to nn.Linear would be lost"}
    assert type(model["w"]) is Adapted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "tensorwize"}, "no recipe tensorwize, but tensorwise, rowwise, "),
        ({"recipe": "mxfp8_rciel"}, "no recipe mxfp8_rciel, but .*, mxfp8_cublas_rceil"),
        (
            {"recipe": "rowwise", "fsdp_all_gather": True},
            "rowwise cannot be gathered in float8",
        ),
    ],
)
def test_recipes_that_do_not_exist(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Float8Error, match=message):
        apply_float8(meta_model(), emulate=True, **settings)


def test_it_is_a_ranks_part_that_must_divide() -> None:
    plan = {"layers.*.attention.w[kv]": "kv_colwise", "layers.*.feed_forward.w2": "rowwise"}
    split = {"tensor_plan": plan, "tp": 4, "num_kv_heads": 2, "filter_fqns": []}
    few = "4 tensor-parallel ranks are more than 2 key/value heads"
    assert kept(meta_model(), **split) == {
        "layers.0.attention.wk": few,
        "layers.0.attention.wv": few,
    }
    split |= {"tp": 2, "recipe": "mxfp8_cublas"}
    assert kept(meta_model(), **split)["layers.0.attention.wk"] == (
        "16 x 64 on a rank does not divide by 32"
    )
    assert "layers.0.feed_forward.w2" not in kept(meta_model(), **split)


def test_the_table_has_a_line_for_each_kind_of_layer() -> None:
    report = apply_float8(meta_model(), emulate=True)
    lines = table(report, recipe="tensorwise", emulated=True, compiled=False).splitlines()
    assert lines[0] == "tensorwise, emulated: 14 of 15 linear layers converted"
    assert [line.split() for line in lines[1:3]] == [
        ["layers.*.attention.wq", "2", "of", "64", "x", "64", "converted"],
        ["layers.*.attention.wk", "2", "of", "32", "x", "64", "converted"],
    ]
    assert lines[-1].endswith(f"high precision: {OUTPUT}")
    assert "mostly slower" in table(report, recipe="rowwise", emulated=False, compiled=False)


@pytest.fixture(scope="module")
def fp32(pool: Pool) -> Run:
    return pool.run(1, partial(train, "", {}))[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_fp32_within_8_bits(recipe: str, fp32: Run, pool: Pool) -> None:
    """Measured 0.04 to 0.08, the most in tensorwise; initial losses differ by 1e-5."""
    (run,) = pool.run(1, partial(train, recipe, {}))
    assert 0.02 < distance(run.gradients, fp32.gradients) < ROUNDING
    assert run.losses[0] == pytest.approx(fp32.losses[0], abs=2e-4)
    assert run.losses != fp32.losses


# ---- the output layer --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8_cublas"])
def test_the_chunked_loss_multiplies_as_the_layer_does(recipe: str) -> None:
    """Chunk by chunk: its casts are those of the layer applied to a chunk, and autograd's."""
    model = nn.Module()
    model.add_module("output", nn.Linear(128, 256, bias=False))
    apply_float8(model, recipe=recipe, emulate=True, filter_fqns=[])
    output = model.get_submodule("output")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 128, generator=generator).requires_grad_()
    labels = torch.randint(256, (512,), generator=generator)
    weight = output.get_parameter("weight")
    results = []
    for _ in range(2):
        # The second time by plain autograd.
        if not results:
            loss = cross_entropy_sum(
                x, labels, chunk_tokens=100, weight=weight, logits_fn=logits_fn_of(output)
            )
        else:
            parts = zip(x.split(128), labels.split(128), strict=True)
            each = [
                nn.functional.cross_entropy(output(a), b, reduction="sum") for a, b in parts
            ]
            loss = torch.stack(each).sum()
        results.append([loss.detach(), *torch.autograd.grad(loss, [x, weight])])
    norm = torch.linalg.vector_norm
    for found, expected in zip(*results, strict=True):
        # A gradient next to a rounding boundary falls on its other side.
        assert norm(found - expected) / norm(expected) < 1e-3
    high = torch.nn.functional.linear(x, weight)
    exact = nn.functional.cross_entropy(high, labels, reduction="sum")
    (d_x,) = torch.autograd.grad(exact, x)
    assert 0.01 < norm(results[0][1] - d_x) / norm(d_x) < 0.15


def output_runs(degrees: dict[str, int], split: int) -> list[Run]:
    """The output layer stays, multiplies by itself and, all tokens at once and in chunks of half of them, within the loss."""
    gathers = "dp_shard" in degrees
    converted = {"float8": {"filter_fqns": [], "enable_fsdp_float8_all_gather": gathers}}
    losses = [{}, {"chunk_output": False}, {"chunk_tokens": 256}, {"chunk_tokens": 128}]
    return [
        train(
            "tensorwise",
            degrees,
            num_steps=2,
            split=split,
            loss=loss,
            **(converted if loss else {}),
        )
        for loss in losses
    ]


def test_the_output_layer_in_every_layout(pool: Pool) -> None:
    [[stays, alone, whole, chunks]] = pool.run(1, output_runs, {}, 2)
    # Rounded logits: the loss of 512 tokens moves by some thousandths.
    assert distance(alone.gradients, stays.gradients) > 0.02
    assert 1e-4 < abs(alone.losses[0] - stays.losses[0]) < 1e-2
    assert whole.losses[0] == pytest.approx(alone.losses[0], abs=1e-6)
    assert distance(whole.gradients, alone.gradients) < FLIPS
    assert distance(chunks.gradients, alone.gradients) < ROUNDING
    for _, _, *sharded in pool.run(2, output_runs, {"dp_shard": 2}, 1):
        for found, expected in zip(sharded, (whole, chunks), strict=True):
            assert found.losses == pytest.approx(expected.losses, abs=1e-6)
            assert distance(found.gradients, expected.gradients) < EXACT


def train_each(recipe: str, changes: list[dict[str, Any]]) -> list[Run]:
    return [train(recipe, {}, num_steps=2, **change) for change in changes]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8_cublas"])
def test_recomputed_and_compiled_to_the_same_bits(recipe: str, pool: Pool) -> None:
    changes = [{}, {"activation_checkpoint": {"mode": "full"}}, SELECTIVE, TRACED]
    [[plain_run, *runs]] = pool.run(1, train_each, recipe, changes)
    for run, change in zip(runs, changes[1:], strict=True):
        assert run.losses == plain_run.losses, change
        assert distance(run.weights, plain_run.weights) == 0, change


# ---- layouts -----------------------------------------------------------------------------------

FSDP, TP = {"dp_shard": 2}, {"tp": 2}
HSDP, PP = {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2}
ZERO_BUBBLE = {
    "parallelism": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "InterleavedZeroBubble",
    }
}
# Recipe; degrees; micro-batches of one process that cast the same tensors; bound; keys of float8; other sections
LAYOUTS: list[tuple[str, dict[str, int], int, float, dict[str, Any], dict[str, Any]]] = [
    ("tensorwise", FSDP, 2, EXACT, {}, {}),
    ("tensorwise", FSDP, 2, EXACT, GATHER, {}),
    ("tensorwise", FSDP, 2, EXACT, SCALES, {}),
    ("tensorwise", FSDP, 2, EXACT, SCALES, {**TRACED, **SELECTIVE}),
    ("tensorwise", HSDP, 4, EXACT, SCALES, {}),
    ("tensorwise", {"dp_replicate": 2}, 2, EXACT, GATHER, {}),  # nothing is gathered: ignored
    ("mxfp8_cublas", FSDP, 2, EXACT, {}, {}),
    ("tensorwise", PP, 8, EXACT, {}, {}),
    ("rowwise", PP, 8, EXACT, {}, ZERO_BUBBLE),
    ("tensorwise", {**PP, **FSDP}, 8, EXACT, SCALES, {**ZERO_BUBBLE, **TRACED}),
    ("tensorwise", {**PP, **FSDP}, 8, EXACT, SCALES, {}),
    ("tensorwise", TP, 1, FLIPS, {}, {}),
    ("tensorwise", TP, 1, FLIPS, {}, TRACED),
    ("rowwise", TP, 1, FLIPS, {}, {}),
    ("mxfp8_cublas", TP, 1, FLIPS, {}, {}),
    (
        "tensorwise",
        {**FSDP, **TP},
        2,
        FLIPS,
        GATHER,
        {},
    ),  # scales over both axes, asked for or not
    ("rowwise", {"cp": 2}, 1, FLIPS, {}, {}),  # scales are a token's own
]


@pytest.mark.parametrize(
    ("recipe", "degrees", "split", "bound", "float8", "sections"),
    LAYOUTS,
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else None,
)
def test_layouts_compute_what_one_process_does(
    recipe: str,
    degrees: dict[str, int],
    split: int,
    bound: float,
    float8: dict[str, Any],
    sections: dict[str, Any],
    pool: Pool,
    references: dict[tuple[str, int], Run],
) -> None:
    world = math.prod(degrees.values())
    reference = references.get((recipe, split))
    if reference is None:
        reference = pool.run(1, partial(train, recipe, {}, split=split))[0]
        references[recipe, split] = reference
    runs = pool.run(world, partial(train, recipe, degrees, float8=float8, **sections))
    for run in runs:
        assert distance(run.gradients, reference.gradients) < bound
        assert run.losses[0] == pytest.approx(reference.losses[0], rel=1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_layer_shows_that_tensor_parallel_scales_are_right(recipe: str, pool: Pool) -> None:
    """With no layer after it for a flipped rounding to spread through, the tight bound holds, if none is flipped within. That
    depends on the seed, on torch and on the processor (AVX-512: six seeds of six, AVX2: two), and another scale never meets it."""
    distances = []
    for seed in range(12):
        one = {
            "model": {
                "flavor": "tiny",
                "overrides": {"n_layers": 1, "n_kv_heads": 4, "vocab_size": VOCABULARY},
            },
            "debug": {"seed": seed},
        }
        reference = pool.run(1, partial(train, recipe, {}, **one))[0]
        runs = pool.run(2, partial(train, recipe, TP, **one))
        distances.append(max(distance(run.gradients, reference.gradients) for run in runs))
        if distances[-1] < EXACT:
            return
    pytest.fail(f"no seed meets {EXACT}: {distances}")


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], Run]:
    return {}


def test_split_sequences_have_scales_of_their_own(fp32: Run, pool: Pool) -> None:
    """CP, tensorwise: a rank's tokens are another tensor than all tokens; as far from fp32 as one process is."""
    for run in pool.run(2, partial(train, "tensorwise", {"cp": 2})):
        assert 0.02 < distance(run.gradients, fp32.gradients) < ROUNDING


def count_gathered(degrees: dict[str, int], float8: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes that FSDP gathers, and how often a float8 tensor is gathered for tensor parallelism."""
    train_step = build("tensorwise", degrees, float8=float8)
    fsdp_bytes, in_float8 = [0], [0]

    def see(func: Any, args: Any, result: Any) -> None:
        if func is torch.ops.c10d._allgather_base_.default:
            fsdp_bytes[0] += args[0].nbytes
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            in_float8[0] += type(args[0]).__name__ == "Float8TrainingTensor"

    with Watch(see):
        steps(train_step, range(1, 2))
    return fsdp_bytes[0], in_float8[0]


def test_weights_are_gathered_in_one_byte(pool: Pool) -> None:
    """Of a block's matrices, three bytes less than in fp32; blocks are gathered twice, the last one once."""
    (with_float8, _), (without, _) = (
        pool.run(2, partial(count_gathered, FSDP, settings))[0] for settings in (SCALES, {})
    )
    matrices = 4 * 64 * 64 + 3 * 64 * 192
    assert without - with_float8 == 3 * matrices * 3


def test_activations_are_gathered_in_one_byte(pool: Pool) -> None:
    """In each of two blocks: the inputs of attention and feed-forward, and the gradients of wo's and w2's outputs."""
    assert pool.run(2, partial(count_gathered, TP, {}))[0][1] == 2 * 4


# ---- checkpoints -------------------------------------------------------------------------------


def state_of(train_step: TrainStep) -> checkpoints.StateDict:
    parts = train_step.model_parts
    return {
        **checkpoints.model_state(parts),
        **checkpoints.optimizer_state(parts, train_step.optimizer),
    }


def save_and_go_on(folder: Path) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Two steps, a checkpoint, two more: their losses, the weights in the checkpoint and at the end."""
    train_step = build("tensorwise", FSDP, float8=SCALES)
    steps(train_step, range(1, 3))
    saved = weights(train_step)
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=folder)
    manager.save(2, state_of(train_step), metadata={})
    return steps(train_step, range(3, 5)), saved, weights(train_step)


def resume(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    train_step = build("tensorwise", FSDP, float8=SCALES, debug={"seed": 1})
    path = folder / "checkpoint" / "step-2"
    checkpoints.load(path, checkpoints.model_state(train_step.model_parts))
    checkpoints.load(
        path,
        checkpoints.empty_optimizer_state(path, train_step.model_parts, train_step.optimizer),
    )
    return steps(train_step, range(3, 5)), weights(train_step)


def load_without_float8(folder: Path) -> dict[str, Tensor]:
    train_step = build("", TP)
    checkpoints.load(
        folder / "checkpoint" / "step-2", checkpoints.model_state(train_step.model_parts)
    )
    return weights(train_step)


def test_checkpoints_know_nothing_of_float8(tmp_path: Path, pool: Pool) -> None:
    (losses, saved, end), _ = pool.run(2, partial(save_and_go_on, tmp_path))
    for resumed_losses, resumed_end in pool.run(2, partial(resume, tmp_path)):
        assert resumed_losses == losses
        assert distance(resumed_end, end) == 0
    for loaded in pool.run(2, partial(load_without_float8, tmp_path)):
        assert loaded.keys() == saved.keys()
        assert distance(loaded, saved) == 0
    files = list((tmp_path / "checkpoint" / "step-2").glob("*.distcp"))
    assert files
    assert not any(b"torchao" in file.read_bytes() for file in files)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "allowed"),
    [
        ((8, 0), []),
        ((8, 9), ["tensorwise"]),
        ((9, 0), ["tensorwise", "rowwise", "rowwise_with_gw_hp"]),
        ((10, 0), list(RECIPES)),
    ],
)
def test_hardware(
    capability: tuple[int, int], allowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    for recipe in RECIPES:
        if recipe in allowed:
            require_hardware(recipe, torch.device("cuda"))
            continue
        with pytest.raises(Float8Error, match=f"{recipe} needs .* this is A GPU with"):
            require_hardware(recipe, torch.device("cuda"))


def test_a_cpu_is_refused_in_one_line(tmp_path: Path, shell: Shell) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'[job]\ndump_folder = "{tmp_path}"\n[model]\nconverters = "float8"\n')
    [line] = shell.refuse(f"train {path}").splitlines()
    assert line.startswith(f"{path}:4: model.converters: ")
    assert "set emulate = true" in line


def test_a_run_says_what_was_converted(tmp_path: Path, shell: Shell) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        f'[job]\ndump_folder = "{tmp_path}"\n[model]\nflavor = "tiny"\nconverters = "quantize.linear.mx"\n'
        "[quantize.linear.mx]\nemulate = true\n[lr_scheduler]\nwarmup_steps = 1\n"
        '[training]\ndataset = "synthetic"\nsteps = 1\nseq_len = 32\n'
    )
    out = shell(f"train {path}").out
    assert "mxfp8_cublas, emulated: 56 of 57 linear layers converted" in out
    assert 'high precision: filter_fqns has "output"' in out


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Float8Error, match=r"pip install 'titan-pretrain\[float8\]'"):
        apply_float8(meta_model(), emulate=True)


def gather_on_three(gathers: bool) -> tuple[float, list[str]]:
    train_step = build(
        "tensorwise",
        {"dp_shard": 3},
        float8=SCALES if gathers else {},
        training={"local_batch_size": 2, "mixed_precision_param": "float32"},
    )
    losses = steps(train_step, range(1, 4))
    return losses[-1], [c.name for c in train_step.float8 if c.is_uneven]


def test_matrices_that_three_ranks_do_not_divide(pool: Pool) -> None:
    """They are gathered in high precision: no rank waits for ever, and the losses are those of weights gathered so."""
    expected = pool.run(3, gather_on_three, False)[0][0]
    for loss, uneven in pool.run(3, gather_on_three, True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert len(uneven) > 3 and "layers.0.attention.wq" in uneven  # 64 rows
        assert "layers.0.feed_forward.w1" not in uneven  # 192 rows


def shard_without_telling(_: int) -> str:
    model: Any = meta_model()
    apply_float8(model, emulate=True, fsdp_all_gather=True)
    with pytest.raises(ValueError) as error:
        mesh = build_mesh("cpu", dp_shard=3)["dp_shard"]
        apply_fsdp(model, mesh=mesh, blocks=model.layers, gradients="sum")
    return str(error.value)


def test_a_trainer_of_ones_own_is_told(pool: Pool) -> None:
    for text in pool.run(3, shard_without_telling, 0):
        assert re.search(
            r"3 FSDP ranks do not divide the 64 rows of layers\.0.*fsdp_ranks=3", text
        )
