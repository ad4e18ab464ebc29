"""Text of a job: the samples to train on, the samples to validate on, and the collate function that makes batches of them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from titan.config import schema as s
from titan.config.phases import longest_sequence, sequence_lengths
from titan.data import DataError
from titan.data.base import Samples
from titan.data.loader import Collate
from titan.data.packing import Batch, pack
from titan.data.samples import SampleOptions, build_samples
from titan.data.sources import resolve_sources, training_sources
from titan.data.special_tokens import LOSSY
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Keys of [data] that do not decide which sample comes next. `order_of` looks at the sources.
_OF_SAMPLES = ("sources", "skip", "cache_folder", "reset_positions", "document_mask")


def collate_rows(samples: Samples, data: s.DataSection) -> Collate:
    """Return the collate function of text samples, with the options of [data].

    Args:
        samples: the samples, whose special tokens mark documents.
        data: the section [data].

    Raises:
        DataError: an option needs document marks that the text lacks.
    """
    # These options find document boundaries in the tokens.
    wants_boundaries = data.reset_positions or data.document_mask or data.packing == "best_fit"
    if wants_boundaries and not samples.special_tokens.marks_boundaries:
        raise DataError(
            "data.reset_positions, data.document_mask and data.packing = 'best_fit' need documents that begin or end with a token of "
            "their own: set data.add_bos or data.add_eos, with a tokenizer that has such a token"
        )
    return partial(
        pack,
        special_tokens=samples.special_tokens,
        reset_positions=data.reset_positions,
        document_mask=data.document_mask,
    )


def num_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Count the bytes of text that the valid labels of a batch stand for. Bits a byte are loss / ln 2 / this number.

    Args:
        batch: a batch on the CPU.
        tokenizer: the tokenizer of its text.

    Returns:
        The bytes, or 0 for a tokenizer that drops bytes of the text, for which bits a byte would be wrong.
    """
    if not tokenizer.keeps_bytes:
        return 0
    # IGNORED is the only negative label.
    labels = batch.labels_BS[batch.labels_BS >= 0]
    return int(torch.from_numpy(tokenizer.byte_lengths)[labels].sum())


def training_samples(
    config: s.JobConfig, *, tokenizer: Tokenizer, rank: int, world: int
) -> Samples:
    """Return the text samples that a job trains on.

    The first process that needs a text tokenizes it into the cache. The other processes wait here. debug.seed orders the
    samples.

    Args:
        config: the job.
        tokenizer: tokenizer of the text. Prepared data must have been made with the same tokenizer.
        rank: this data-parallel rank, which matters for streams.
        world: number of data-parallel ranks.

    Raises:
        DataError: a source is unusable, or does not fit the job.
    """
    options = SampleOptions(
        tokenizer=tokenizer,
        data=config.data,
        seq_len=config.training.seq_len,
        split="train",
        seed=config.debug.seed,
        rank=rank,
        world=world,
        longest=longest_sequence(config) if config.phase else 0,
        num_lengths=len(sequence_lengths(config)),
    )
    return build_samples(training_sources(config), options=options)


def validation_samples(
    config: s.JobConfig, *, tokenizer: Tokenizer, rank: int, world: int
) -> Samples:
    """Return the text samples to validate on: all of validation.dataset, or documents held out of the training sources.

    The order does not depend on the job's seed, so that runs with different seeds measure the same samples.

    Args:
        config: the job.
        tokenizer: tokenizer of the text.
        rank: this data-parallel rank, which matters for streams.
        world: number of data-parallel ranks.

    Raises:
        DataError: a source is unusable, or there is no text to validate on.
    """
    validation, data = config.validation, config.data
    if validation.dataset:
        sources = resolve_sources(validation.dataset, dataset_path=validation.dataset_path)
        # All of a validation dataset is used: nothing is held out of it.
        split, data = "train", data.model_copy(update={"validation_fraction": 0.0})
    else:
        sources, split = training_sources(config), "validation"
    if not tokenizer.keeps_bytes and rank == 0:
        logger.warning(LOSSY)
    seq_len = validation.seq_len or config.training.seq_len
    options = SampleOptions(
        tokenizer=tokenizer,
        data=data,
        seq_len=seq_len,
        split=split,
        seed=0,
        rank=rank,
        world=world,
    )
    return build_samples(sources, options=options)


def order_of(config: s.JobConfig) -> dict[str, Any]:
    """Return the settings that decide which sample of a job comes next, by key. A resumed run has to keep them.

    Other files are reported (titan/checkpoint/identity.py), and other weights begin a part of the run (loader.py).
    """
    sources = training_sources(config)
    others = {*_OF_SAMPLES}
    if all(isinstance(source, s.ShardsSource | s.SyntheticSource) for source in sources):
        others |= {"add_bos", "add_eos", "validation_fraction"}  # `titan prepare` had them
    found = {f"data.{key}": v for key, v in config.data.model_dump(exclude=others).items()}
    found |= {"debug.seed": config.debug.seed, "training.seq_len": longest_sequence(config)}
    for number, source in enumerate(sources):
        name = f"data.sources[{number}]" if config.data.sources else "training.dataset"
        own = source.model_dump(mode="json", exclude={"type", "path", "weight"})
        found |= {f"{name}.{key}": value for key, value in own.items()}
    return found


def describe_sources(config: s.JobConfig) -> str:
    """Return one line about the sources that a job trains on."""
    sources = config.data.sources
    if not sources:
        path = config.training.dataset_path
        return config.training.dataset + (f" ({path})" if path else "")
    total = sum(source.weight for source in sources)
    return ", ".join(
        f"{source.type} {s.source_of(source).path or ''}".rstrip()
        + (f" {source.weight / total:.0%}" if len(sources) > 1 else "")
        for source in sources
    )
