"""transformers' `LlamaForCausalLM` on FSDP2 x TP x CP, compiled, with activation checkpointing; trained and saved for transformers.

    torchrun --nproc-per-node 8 examples/transformers_llama.py OUT      # FSDP2 2 x CP 2 x TP 2; any multiple of 4 ranks
    titan sim --script examples/transformers_llama.py:build --world-size 64 --hardware h100-sxm

`model.name = "transformers"` does all of this from a job file: docs/huggingface.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from titan import parallel
from titan.optim.clipping import clip_gradients

BATCH, LENGTH, VOCABULARY = 8, 64, 512
PLAN = {  # which module is split how: docs/parallelism.md lists the styles
    "model.embed_tokens": "vocab_embedding",
    "model.layers.*layernorm": "sequence",
    "model.layers.*.self_attn": "gather_input",
    "model.layers.*.q_proj": "colwise",
    "model.layers.*.[kv]_proj": "kv_colwise",
    "model.layers.*.o_proj": "rowwise",
    "model.layers.*.mlp": "gather_input",
    "model.layers.*.gate_proj": "colwise",
    "model.layers.*.up_proj": "colwise",
    "model.layers.*.down_proj": "rowwise",
    "model.norm": "sequence",
    "lm_head": "vocab_output",
}
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="titan",
    use_cache=False,
)


class CausalAttention(nn.Module):
    """What `apply_cp` replaces."""

    is_causal_softmax = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return layer.causal(q, k, v).transpose(1, 2), None


AttentionInterface.register("titan", attend)


def batches(steps: int) -> list[Tensor]:
    """Return rows that count up, each by a different number: two tokens determine the next."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (steps, BATCH, 1), generator=generator)
    strides = torch.randint(1, 9, (steps, BATCH, 1), generator=generator)
    return list((starts + strides * torch.arange(LENGTH + 1)) % VOCABULARY)


def build(
    device: torch.device, backend: str = "inductor"
) -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer]:
    """Return the step, the model and the optimizer. `train` runs the step, and `titan sim --script` simulates it."""
    mesh = parallel.build_mesh(device.type, dp_shard=dist.get_world_size() // 4, cp=2, tp=2)
    dp, cp = mesh["dp_shard"], mesh["cp"]
    data: Any = parallel.submesh(mesh, "dp_shard", "cp", flatten=True)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        layer.self_attn.causal = CausalAttention()
    parallel.apply_tp(model, mesh=mesh["tp"], plan=PLAN, num_kv_heads=2, loss_parallel=False)
    parallel.apply_cp(model, mesh=cp, attention_type=CausalAttention)
    parallel.apply_ac(model, container="model.layers", preserve_rng_state=False)
    if backend:
        layers = "model.layers"
        parallel.apply_compile(
            model, container=layers, backend=backend, preserve_rng_state=False
        )
    parallel.apply_fsdp(
        model,
        mesh=data,
        blocks=model.model.layers,
        first=[model.model.embed_tokens],
        last=[model.model.norm, model.lm_head],
        gradients="sum",
    )
    parallel.materialize(model, device=device, fill_buffers=model._init_weights)
    parallel.initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    any_rows = torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64)  # for a simulation

    def step(batch: Tensor = any_rows) -> Tensor:
        rows = batch.chunk(dp.size())[dp.get_local_rank()].to(device)
        positions = torch.arange(LENGTH, device=device).expand(len(rows), LENGTH)
        tokens, labels, positions = (
            parallel.shard_sequence(x, dim=1, rank=cp.get_local_rank(), size=2, balanced=True)
            for x in (rows[:, :-1], rows[:, 1:], positions)
        )
        logits = model(input_ids=tokens, position_ids=positions).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (BATCH * LENGTH)  # gradients are summed over ranks: divide by all tokens
        loss.backward()
        clip_gradients(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=data.get_group())
        return loss

    return step, model, optimizer


def train(folder: str, steps: int = 50, backend: str = "inductor") -> float:
    """Train on the default process group and save to `folder`; returns the last loss."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    step, model, _ = build(device, backend)
    loss = torch.zeros(())
    for number, batch in enumerate(batches(steps), 1):
        loss = step(batch)
        if number % 10 == 0 and dist.get_rank() == 0:
            print(f"step {number}  loss {loss.item():.4f}", flush=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        with torch.device("meta"):  # for the names and the config
            LlamaForCausalLM(CONFIG).save_pretrained(folder, state_dict=weights)
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group()
    train(sys.argv[1])
    dist.destroy_process_group()
