"""Hugging Face folders for the rest of titan (titan/checkpoint/model_folders.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from titan.base.untrusted import read_json
from titan.checkpoint import CheckpointError
from titan.config.schema import JobConfig
from titan.data.tokenizer import Tokenizer

from . import hf_model
from .export import Export, no_routing_bias
from .export import export_state as save
from .hf_model import HFModel, hooks_of
from .load import check_folder as check
from .load import (
    load,
    model_keys,
    open_folder,
    read_sizes,
    require_weights_for,
)

__all__ = [
    "check",
    "describe",
    "job_keys",
    "load",
    "model_of",
    "num_positions",
    "save",
    "unread_keys",
]

model_of = HFModel.of


def job_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of [model] for the model in a folder.

    Raises:
        InputError: the folder cannot be read.
    """
    opened = open_folder(folder)
    name, sizes = read_sizes(opened)
    require_weights_for(sizes, opened)
    return model_keys(name, sizes, folder)


def num_positions(folder: Path) -> int | None:
    """Return the number of the model's positions, or None if config.json does not say it."""
    positions = open_folder(folder).config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def unread_keys(file: Path, config: JobConfig) -> list[str]:
    """Return a warning about unread keys of a config.json, or an empty list."""
    content, hooks = read_json(file, dict[str, Any]), hooks_of(config.model.name)
    if hooks is None:
        return []
    return hf_model.unread_keys(file, content, hooks, config.model.sizes)


def describe(config: JobConfig, tokenizer: Tokenizer | None) -> Export:
    """Return the export of a job's model.

    Raises:
        CheckpointError: the model has no Hugging Face form.
    """
    section = config.checkpoint
    export = Export.of(config, tokenizer=tokenizer, dtype=getattr(torch, section.export_dtype))
    model = export.model
    if section.last_save_in_hf and model.sizes.load_balance_coeff > 0 and model.off_disk:
        raise CheckpointError(no_routing_bias(model))
    return export
