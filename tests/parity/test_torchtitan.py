"""Ten steps beside TorchTitan 0.2.2's own Llama, loss and clipping, from the same weights and samples; and DCP's own reader."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.jobs import job
from tests.support.layouts import Layout, job_of, text_batch
from tests.support.ranks import Pool
from tests.support.steps import build_step
from tests.support.trainers import PoolTrainer
from titan.config.schema import JobConfig
from titan.numerics.certify.steps import named_parameters, record, whole
from titan.parallel import build_mesh

STEPS = 10
# fp32, in the order of sums of a tenth of a million elements; as the layouts of titan among themselves.
BOUND = 1e-5
LAYOUT = Layout("one process", documents=False, optimizer=(("decay_norms", True),))


def config() -> JobConfig:
    return job_of(LAYOUT, steps=STEPS)


def ours() -> dict[str, Any]:
    """Train titan's step on one process. Return the record, and the weights and learning rates that it began with."""
    step = build_step(config(), build_mesh("cpu"))
    (model,) = step.model_parts
    with torch.no_grad():  # else attention is nearly uniform, and a wrong rotation hardly shows
        for name, p in model.named_parameters():
            p.mul_(10 if name.endswith(("wq.weight", "wk.weight")) else 1)
    before = {name: whole(p) for name, p in model.named_parameters()}
    rates = [step.set_learning_rate(number) for number in range(1, STEPS + 1)]
    batches = ([text_batch(LAYOUT, number)] for number in range(1, STEPS + 1))
    return record(step, batches) | {"before": before, "rates": rates}


def in_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Return wq or wk for TorchTitan, which turns channel 2i against 2i + 1, and titan i against i + K/2."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def torchtitans(weights: dict[str, Tensor], rates: list[float]) -> dict[str, list[float]]:
    """Train TorchTitan's model, with the lines of its trainer."""
    if not find_spec("triton"):  # of experts, which this model has not
        sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
    from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    job, sizes = config(), config().model.sizes
    model = Transformer(
        TransformerModelArgs(
            dim=sizes.dim,
            n_layers=sizes.n_layers,
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            vocab_size=sizes.vocab_size,
            ffn_dim_multiplier=sizes.ffn_dim / int(8 * sizes.dim / 3),
            multiple_of=2,
            norm_eps=sizes.norm_eps,
            rope_theta=sizes.rope_theta,
            rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
            max_seq_len=job.training.seq_len,
        )
    )
    model.load_state_dict(
        {
            name: in_pairs(w, sizes.head_dim)
            if name.endswith(("wq.weight", "wk.weight"))
            else w
            for name, w in weights.items()
        }
    )
    section = job.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )
    losses, norms = [], []
    for number, rate in enumerate(rates, 1):
        batch: Any = text_batch(LAYOUT, number)
        optimizer.zero_grad()
        loss = cross_entropy_loss(model(batch.tokens_BS), batch.labels_BS)
        loss = loss / (batch.labels_BS != IGNORE_INDEX).sum()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), job.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms}


def test_ten_steps_are_torchtitans(pool: Pool) -> None:
    if not find_spec("torchtitan"):
        pytest.skip("no TorchTitan: scripts/judges.sh installs it")
    assert version("torchtitan") == "0.2.2"
    [mine] = pool.run(1, ours)
    theirs = torchtitans(mine["before"], mine["rates"])
    assert theirs["losses"][-1] < theirs["losses"][0]
    for name in ("losses", "norms"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=BOUND, atol=0)


def save(folder: Path) -> dict[str, Tensor]:
    """Train two steps on this rank, and save. Return the whole tensors, by their names in the checkpoint."""
    trainer = PoolTrainer(
        job(
            folder,
            training={"local_batch_size": 1},
            parallelism={"data_parallel_shard_degree": 2},
        )
    )
    assert trainer.run() == 0
    found, step = {}, trainer.train_step
    for name, p in named_parameters(step):
        found[f"model.{name}"] = whole(p)
        moments = step.optimizer.state[p].items()
        found |= {f"optimizer.{name}.{key}": whole(x) for key, x in moments}
    trainer.close()
    return found


def test_torchs_own_converter_reads_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """DCP converts weights and moments of two ranks into one file that `torch.load` reads without running code."""
    expected, _ = pool.run(2, save, tmp_path)
    step, file = tmp_path / "checkpoint" / "step-2", tmp_path / "converted.pt"
    dcp_to_torch_save(step, file)
    converted = torch.load(file, weights_only=True)
    assert len(expected) > 50
    assert expected.keys() == {name for name in converted if not name.startswith("rng.")}
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name
