"""titan.parallel in a trainer of your own: a model that titan has never seen, with TP + FSDP, in one page.

    torchrun --nproc-per-node 4 examples/custom_trainer.py          # 2 tensor-parallel x 2 FSDP ranks
    titan sim --script examples/custom_trainer.py:build --world-size 64 --hardware h100-sxm --tp=8 --dim=4096 --depth=32

The task is to add two numbers, digit by digit. Nothing here is imported from titan but the helpers.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan.optim.clipping import clip_gradients
from titan.parallel import (
    apply_fsdp,
    apply_tp,
    axis_rank,
    axis_size,
    build_mesh,
    initialize,
    materialize,
)

VOCABULARY, BATCH, STEPS = 12, 128, 200
LENGTH = 10  # "12+99=111=": two digits each, their sum least digit first; even, so that it splits over tp 2
PLAN = {  # which module is split how: docs/parallelism.md lists the styles
    "embed": "vocab_embedding",
    "blocks.*.norm": "sequence",
    "blocks.*.mix": "gather_input",
    "blocks.*.mix.qkv": "colwise",
    "blocks.*.mix.out": "rowwise",
    "norm": "sequence",
    "head": "vocab_output",
}


class Mix(nn.Module):
    """Attention and feed-forward side by side (arXiv:2204.02311), as any model of one's own might."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 4 * dim, bias=False)  # of each head: query, key, value, gate
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 4, self.head_dim)).transpose(1, 2)
        q, k, v, gate = heads.unbind(-2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True) * F.silu(gate)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(dim), Mix(dim, head_dim=16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Adder(nn.Module):
    def __init__(self, dim: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY * LENGTH, dim)  # a token at a place
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) * VOCABULARY
        x = self.embed(tokens + places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sums(generator: torch.Generator) -> Tensor:
    """Rows of tokens "ab+cd=efg=", the sum written least digit first."""
    terms = torch.randint(100, (BATCH, 2), generator=generator)
    texts = [f"{a:02}+{b:02}={f'{a + b:03}'[::-1]}=" for a, b in terms.tolist()]
    return torch.tensor([["0123456789+=".index(c) for c in text] for text in texts])


def build(
    device: torch.device, tp: int = 2, dim: int = 64, depth: int = 4
) -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer]:
    """Return the step, the model and the optimizer. `train` runs the step, and `titan sim --script` simulates it."""
    mesh = build_mesh(device.type, tp=tp, dp_shard=dist.get_world_size() // tp)
    with torch.device("meta"):
        model = Adder(dim, depth)
    if tp > 1:
        heads = dim // 16
        apply_tp(model, mesh=mesh["tp"], plan=PLAN, num_kv_heads=heads, loss_parallel=False)
    apply_fsdp(model, mesh=mesh["dp_shard"], blocks=model.blocks, gradients="sum")
    materialize(model, device=device)
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    any_rows = torch.zeros(
        BATCH, LENGTH, dtype=torch.int64
    )  # a simulation has shapes, and no data

    def step(rows: Tensor = any_rows) -> Tensor:
        rows = rows.chunk(axis_size(mesh, "dp_shard"))[axis_rank(mesh, "dp_shard")]
        logits = model(rows.to(device))[:, 5:8]
        answers = rows[:, 6:9].to(device)
        # Gradients are summed over ranks: divide by the answers of all of them.
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum")
        loss = loss / (BATCH * answers.shape[1])
        loss.backward()
        clip_gradients(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh["dp_shard"].get_group())
        return loss

    return step, model, optimizer


def train(tp: int, steps: int = STEPS) -> float:
    """Train on the default process group; returns the last loss."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    step, _, _ = build(device, tp)
    generator, loss = torch.Generator().manual_seed(0), torch.zeros(())
    for number in range(1, steps + 1):
        loss = step(sums(generator))
        if number % 50 == 0 and os.environ.get("RANK") == "0":
            print(f"step {number}  loss {loss.item():.4f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group()
    train(tp=2)
    dist.destroy_process_group()
