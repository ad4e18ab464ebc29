"""Comparison of the jobs of two replica groups: every key must be equal, except the keys that are known to be harmless.

titan.config.resume_diff answers another question, which settings of a run have changed since its checkpoint. A resume may
have another layout, batch or library. Groups may not: they would hold other tensors, or apply the same sum differently.
"""

from __future__ import annotations

from titan.config.resume_diff import leaves
from titan.config.toml import KeyPath, format_value, key_text, tomllib

# What a group writes about itself, what it reads in advance and what `titan sim` assumes. A tuple covers the keys below it.
HARMLESS: tuple[KeyPath, ...] = (
    ("job",),
    ("metrics",),
    ("profiling",),
    ("hardware",),
    ("simulator",),
    ("training", "dataloader"),
    ("training", "gc_freq"),
    ("training", "expandable_segments"),
    ("data", "cache_folder"),
    ("compile", "cache_folder"),
    ("comm", "trace_buf_size"),
    ("comm", "save_traces_folder"),
    ("comm", "save_traces_file_prefix"),
    ("comm", "numa_binding"),
    ("fault_tolerance", "replica_id"),
    ("fault_tolerance", "lighthouse"),
)


def differences(theirs: str, ours: str) -> list[str]:
    """Return `key: their value -> our value` for each key that must be equal and is not.

    Args:
        theirs: Another group's resolved config, as TOML.
        ours: This group's.
    """
    them, us = (dict(leaves(tomllib.loads(text))) for text in (theirs, ours))
    return [
        f"{key_text(path)}: {_text(them, path)} -> {_text(us, path)}"
        for path in sorted({*them, *us}, key=str)
        if them.get(path) != us.get(path) and not _is_harmless(path)
    ]


def _is_harmless(path: KeyPath) -> bool:
    return any(path[: len(known)] == known for known in HARMLESS)


def _text(values: dict[KeyPath, object], path: KeyPath) -> str:
    # TOML has no null: a key that is None is not there.
    return format_value(values[path]) if path in values else "unset"
