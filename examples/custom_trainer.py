"""titan.parallel in a trainer of your own: a model that titan has never seen, with TP + FSDP, in one page.

    torchrun --nproc-per-node 4 examples/custom_trainer.py          # 2 tensor-parallel x 2 FSDP ranks

The task is to add two numbers, digit by digit. Nothing here is imported from titan but the helpers.
"""

from __future__ import annotations

import os

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


def train(tp: int, steps: int = STEPS) -> float:
    """Train on the default process group; returns the last loss."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    mesh = build_mesh(device.type, tp=tp, dp_shard=dist.get_world_size() // tp)
    with torch.device("meta"):
        model = Adder()
    if tp > 1:
        apply_tp(model, mesh=mesh["tp"], plan=PLAN, num_kv_heads=4, loss_parallel=False)
    apply_fsdp(model, mesh=mesh["dp_shard"], blocks=model.blocks)
    materialize(model, device=device)
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, loss = torch.Generator().manual_seed(0), torch.zeros(())
    for step in range(1, steps + 1):
        rows = sums(generator).chunk(axis_size(mesh, "dp_shard"))[axis_rank(mesh, "dp_shard")]
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
        if step % 50 == 0 and os.environ.get("RANK") == "0":
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group()
    train(tp=2)
    dist.destroy_process_group()
