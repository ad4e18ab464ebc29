"""Hugging Face folders of small models, from transformers through titan and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.manager import CheckpointManager, load, model_state
from titan.config.schema import CheckpointSection
from titan.contrib.transformers.config import NOTES
from titan.huggingface import load as huggingface
from titan.huggingface.export import Export, export_state
from titan.step.train_step import TrainStep


def twin_of(content: dict[str, Any]) -> Any:
    """Return transformers' own model of a config.json."""
    config = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
    return getattr(transformers, content["architectures"][0])(config)


def save_twin(architecture: str, fields: dict[str, Any], folder: Path) -> None:
    """Write a folder of transformers' own, with random numbers in each tensor."""
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    twin = kind(kind.config_class(**fields))
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    twin.save_pretrained(folder)


def through_titan(step: TrainStep, source: Path, folder: Path) -> Path:
    """Load a folder on the layout of a step, save and load a checkpoint, and export. Return the new folder."""
    group, state = CheckpointGroup(), model_state(step.model_parts)
    export = Export.of(step.config, tokenizer=None, dtype=torch.float32)
    huggingface.load(source, state, model=export.model, group=group)
    manager = CheckpointManager(CheckpointSection(), run_dir=folder)
    saved = manager.save(1, state, metadata={"step": 1, "tokens": 0})
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    load(saved, state)
    export_state(folder / "out", state, export, group=group)
    return folder / "out"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def difference(source: Path, out: Path) -> str:
    """Return in what two folders differ, or what transformers misses in the second, or ""."""
    before, after = tensors_of(source), tensors_of(out)
    if names := sorted(before.keys() ^ after.keys()):
        return f"only one folder has {names[0]}"
    for name, tensor in before.items():
        if tensor.dtype != after[name].dtype or not torch.equal(tensor, after[name]):
            return f"{name} is another"
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (out, source))
    if key := _changed(ours, theirs):
        return f"config.json has another {key}"
    kind = getattr(transformers, ours["architectures"][0])
    _, info = kind.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    return next((f"transformers finds {k}: {v}" for k, v in info.items() if v), "")


def _changed(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return a field of their config.json that ours has with another value, also in parts, or ""."""
    for key, value in theirs.items():
        if key in NOTES or key.endswith("_token_id"):
            continue
        other = ours.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := _changed(other, value):
                return f"{key}.{inner}"
        elif other != value:
            return key
    return ""
