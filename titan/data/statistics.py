"""A yardstick for a model of bytes: how well the frequencies of single bytes predict the text.

A model that has learnt only which bytes are common reaches the cross entropy computed here; a lower loss in bits a
byte means that it uses context. The trainer's demo prints the two side by side.
"""

from __future__ import annotations

import numpy as np

from titan.data.loader import Loader


def byte_counts(loader: Loader, *, max_tokens: int) -> np.ndarray | None:
    """How often each byte occurs in the first `max_tokens` of an epoch, float64[256]; None for endless text."""
    samples = loader.samples
    if samples.num_samples is None:
        return None
    token_counts = np.zeros(loader.tokenizer.vocab_size, dtype=np.int64)
    seen = 0
    for number in range(samples.num_samples):
        labels = samples.get(np.array([number]))[0, 1:]
        token_counts += np.bincount(labels, minlength=len(token_counts))
        seen += len(labels)
        if seen >= max_tokens:
            break
    counts = np.zeros(256, dtype=np.float64)
    for token in np.flatnonzero(token_counts):
        spelling = np.frombuffer(loader.tokenizer.token_bytes(int(token)), dtype=np.uint8)
        counts += token_counts[token] * np.bincount(spelling, minlength=256)
    return counts


def cross_entropy_bits(train: np.ndarray, *, validation: np.ndarray) -> float:
    """Bits a byte to code text of byte counts `validation` by the frequencies of `train`, one added to each."""
    probability = (train + 1) / (train.sum() + len(train))
    return float(-(validation * np.log2(probability)).sum() / validation.sum())


def unigram_bits_per_byte(
    train: Loader, *, validation: Loader, max_tokens: int = 2**22
) -> float | None:
    """Cross entropy of the validation text under the byte frequencies of the training text, in bits a byte.

    Each is measured on its first `max_tokens` tokens in the order of its samples. None where either is endless.
    """
    train_counts = byte_counts(train, max_tokens=max_tokens)
    validation_counts = byte_counts(validation, max_tokens=max_tokens)
    if train_counts is None or validation_counts is None:
        return None
    return cross_entropy_bits(train_counts, validation=validation_counts)
