"""Folders as Megatron-Core 0.16 writes them, made with torch alone."""

from __future__ import annotations

import argparse
import enum
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

LAYERS, D, H, G, K, F, VOCAB = 2, 16, 4, 2, 4, 24, 40


def arguments(**changes: Any) -> argparse.Namespace:
    """Return the arguments of a small Llama."""
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": D,
        "ffn_hidden_size": F,
        "num_attention_heads": H,
        "num_query_groups": G,
        "group_query_attention": True,
        "kv_channels": K,
        "layernorm_epsilon": 1e-5,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "position_embedding_type": "rope",
        "max_position_embeddings": 64,
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "padded_vocab_size": VOCAB,
        "vocab_size": None,
        "moe_router_bias_update_rate": 1e-3,
        "seq_length": 32,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
        "train_iters": 10,
        "consumed_train_samples": 12,
        "bf16": False,
        "tensorboard_dir": "/nowhere",
    }
    return argparse.Namespace(**(values | changes))


def schedule(**changes: Any) -> dict[str, Any]:
    """Return the state of the schedule of the learning rate, whose steps are samples."""
    values = {"max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 8, "lr_decay_steps": 40}
    return {**values, "num_steps": 12, "lr_decay_style": "cosine", **changes}


def weights() -> dict[str, Tensor]:
    """Return weights of stacked layers by Megatron's names."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embedding.word_embeddings.weight": draw(VOCAB, D),
        "decoder.layers.self_attention.linear_qkv.weight": draw(LAYERS, (H + 2 * G) * K, D),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": draw(LAYERS, D),
        "decoder.layers.self_attention.linear_proj.weight": draw(LAYERS, D, H * K),
        "decoder.layers.mlp.linear_fc1.weight": draw(LAYERS, 2 * F, D),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": draw(LAYERS, D),
        "decoder.layers.mlp.linear_fc2.weight": draw(LAYERS, D, F),
        "decoder.final_layernorm.weight": draw(D),
        "output_layer.weight": draw(VOCAB, D),
    }


def with_moments(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with moments of Adam, which are multiples of them."""
    moments = {f"optimizer.state.exp_avg.{name}": x / 8 for name, x in tensors.items()}
    squares = {f"optimizer.state.exp_avg_sq.{name}": x**2 / 4 for name, x in tensors.items()}
    return tensors | moments | squares


class AttnBackend(enum.Enum):
    """Enum as Megatron has it, which the reader does not import."""

    auto = 5


def save(
    folder: Path, tensors: dict[str, Tensor], is_split: bool = True, **others: Any
) -> None:
    """Write tensors and their index. Each layer of a stack is a chunk, as each is a module in Megatron, or all are one."""
    chunked: dict[str, Any] = {**others}
    stacks = [name for name in tensors if is_split and re.search(r"\.layers\.\D", name)]
    for name, tensor in tensors.items():
        if name not in stacks:
            chunked[name] = tensor
            continue
        for layer, row in enumerate(tensor.split(1)):
            chunked[f"{name}@{layer}"] = row
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # as Megatron keeps its objects
    dcp.save(chunked, checkpoint_id=folder, planner=planner, no_dist=True)
    changed_index(folder, lambda metadata: _stack(metadata, stacks))


def _stack(metadata: Any, stacks: list[str]) -> None:
    """Join the entries of the layers of stacks."""
    entries, infos = metadata.state_dict_metadata, metadata.storage_data
    for name in stacks:
        rows = [entries.pop(f"{name}@{layer}") for layer in range(LAYERS)]
        chunks = []
        for layer, row in enumerate(rows):
            (index,) = [key for key in infos if key.fqn == f"{name}@{layer}"]
            offsets = torch.Size([layer, *index.offset[1:]])
            infos[MetadataIndex(name, offsets)] = infos.pop(index)
            chunks.append(ChunkStorageMetadata(offsets, row.size))
        size = torch.Size([LAYERS, *rows[0].size[1:]])
        entries[name] = TensorStorageMetadata(rows[0].properties, size, chunks)


def changed_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index of a folder."""
    where = folder / ".metadata"
    metadata = pickle.loads(where.read_bytes())
    change(metadata)
    where.write_bytes(pickle.dumps(metadata))


def write(
    run: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    args: argparse.Namespace | None = None,
    common: dict[str, Any] | None = None,
    is_split: bool = True,
) -> Path:
    """Write a run's folder. Return the folder of its checkpoint.

    Args:
        run: the run's folder.
        tensors: tensors by their names; None: `weights` with moments.
        args: arguments of the run.
        common: replaces values of common.pt.
        is_split: whether each layer of a stack is a chunk.
    """
    folder = run / "iter_0000003"
    tensors = with_moments(weights()) if tensors is None else tensors
    save(folder, tensors, is_split, **{"rng_state/shard_0_1": b"states"})
    args = args or arguments()
    args.attention_backend = AttnBackend.auto
    state = {
        "args": args,
        "iteration": 3,
        "opt_param_scheduler": schedule(),
        "optimizer": {"optimizer": {"param_groups": [{"step": 3, "lr": 1e-3}]}},
    }
    torch.save(state | (common or {}), folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (run / "latest_checkpointed_iteration.txt").write_text("3\n")
    return folder
