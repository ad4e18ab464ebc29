"""Measure how well the frequencies of single bytes predict a text, as a yardstick for a model of bytes.

A model that has learnt only which bytes are common reaches the cross entropy computed here. A lower loss, in bits a byte,
means that it uses context.
"""

from __future__ import annotations

import numpy as np

from titan.data.loader import Loader
from titan.data.special_tokens import CONTEXT, KIND_SHIFT, without_kind
from titan.data.tokenizer import Tokenizer


def unigram_bits_per_byte(
    train: Loader, *, validation: Loader, tokenizer: Tokenizer, max_tokens: int = 2**22
) -> float | None:
    """Return the cross entropy of the validation text under the byte frequencies of the training text, in bits a byte.

    Each is measured on its first `max_tokens` tokens, in the order of its samples. Return None if either is endless or the
    tokenizer does not keep all bytes of a text.
    """
    if not tokenizer.keeps_bytes:
        return None
    if train.samples.num_samples is None or validation.samples.num_samples is None:
        return None
    counts, other = (byte_counts(x, tokenizer, max_tokens=max_tokens) for x in (train, validation))
    return cross_entropy_bits(counts, validation=other)


def byte_counts(loader: Loader, tokenizer: Tokenizer, *, max_tokens: int) -> np.ndarray:
    """Return how often each byte occurs in the first `max_tokens` of an epoch, float64[256]."""
    token_counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for number in range(loader.samples.num_samples or 0):
        # Labels, since a model predicts those.
        labels = loader.samples.get(np.array([number]))[0, 1:]
        labels = without_kind(labels[labels < CONTEXT << KIND_SHIFT])
        token_counts += np.bincount(labels[labels >= 0], minlength=len(token_counts))
        if token_counts.sum() >= max_tokens:
            break
    # From counts of tokens to counts of the bytes that they stand for.
    counts = np.zeros(256, dtype=np.float64)
    for token in np.flatnonzero(token_counts):
        spelling = np.frombuffer(tokenizer.token_bytes(int(token)), dtype=np.uint8)
        counts += token_counts[token] * np.bincount(spelling, minlength=256)
    return counts


def cross_entropy_bits(train: np.ndarray, *, validation: np.ndarray) -> float:
    """Return the bits a byte that code text of byte counts `validation` by the frequencies of `train`."""
    # One is added to each count (Laplace), so that no byte has probability 0.
    probability = (train + 1) / (train.sum() + len(train))
    return float(-(validation * np.log2(probability)).sum() / validation.sum())
