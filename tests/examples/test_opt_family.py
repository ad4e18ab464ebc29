"""The family of examples/opt_family: found by its entry point, as transformers' OPT, the same numbers on every layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import finished
from tests.support.jobs import degrees_of, job
from tests.support.metadata import forget, write_metadata
from tests.support.ranks import Pool
from tests.support.runs import logged_rows
from titan.data.packing import Batch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "opt_family"
RENAMED = {  # titan's names to transformers'
    "tok_embeddings.tokens": "model.decoder.embed_tokens",
    "tok_embeddings.positions": "model.decoder.embed_positions",
    "output": "lm_head",
    "layers.": "model.decoder.layers.",
    "attention_norm": "self_attn_layer_norm",
    "ffn_norm": "final_layer_norm",
    "attention.wo": "self_attn.out_proj",
    "attention.w": "self_attn.",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what pip would leave of the package's metadata, on the path of this process and of its children."""
    write_metadata(FOLDER, tmp_path)
    for folder in (tmp_path, FOLDER):
        monkeypatch.syspath_prepend(folder)
    return tmp_path


def two_steps(degrees: dict[str, int], overrides: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps on one global batch of 4 sequences."""
    from tests.support.steps import build_step
    from titan.checks.rules import check_to_run
    from titan.parallel import axis_rank, build_mesh

    forget()  # this process may have read them before its path had the package

    config = job(
        model={"name": "opt", "flavor": "tiny", "overrides": overrides},
        training={"local_batch_size": 4 // degrees.get("dp_shard", 1)},
        parallelism=degrees_of(degrees),
    )
    world = torch.distributed.get_world_size()
    check_to_run(config, world_size=world)
    mesh = build_mesh("cpu", **degrees)
    train_step = build_step(config, mesh)
    rows = torch.randint(2048, (4, 33), generator=torch.Generator().manual_seed(0))
    mine = rows.chunk(degrees.get("dp_shard", 1))[axis_rank(mesh, "dp_shard")]
    batch = Batch(tokens_BS=mine[:, :-1], labels_BS=mine[:, 1:].contiguous())
    reports = [train_step.train([batch], step=step) for step in (1, 2)]
    return [(report.loss.item(), report.grad_norm.item()) for report in reports]


def test_two_steps_are_the_same_on_every_layout(pool: Pool, installed: Path) -> None:
    for overrides, layouts in (
        ({}, [{"tp": 2}, {"cp": 2}]),
        ({"tied_embeddings": False}, [{"pp": 2}, {"dp_shard": 2}]),
    ):
        (alone,) = pool.run(1, two_steps, {}, overrides)
        assert 7 < alone[1][0] < alone[0][0] < 8  # log(2048) = 7.6
        for degrees in layouts:
            for found in pool.run(2, two_steps, degrees, overrides):
                for step, expected in zip(found, alone, strict=True):
                    assert step == pytest.approx(expected, rel=1e-5), (degrees, overrides)


def test_it_is_transformers_s_opt(installed: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import titan_opt

    sizes = titan_opt.FLAVORS["tiny"]
    theirs = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.dim,
            word_embed_proj_dim=sizes.dim,
            num_hidden_layers=sizes.n_layers,
            ffn_dim=sizes.ffn_dim,
            num_attention_heads=sizes.n_heads,
            max_position_embeddings=sizes.max_positions,
        )
    ).eval()
    for parameter in theirs.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.1)
    ours, state = titan_opt.build_model(sizes), theirs.state_dict()
    for name, parameter in ours.named_parameters():
        for mine, their in RENAMED.items():
            name = name.replace(mine, their, 1)
        for letter in "qkv":
            name = name.replace(f"self_attn.{letter}.", f"self_attn.{letter}_proj.")
        name = "model.decoder.final_layer_norm" + name[4:] if name.startswith("norm.") else name
        parameter.data.copy_(state[name])
    tokens = torch.randint(sizes.vocab_size, (2, 48))
    assert sizes.num_params == sum(p.numel() for p in theirs.parameters())
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert titan_opt.FLAVORS["125M"].num_params == 125_239_296


def test_titan_train_runs_it(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (installed, FOLDER, ROOT))))
    job = str(ROOT / "train_configs" / "debug_model.toml")
    argv = f"{job} --model.name=opt --model.flavor=tiny --training.steps=2 --job.dump_folder={installed}/run".split()
    argv += [
        "--training.seq_len=64",
        "--training.local_batch_size=2",
        "--lr_scheduler.warmup_steps=1",
    ]
    command = [sys.executable, "-m", "titan.cli", "train", *argv]
    finished(command, cwd=installed)
    rows = logged_rows(installed / "run")
    assert rows[-1]["step"] == 2 and 6 < rows[-1]["loss"] < 8
