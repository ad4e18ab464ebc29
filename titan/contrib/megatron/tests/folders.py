"""Folders as Megatron-Core 0.16 writes them, made with torch alone."""

from __future__ import annotations

import argparse
import enum
import json
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
ENUMS = "megatron.core.transformer.enums"


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


def weights(*, is_single: bool = False) -> dict[str, Tensor]:
    """Return weights by Megatron's names: of stacked layers, or single shards."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    layer = {
        "self_attention.linear_qkv.weight": draw(LAYERS, (H + 2 * G) * K, D),
        "self_attention.linear_qkv.layer_norm_weight": draw(LAYERS, D),
        "self_attention.linear_proj.weight": draw(LAYERS, D, H * K),
        "mlp.linear_fc1.weight": draw(LAYERS, 2 * F, D),
        "mlp.linear_fc1.layer_norm_weight": draw(LAYERS, D),
        "mlp.linear_fc2.weight": draw(LAYERS, D, F),
    }
    found = {
        "embedding.word_embeddings.weight": draw(VOCAB, D),
        "decoder.final_layernorm.weight": draw(D),
        "output_layer.weight": draw(VOCAB, D),
    }
    for name, stacked in layer.items():
        if not is_single:
            found[f"decoder.layers.{name}"] = stacked
            continue
        for number, tensor in enumerate(stacked):
            full = f"decoder.layers.{number}.{name}"
            if name == "mlp.linear_fc1.weight":
                found[f"{full}_w"], found[f"{full}_v"] = tensor.chunk(2)
            else:
                found[full] = tensor
    return found


def with_moments(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with moments of Adam, which are multiples of them."""
    moments = {f"optimizer.state.exp_avg.{name}": x / 8 for name, x in tensors.items()}
    squares = {f"optimizer.state.exp_avg_sq.{name}": x**2 / 4 for name, x in tensors.items()}
    return tensors | moments | squares


@contextmanager
def an_enum_of_megatron() -> Iterator[type[enum.Enum]]:
    """Define an enum where Megatron has it, for as long as a file is written."""
    names = ["megatron", "megatron.core", "megatron.core.transformer", ENUMS]
    before = {name: sys.modules.get(name) for name in names}
    kind = enum.Enum("AttnBackend", {"flash": 1, "auto": 5}, module=ENUMS)
    sys.modules.update({name: types.ModuleType(name) for name in names})
    sys.modules[ENUMS].AttnBackend = kind  # pyrefly: ignore[missing-attribute]
    try:
        yield kind
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def save(folder: Path, tensors: dict[str, Tensor], **others: Any) -> None:
    """Write tensors and their index. Each layer of a stack is a chunk, as each is a module in Megatron."""
    chunked: dict[str, Any] = {**others}
    for name, tensor in tensors.items():
        if not is_stacked(name):
            chunked[name] = tensor
            continue
        for layer, row in enumerate(tensor.split(1)):
            chunked[f"{name}@{layer}"] = row
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # as Megatron keeps its objects
    dcp.save(chunked, checkpoint_id=folder, planner=planner, no_dist=True)
    changed_index(folder, lambda metadata: _stack(metadata, tensors))


def is_stacked(name: str) -> bool:
    return bool(re.search(r"\.layers\.\D", name))


def _stack(metadata: Any, tensors: dict[str, Tensor]) -> None:
    """Join the entries of the layers of a stack."""
    entries, infos = metadata.state_dict_metadata, metadata.storage_data
    for name, tensor in tensors.items():
        if not is_stacked(name):
            continue
        rows = [entries.pop(f"{name}@{layer}") for layer in range(len(tensor))]
        chunks = []
        for layer, row in enumerate(rows):
            (index,) = [key for key in infos if key.fqn == f"{name}@{layer}"]
            offsets = torch.Size([layer, *index.offset[1:]])
            infos[MetadataIndex(name, offsets)] = infos.pop(index)
            chunks.append(ChunkStorageMetadata(offsets, row.size))
        entries[name] = TensorStorageMetadata(rows[0].properties, tensor.shape, chunks)


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
    is_single: bool = False,
    step: int = 3,
) -> Path:
    """Write a run's folder. Return the folder of its checkpoint.

    Args:
        run: the run's folder.
        tensors: tensors by their names; None: `weights` with moments.
        args: arguments of the run.
        common: replaces values of common.pt.
        is_single: form of the weights.
        step: number of the checkpoint.
    """
    folder = run / f"iter_{step:07}"
    if tensors is None:
        tensors = with_moments(weights(is_single=is_single))
    save(folder, tensors, **{"rng_state/shard_0_1": b"states"})
    with an_enum_of_megatron() as backend:
        args = args or arguments()
        args.attention_backend = backend(5)
        state = {
            "args": args,
            "iteration": step,
            "checkpoint_version": 3.0,
            "opt_param_scheduler": schedule(),
            "optimizer": {"optimizer": {"param_groups": [{"step": step, "lr": 1e-3}]}},
        }
        torch.save(state | (common or {}), folder / "common.pt")
    backend_of = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend_of))
    (run / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    return folder
