"""Which settings of a resumed run are others than those that its checkpoint was saved with. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .problems import key_text
from .render import to_toml
from .sections import JobConfig
from .toml import KeyPath, format_value, tomllib

# What decides which samples are to come, and what is done with them. Layouts and limits may change from one start to the next.
_SECTIONS = ("tokenizer", "optimizer", "lr_scheduler", "data")
_KEYS = {
    ("debug", "seed"),
    *(
        ("training", key)
        for key in ("dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len", "steps")
    ),
}  # fmt: skip


def changed_settings(saved: str, config: JobConfig) -> list[str]:
    """`key: old -> new` of each setting that differs from `saved`, a resolved config as TOML. Keys that only one of them has are
    no change: they are of another version of titan, or were not set."""
    before, now = (dict(_leaves(tomllib.loads(text))) for text in (saved, to_toml(config)))
    return [
        f"{key_text(path)}: {format_value(before[path])} -> {format_value(value)}"
        for path, value in now.items()
        if before.get(path, value) != value and (path[0] in _SECTIONS or path in _KEYS)
    ]


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Key paths and values that are no tables."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value
