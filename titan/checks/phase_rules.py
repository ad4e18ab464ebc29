"""Rules of the `[[phase]]` tables (docs/optimizers.md).

layout_rules.py checks their order, which depends on the ranks.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

from titan.config.errors import Violations
from titan.config.phases import DEGREES, longest_sequence, phases_of, sections_in
from titan.config.schema import JobConfig, reads_chats, streams
from titan.config.task import reads_text
from titan.data import DataError
from titan.data.sources import training_sources


def has_conversations(config: JobConfig) -> bool:
    """Return whether a job names conversations to train on.

    Shards of conversations show only when they are opened.
    """
    named = any(reads_chats(source) for source in config.data.sources)
    return named or config.training.dataset == "conversations"


def check_borders(config: JobConfig, world_size: int) -> Violations:
    """Check each change of the layout, over which a checkpoint carries the run."""
    checkpoint, is_stream = config.checkpoint, False
    with suppress(DataError):  # another rule reports it
        has_sources = config.data.sources or reads_text(config)
        is_stream = has_sources and any(map(streams, training_sources(config)))
    for before, phase in pairwise(phases_of(config, world_size=world_size)):
        if before.mesh == phase.mesh or phase.section is None:
            continue
        key = next(iter(phase.section.model_dump(include=DEGREES, exclude_none=True)))
        key = f"phase[{before.number - 1}].{key}"
        if checkpoint.why_unsaved:
            fix = "set checkpoint.enable = true and load_only = false, or remove it"
            yield key, f"changes the layout, and a checkpoint carries the run over; {fix}"
        old, new = before.layout.dp, phase.layout.dp
        at_once = phase.config.training.local_batch_size * max(new, 1)
        if phase.sequences % at_once:
            reason = f"keeps the {phase.sequences} sequences of a step, and {new} data-parallel ranks pass {at_once} at once"
            yield key, f"{reason}; set global_batch_size or local_batch_size in the phase"
        if is_stream and old != new:
            reason = (
                f"{new} data-parallel ranks cannot go on with a stream that {old} read in parts"
            )
            yield (
                key,
                f"{reason}; keep their number, or set streaming = false in [[data.sources]]",
            )


def check_phases(config: JobConfig) -> Violations:
    """Check each table alone, and against the rest of the job."""
    count, longest, is_text = (
        len(config.data.sources),
        longest_sequence(config),
        reads_text(config),
    )
    for number, phase in enumerate(config.phase):
        key, length, weights = f"phase[{number}]", phase.seq_len, phase.weights
        if (phase.from_step is None) == (phase.from_tokens is None):
            yield key, "set either from_step or from_tokens, to say where it begins"
        own = phase.model_dump(exclude_none=True, exclude={"from_step", "from_tokens"})
        before, after = (sections_in(config, number + n) for n in (1, 2))
        if not own and before == after:
            yield key, "changes nothing; set what it changes, such as seq_len, or remove it"
        if not is_text and (length or weights):
            yield (
                key,
                "the task reads no text; only batch sizes and the learning rate can change",
            )
        if length and is_text and config.data.packing == "best_fit":
            reason = "best-fit rows have one length in a run"
            yield f"{key}.seq_len", f'{reason}; set data.packing = "cut"'
        elif length and has_conversations(config):
            yield (
                f"{key}.seq_len",
                "rows of whole conversations have one length in a run; remove it",
            )
        if weights is not None and (len(weights) != count or not any(weights)):
            reason = f"expected {count} weights, one for each of data.sources, of which one or more are above 0"
            if not count:
                reason = "this job has one source; name each in [[data.sources]] to weigh them"
            yield f"{key}.weights", reason
        # If the job's own length does not fit, report the phase: its line was added.
        other = config.training.seq_len if length == longest else longest
        if length and max(length, other) % min(length, other):
            rule = (
                f"the longest, {longest}, must be a multiple of every other length of the job"
            )
            fix = f"use a multiple or a divisor of {other}"
            yield f"{key}.seq_len", f"{length} does not fit {other}: {rule}; {fix}"
