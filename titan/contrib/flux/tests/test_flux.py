"""Flux: its sizes, the model of diffusers, its FLOPs, batches and pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.layouts import RING, Layout, cp, fsdp, job_of, tp
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.checkpoint.state import model_state
from titan.checkpoint.tensors import load as checkpoints_load
from titan.checks.rules import check, check_to_run
from titan.config.errors import ConfigError
from titan.config.schema import JobConfig
from titan.contrib.flux import FLAVORS, build_model
from titan.contrib.flux.config import TIME_CHANNELS
from titan.contrib.flux.flow_matching import FlowMatching, squared_error_sum
from titan.contrib.flux.huggingface import hf_config, hf_name_of, read_config
from titan.data import DataError
from titan.parallel import initialize
from titan.tasks import task_of
from titan.tools.generate import main as generate

TINY = FLAVORS["tiny"]


def inputs(sizes: Any, length: int, context: int) -> dict[str, torch.Tensor]:
    positions = torch.stack(
        [torch.zeros(length), torch.arange(length) // 4, torch.arange(length) % 4], -1
    )
    return {
        "positions_BSA": positions.long().expand(2, -1, -1),
        "context_BTC": torch.randn(2, context, sizes.context_dim),
        "pooled_BC": torch.randn(2, sizes.pooled_dim),
        "time_B": torch.rand(2),
        "guidance_B": 3 * torch.rand(2),
    }


def test_sizes_are_those_of_the_module_and_as_published() -> None:
    for flavor in ("tiny", "demo"):
        sizes = dataclasses.replace(FLAVORS[flavor], guidance_embed=flavor == "tiny")
        model = build_model(sizes)
        assert sizes.num_params == sum(p.numel() for p in model.parameters())
        assert sizes.num_params_in_blocks == sum(p.numel() for p in model.layers.parameters())
        assert sizes.num_embedding_params == sum(
            p.numel() for p in model.tok_embeddings.parameters()
        )
    dev = dataclasses.replace(FLAVORS["12B"], guidance_embed=True)
    assert dev.num_params == 11_901_408_320  # FLUX.1-dev's model card: 12 billion
    assert read_config(hf_config(dev)) == dev


def test_flops_are_what_torch_counts() -> None:
    model, patches, length = build_model(TINY), 16, 16 + 4
    # In plain products: torch counts nothing for a CPU's kernel of attention.
    plain = sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain:
        model(torch.randn(2, patches, TINY.in_channels), **inputs(TINY, patches, 4))
    dim, (rows, columns) = TINY.dim, (TINY.in_channels, TINY.context_dim)
    # The ends, which the config leaves out: patches in and out, context; time, pooled vector and last modulation once.
    once = TIME_CHANNELS + TINY.pooled_dim + (1 + 1 + 2) * dim
    ends = 2 * dim * (2 * patches * rows + 4 * columns + once)
    # A third of all: the forward pass.
    expected = 2 * (length * TINY.flops_per_token(length) / 3 + ends)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [False, True])
def test_outputs_equal_diffusers(guidance: bool, tmp_path: Path, shell: Shell) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    sizes = dataclasses.replace(TINY, guidance_embed=guidance, context_dim=20, pooled_dim=10)
    model = build_model(sizes)
    initialize(model, seed=1, std_of=lambda name: 0.5 if "_norm." in name else 0.1)
    settings = {key: value for key, value in hf_config(sizes).items() if key != "_class_name"}
    twin = diffusers.FluxTransformer2DModel(**settings).eval()
    columns: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        columns.setdefault(hf_name_of(sizes)(name), []).append(parameter.detach())
    twin.load_state_dict({name: torch.cat(parts, -1) for name, parts in columns.items()})
    twin.save_pretrained(tmp_path / "theirs")
    shell(f"convert from-hf {tmp_path}/theirs {tmp_path}/ours")
    stored = {name: torch.empty_like(t) for name, t in model_state([model]).items()}
    checkpoints_load(tmp_path / "ours/checkpoint/step-0", stored)
    assert all(torch.equal(stored[name], t) for name, t in model_state([model]).items())
    given, patches = inputs(sizes, 12, 5), torch.randn(2, 12, 16)
    with torch.no_grad():
        ours = model(patches, **given)
        theirs = twin(
            hidden_states=patches,
            encoder_hidden_states=given["context_BTC"],
            pooled_projections=given["pooled_BC"],
            timestep=given["time_B"],
            guidance=given["guidance_B"] if guidance else None,
            img_ids=given["positions_BSA"][0].float(),
            txt_ids=torch.zeros(5, 3),
        ).sample
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def flux_job(**changes: Any) -> JobConfig:
    base = {"model": {"name": "flux", "flavor": "tiny"}, "training": {"seq_len": 20}}
    return job(None, base=base, **changes)


def test_a_batch_belongs_to_the_numbers_of_its_samples() -> None:
    task = task_of(flux_job(training={"local_batch_size": 2}))
    seen: dict[int, dict[str, torch.Tensor]] = {}
    for world, accumulation in ((1, 4), (2, 2), (4, 1)):
        for rank in range(world):
            for batch in task.loader(
                rank=rank, world=world, accumulation=accumulation
            ).next_step():
                for row in range(2):
                    sample = {
                        n: t[row] for n, t in vars(batch).items() if isinstance(t, torch.Tensor)
                    }
                    known = seen.setdefault(batch.first_sample + row, sample)
                    assert all(
                        torch.equal(known[name], value) for name, value in sample.items()
                    )
    assert sorted(seen) == list(range(8))
    assert len({sample["time_B"].item() for sample in seen.values()}) == 8


def test_the_input_lies_on_the_line_to_the_noise_and_ignored_samples_count_nothing() -> None:
    task = task_of(flux_job(training={"local_batch_size": 3}))
    [batch] = task.loader(rank=0, world=1).next_step()
    batch.ignore_from(2)
    micro = task.microbatch(batch)
    velocity = micro.targets[..., :-1]
    torch.testing.assert_close(
        micro.input - batch.time_B[:, None, None] * velocity, batch.patches_BSC
    )
    torch.testing.assert_close(batch.patches_BSC + velocity, batch.noise_BSC)
    assert squared_error_sum(velocity + 1, micro.targets).item() == pytest.approx(
        micro.num_valid.item()
    )
    assert micro.num_valid.item() == 2 * 16 * 16


def test_dropout_leaves_out_the_context_of_as_many_samples() -> None:
    task = task_of(
        flux_job(training={"local_batch_size": 500}, task={"options": {"dropout": 0.3}})
    )
    [batch] = task.loader(rank=0, world=1).next_step()
    kept = batch.context_BTC.flatten(1).any(1)
    assert torch.equal(kept, batch.pooled_BC.any(1))
    assert 0.62 < kept.float().mean() < 0.78  # 0.7, four standard deviations


def encode(folder: Path) -> None:
    """Write 40 latents with encodings."""
    shapes = {"latents": (1, 16, 16), "context": (4, 16), "pooled": (16,)}
    for name, shape in shapes.items():
        np.save(folder / f"{name}.npy", np.random.default_rng(1).standard_normal((40, *shape)))


def test_sources_on_disk(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(256, size=(40, 16, 16, 1), dtype=np.uint8)
    lines = []
    for number, picture in enumerate(pictures):
        Image.fromarray(picture[..., 0]).save(tmp_path / f"{number}.png")
        lines.append(f'{{"file": "{number}.png", "label": {number % 8}}}')
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    held_out = task_of(
        flux_job(task={"options": {"source": "pictures", "path": str(tmp_path)}})
    )
    samples = held_out.dataset("validation", rank=0, world=1)
    rows = samples.get(np.arange(2))
    assert samples.num_samples == 2
    np.testing.assert_allclose(
        (rows.pictures[1, 0] + 1) * 127.5, pictures[20, :, :, 0], atol=1e-4
    )
    assert rows.pooled_BC[1].argmax() == 20 % 8
    train = held_out.dataset("train", rank=0, world=1)
    assert (
        len({p.tobytes() for p in train.get(np.arange(38)).pictures}) == 38
    )  # each once an epoch
    encode(tmp_path)
    encoded = task_of(flux_job(task={"options": {"source": "encoded", "path": str(tmp_path)}}))
    context = encoded.dataset("validation", rank=0, world=1).get(np.arange(2)).context_BTC
    np.testing.assert_allclose(context[1], np.load(tmp_path / "context.npy")[20], rtol=1e-6)


def draw(layout: Layout, folder: str, steps: int) -> tuple[np.ndarray, list[float]]:
    """Return pictures of a run that resumes if it can, and its losses."""
    config = job_of(layout, steps=steps).model_dump()
    config["job"]["dump_folder"] = folder
    config["training"]["seq_len"] = 24
    config["checkpoint"] = {"interval": 2}
    config["validation"] = {"enable": True, "freq": 2, "steps": 1, "local_batch_size": 4}
    config["average"] = {"enable": True, "decay": 0.5}
    config = JobConfig.model_validate(config)
    trainer, losses = PoolTrainer(config), []
    train = trainer.train_step.train

    def watched(*args: Any, **options: Any) -> Any:
        report = train(*args, **options)
        losses.append(report.loss.item())
        return report

    trainer.train_step.train = watched
    assert trainer.run() == 0
    task = trainer.task
    average = trainer.train_step.average
    assert isinstance(task, FlowMatching) and average is not None
    with average.in_place():
        pictures = task.drawn(trainer.train_step)
    trainer.close()
    return pictures, losses


FLUX: dict[str, Any] = {
    "model": ("flux", "tiny"),
    "overrides": (("gate_init_std", 0.1),),
    "task": (("context_len", 8), ("sample_steps", 4), ("sample_rows", 1)),
    "documents": False,
}


@pytest.mark.slow
def test_runs_draw_the_same_pictures_and_resume_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    [(alone, losses)] = pool.run(1, draw, Layout("", **FLUX), str(tmp_path / "one"), 4)
    assert losses[-1] < losses[0] and (tmp_path / "one/samples/step-4.png").stat().st_size > 100
    for number, layout in enumerate(
        (Layout("", fsdp(2), **FLUX), Layout("", (*cp(2), *tp(2)), settings=RING, **FLUX))
    ):
        folder = str(tmp_path / str(number))
        found = pool.run(layout.ranks, draw, layout, folder, 4)
        for pictures, _ in found:
            np.testing.assert_allclose(pictures, alone, atol=1e-4)
        pool.run(layout.ranks, draw, layout, f"{folder}-resumed", 2)
        again = pool.run(layout.ranks, draw, layout, f"{folder}-resumed", 4)
        assert np.array_equal(again[0][0], found[0][0]) and again[0][1] == found[0][1][2:]


def test_generate_draws_what_the_run_drew(tmp_path: Path, shell: Shell) -> None:
    """Draw from the average of a saved step: all labels, and one by number and by name. Mistakes get one line."""
    config = flux_job(
        job={"dump_folder": str(tmp_path / "run")},
        training={"seq_len": 20, "steps": 2, "local_batch_size": 2},
        task={"options": {"sample_steps": 2, "sample_rows": 2}},
        validation={"enable": True, "freq": 2, "steps": 1, "local_batch_size": 2},
        average={"enable": True, "decay": 0.5},
        checkpoint={"interval": 2},
    )
    run_to_end(Trainer(config))
    run = f"--checkpoint {tmp_path}/run --average --device cpu".split()
    assert generate([*run, "--output", str(tmp_path / "all.png")]) == 0
    drawn = (tmp_path / "run/samples/step-2.png").read_bytes()
    assert (tmp_path / "all.png").read_bytes() == drawn
    found = {}
    for name, more in {
        "all": [],
        "seed": ["--seed", "1"],
        "plain": [],
        "number": ["--prompt", "2"],
        "name": ["--prompt", "square"],
        "half": ["--dtype", "bfloat16"],
    }.items():
        options = [option for option in run if name != "plain" or option != "--average"]
        assert generate([*options, *more, "--output", str(tmp_path / f"{name}.npy")]) == 0
        found[name] = np.load(tmp_path / f"{name}.npy")
    assert found["all"].shape == (16, 1, 16, 16) and found["number"].shape == (2, 1, 16, 16)
    assert np.array_equal(found["number"], found["name"])
    for other in ("seed", "plain"):
        assert not np.allclose(found[other], found["all"])
    np.testing.assert_allclose(found["half"], found["all"], atol=0.1)
    for more, said in {
        ("--output", "x.jpg"): "the model draws pictures; end it in .png or .npy",
        ("--output", "x.png", "--prompt", "blob"): "take 0 to 7 or disc, ring",
        ("--output", "x.png", "--prompt", "8"): "take 0 to 7 or disc, ring",
        ("--output", "no/x.png"): "names no file in a folder that exists",
        ("--prompt", "disc"): "--output FILE writes what it draws",
    }.items():
        with pytest.raises(DataError, match=said):
            generate([*run, *more])


def test_encodings_are_drawn_by_the_number_of_a_held_out_item(tmp_path: Path) -> None:
    """Not of those beyond, which would be the first ones again; what draws labels reads no folder."""
    encode(tmp_path)
    options = {"source": "encoded", "path": str(tmp_path), "sample_steps": 1, "sample_rows": 1}
    task = task_of(flux_job(task={"options": options}))
    # With gates of zero, as a run begins, nothing is seen of the conditions.
    model = build_model(dataclasses.replace(TINY, gate_init_std=0.1))
    initialize(model, seed=0, std_of=model.init_std)
    drawn = []
    for number in ("0", "1"):
        task.draw(model, number, seed=0, file=tmp_path / "x.npy")
        drawn.append(np.load(tmp_path / "x.npy"))
    assert not np.array_equal(*drawn)
    with pytest.raises(DataError, match="no item that is held out; take 0 to 1"):
        task.draw(model, "2", seed=0, file=tmp_path / "x.npy")
    labels = task_of(
        flux_job(task={"options": options | {"source": "pictures", "path": "moved"}})
    )
    labels.draw(model, "3", seed=0, file=tmp_path / "x.npy")


def test_what_a_job_cannot_have_is_said_before_it_starts() -> None:
    options = {"size": 18, "classes": 9, "time": "never"}
    wrong = flux_job(
        task={"options": options},
        parallelism={"pipeline_parallel_degree": 2},
        training={"seq_len": 21},
    )
    with pytest.raises(ConfigError) as error:
        check_to_run(wrong, world_size=2)
    text = str(error.value)
    for part in (
        "logit_normal, uniform",
        "18 does not divide",
        "at most 8, got 9",
        "has no stages",
        "use 20",
    ):
        assert part in text, text


def load(layout: Layout, folder: str, source: str) -> dict[str, torch.Tensor]:
    """Return the weights of a run that begins from a folder of diffusers'."""
    config = job_of(layout, steps=1).model_dump()
    config["job"]["dump_folder"] = folder
    config["checkpoint"] = {"initial_load_in_hf": True, "initial_load_path": source}
    trainer = PoolTrainer(JobConfig.model_validate(config))
    state = model_state(trainer.train_step.model_parts)
    trainer.close()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


def test_folders_of_diffusers(pool: Pool, tmp_path: Path, shell: Shell) -> None:
    layout, run = Layout("", **FLUX), tmp_path / "run"
    pool.run(1, draw, layout, str(run), 2)
    outputs = [tmp_path / "weights", tmp_path / "average"]
    for average, output in enumerate(outputs):
        shell(f"convert to-hf {run} {output}", *["--average"] * average)
    [weights, averaged] = (pool.run(1, load, layout, f"{o}-run", str(o))[0] for o in outputs)
    sharded = pool.run(2, load, Layout("", tp(2), **FLUX), f"{outputs[0]}-tp", str(outputs[0]))
    stored = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    step = run / "checkpoint/step-2"
    checkpoints_load(step, stored)
    for found in (weights, *sharded):
        assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    names = {name: name.replace("model.", "average.") for name in stored}
    means = {names[name]: torch.empty_like(tensor) for name, tensor in stored.items()}
    checkpoints_load(step, means)
    assert all(torch.equal(averaged[name], means[other]) for name, other in names.items())
    assert any((averaged[name] != tensor).any() for name, tensor in stored.items())


def test_a_mistake_in_an_option_is_reported_with_its_whole_key() -> None:
    problems = check(flux_job(task={"options": {"dropout": 2.0}}))
    assert [problem.key for problem in problems] == ["task.options.dropout"]
