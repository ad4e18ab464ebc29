"""Open the text of a job: what it trains on, what it validates on, and how rows of its tokens become batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from titan.config import schema as s
from titan.config.phases import longest_sequence, sequence_lengths
from titan.data import DataError
from titan.data.base import Samples
from titan.data.loader import Collate
from titan.data.packing import Batch, pack
from titan.data.samples import SampleOptions, build_samples
from titan.data.sources import resolve_sources
from titan.data.tokenizer import Tokenizer
from titan.data.tokenizer_base import LOSSY

logger = logging.getLogger(__name__)


def collate_rows(samples: Samples, data: s.DataSection) -> Collate:
    """Return what packs rows of tokens as [data] says. Raises DataError if it needs marks that the text lacks."""
    # These options read document boundaries from the tokens themselves.
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
    """Return the bytes of text that the valid labels of a batch (on the CPU) stand for, for bits a byte: loss / ln 2 / this.

    Return 0 for a tokenizer that drops bytes of the text, for which bits a byte would be wrong.
    """
    if not tokenizer.keeps_bytes:
        return 0
    # IGNORED is the only negative label.
    labels = batch.labels_BS[batch.labels_BS >= 0]
    return int(torch.from_numpy(tokenizer.byte_lengths)[labels].sum())


def training_samples(
    config: s.JobConfig, *, tokenizer: Tokenizer, rank: int, world: int
) -> Samples:
    """Return the rows of tokens that a job trains on, for a data-parallel rank of `world`. Raises DataError.

    The first process that needs a text tokenizes it into the cache. The others wait here. debug.seed orders the samples.

    Args:
        tokenizer: makes tokens of text; prepared data must have been made with the same one.
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
    return build_samples(_training_sources(config), options=options)


def validation_samples(
    config: s.JobConfig, *, tokenizer: Tokenizer, rank: int, world: int
) -> Samples:
    """Return the rows of tokens to validate on: validation.dataset in full, or the documents held out of the training sources.

    The order does not depend on the job's seed, so that runs with different seeds measure the same samples.
    """
    validation, data = config.validation, config.data
    if validation.dataset:
        sources = resolve_sources(validation.dataset, dataset_path=validation.dataset_path)
        # A dataset for validation is used whole: nothing is held out of it.
        split, data = "train", data.model_copy(update={"validation_fraction": 0.0})
    else:
        sources, split = _training_sources(config), "validation"
    if not tokenizer.keeps_bytes and rank == 0:
        logger.warning(LOSSY)
    seq_len = validation.seq_len or config.training.seq_len
    options = SampleOptions(
        tokenizer=tokenizer, data=data, seq_len=seq_len, split=split, seed=0, rank=rank, world=world
    )
    return build_samples(sources, options=options)


def _training_sources(config: s.JobConfig) -> Sequence[s.Section]:
    training = config.training
    return config.data.sources or resolve_sources(
        training.dataset, dataset_path=training.dataset_path
    )


def describe_sources(config: s.JobConfig) -> str:
    """Return what a job trains on, in a line."""
    sources = config.data.sources
    if not sources:
        path = config.training.dataset_path
        return config.training.dataset + (f" ({path})" if path else "")
    total = sum(source.weight for source in sources)
    return ", ".join(
        f"{source.type} {getattr(source, 'path', '')}".rstrip()
        + (f" {source.weight / total:.0%}" if len(sources) > 1 else "")
        for source in sources
    )
