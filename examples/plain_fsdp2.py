"""FSDP2 of plain torch, without titan, in a script that trains and that `titan sim` simulates.

torchrun --nproc-per-node 4 examples/plain_fsdp2.py
titan sim --script examples/plain_fsdp2.py:build --world-size 64 --hardware h100-sxm --dim=4096 --depth=32 --length=4096
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY = 512


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(
    device: torch.device, dim: int = 64, depth: int = 3, batch: int = 4, length: int = 32
) -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer, int]:
    """Return the step, the model, the optimizer, and the tokens of a step over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    blocks = [Block(dim) for _ in range(depth)]
    parts = {"embed": nn.Embedding(VOCABULARY, dim), "blocks": nn.Sequential(*blocks)}
    model = nn.Sequential(OrderedDict(parts, head=nn.Linear(dim, VOCABULARY))).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    any_rows = torch.zeros(batch, length + 1, dtype=torch.int64)  # for a simulation

    def step(rows: Tensor = any_rows) -> Tensor:
        rows = rows.to(device)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, batch * length * dist.get_world_size()


if __name__ == "__main__":
    dist.init_process_group()
    step, *_ = build(torch.accelerator.current_accelerator(True) or torch.device("cpu"))
    torch.manual_seed(dist.get_rank())
    for number in range(1, 101):
        starts = torch.randint(VOCABULARY, (4, 1))
        loss = step((starts + torch.arange(33)) % VOCABULARY)  # rows that count up
        if number % 20 == 0 and dist.get_rank() == 0:
            print(f"step {number}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
