"""Loaders of text from parts of a job, with a tokenizer that is at hand."""

from __future__ import annotations

from typing import Any

from titan.config import schema as s
from titan.data.loader import Loader
from titan.data.tokenizer import Tokenizer
from titan.tasks.next_token import NextToken


def _task(tokenizer: Tokenizer, **sections: Any) -> NextToken:
    # A copy, since validation would make sections anew, and with them the sources' types.
    task = NextToken(s.JobConfig().model_copy(update=sections))
    task.tokenizer = tokenizer
    return task


def build_loader(
    training: s.TrainingSection,
    *,
    data: s.DataSection,
    tokenizer: Tokenizer,
    rank: int,
    world: int,
    seed: int,
    accumulation: int = 1,
) -> Loader:
    debug = s.DebugSection(seed=seed)
    task = _task(tokenizer, training=training, data=data, debug=debug)
    return task.loader(rank=rank, world=world, accumulation=accumulation)


def build_validation_loader(
    validation: s.ValidationSection,
    *,
    training: s.TrainingSection,
    data: s.DataSection,
    tokenizer: Tokenizer,
    rank: int,
    world: int,
) -> Loader:
    task = _task(tokenizer, validation=validation, training=training, data=data)
    return task.validation_loader(rank=rank, world=world)
