"""Length of the documents that a job packs into sequences. Imports no torch.

Under a document mask, a token sees the tokens of its own document alone, so the lengths decide what
attention costs. They are in the data, or in `simulator.document_tokens`.
"""

from __future__ import annotations

from pathlib import Path

from titan.config.schema import JobConfig, ShardsSource
from titan.sim.section import assumptions

_SAMPLE = 2_000_000
"""Tokens to look at, at most."""


def document_keys(config: JobConfig) -> float | None:
    """Return the mean number of keys that a token sees in its document, its own included; 0 without a document mask.

    Documents are cut where a sequence ends. None if nothing tells their lengths: then attention
    costs as much as without a mask.
    """
    if not config.data.document_mask:
        return 0.0
    seq_len = config.training.seq_len
    if assumptions(config).document_tokens:
        return (min(assumptions(config).document_tokens, seq_len) + 1) / 2
    import numpy as np

    from titan.data import DataError
    from titan.data.shards import TokenShards
    from titan.data.sources import training_sources
    from titan.data.special_tokens import without_kind

    sources = training_sources(config)
    weights, means = [], []
    for source in sources:
        if not isinstance(source, ShardsSource):
            return None
        try:
            shards = TokenShards(Path(source.path), split="train")
        except (DataError, OSError):
            return None
        count = min(shards.num_tokens, _SAMPLE) // seq_len * seq_len
        if not count or not shards.special_tokens.marks_boundaries:
            return None
        tokens = shards.read(0, count=count)
        ids = without_kind(tokens) if shards.index.kinds else tokens
        starts_BS = shards.special_tokens.starts(ids.reshape(-1, seq_len))
        starts_BS[:, 0] = True
        lengths = np.diff(np.flatnonzero(starts_BS), append=count)
        weights.append(source.weight)
        means.append(float((lengths * (lengths + 1)).sum()) / 2 / count)
    return float(np.average(means, weights=weights))
