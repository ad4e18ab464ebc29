"""Cross entropy of a text under byte frequencies, as a baseline for a model of bytes.

A model that has learned only which bytes are common reaches this cross entropy. A lower loss, in bits a byte, means that the
model uses context.
"""

from __future__ import annotations

import numpy as np

from titan.data.loader import Loader
from titan.data.special_tokens import CONTEXT, KIND_SHIFT, without_kind
from titan.data.tokenizer import Tokenizer

_MAX_TOKENS = 2**22  # of each text that are counted
_BATCH_TOKENS = 2**17  # that are read at once


def unigram_bits_per_byte(
    train: Loader, *, validation: Loader, tokenizer: Tokenizer
) -> float | None:
    """Compute the cross entropy of the validation text under the byte frequencies of the training text.

    Args:
        train: loader of the training text.
        validation: loader of the validation text.
        tokenizer: the tokenizer of both.

    Returns:
        Bits a byte, or None if a text is endless or the tokenizer does not keep all bytes of a text.
    """
    if not tokenizer.keeps_bytes:
        return None
    if train.samples.num_samples is None or validation.samples.num_samples is None:
        return None
    counts, other = (byte_counts(x, tokenizer) for x in (train, validation))
    return cross_entropy_bits(counts, validation=other)


def byte_counts(loader: Loader, tokenizer: Tokenizer) -> np.ndarray:
    """Count how often each byte occurs in the first tokens of an epoch, float64[256]."""
    token_counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    num_samples, begin, count = loader.samples.num_samples or 0, 0, 1
    while begin < num_samples and token_counts.sum() < _MAX_TOKENS:
        # Count labels, since a model predicts labels.
        labels = loader.samples.get(np.arange(begin, min(begin + count, num_samples)))[:, 1:]
        # Each count goes through the vocabulary, so that short samples are counted many at a time.
        begin, count = begin + count, max(1, _BATCH_TOKENS // labels.shape[1])
        labels = without_kind(labels[labels < CONTEXT << KIND_SHIFT])
        token_counts += np.bincount(labels[labels >= 0], minlength=len(token_counts))
    # Convert counts of tokens to counts of their bytes.
    counts = np.zeros(256, dtype=np.float64)
    for token in np.flatnonzero(token_counts):
        spelling = np.frombuffer(tokenizer.token_bytes(int(token)), dtype=np.uint8)
        counts += token_counts[token] * np.bincount(spelling, minlength=256)
    return counts


def cross_entropy_bits(train: np.ndarray, *, validation: np.ndarray) -> float:
    """Return the bits a byte to code a text with byte counts `validation` by the byte frequencies of `train`."""
    # Add one to each count (Laplace), so that no byte has probability 0.
    probability = (train + 1) / (train.sum() + len(train))
    return float(-(validation * np.log2(probability)).sum() / validation.sum())
