"""Find the settings in which a resumed run differs from its checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import key_text
from .render import to_toml
from .schema import JobConfig
from .toml import KeyPath, format_value, tomllib

# Settings that decide which samples follow and what is done with them. Layouts and limits may change at a resume.
_SECTIONS = ("task", "tokenizer", "optimizer", "lr_scheduler", "data", "phase")
_KEYS = {
    ("debug", "seed"),
    ("loss", "name"),
    *(("training", key) for key in ("dataset", "dataset_path", "seq_len", "steps")),
}
# Settings of these sections that change no result: how the update is computed, and where tokens are kept.
_HARMLESS = {
    ("optimizer", "implementation"),
    ("optimizer", "early_step_in_backward"),
    ("data", "cache_folder"),
}


def changed_settings(
    saved: str, config: JobConfig, *, sequences: tuple[int | None, int]
) -> list[str]:
    """Return `key: old -> new` for each setting that differs.

    A key that only one of the configs has is not a change: another version of titan wrote it, or it was not set.

    Args:
        saved: the checkpoint's resolved config, as TOML.
        config: the run's config.
        sequences: sequences in a step, then (None: unknown) and now. How ranks share them does not matter.
    """
    # Both as resolved TOML, where every default is written.
    before, now = (dict(_leaves(tomllib.loads(text))) for text in (saved, to_toml(config)))
    watched = {path for path in now if path[0] in _SECTIONS or path in _KEYS} - _HARMLESS
    if config.lr_scheduler.total_steps:
        watched -= {("training", "steps")}  # the schedule does not depend on them
    changes = [
        (key_text(path), before[path], value)
        for path, value in now.items()
        if path in watched and before.get(path, value) != value
    ]
    # The keys may differ if ranks and accumulation make up for it, so compare the product.
    if sequences[0] not in (None, sequences[1]):
        changes.append(("training.global_batch_size", *sequences))
    return [f"{key}: {format_value(old)} -> {format_value(new)}" for key, old, new in changes]


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and value of every key that is not a table."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value
