"""Identity of a run's text: facts that tie weights, tokenizer and data together. Imports no torch.

titan.json keeps them:

    "text": {"tokenizer":     {"identity": ..., "kind": ..., "vocab_size": ..., "bos_id": ..., "eos_id": ..., "file": ...},
             "chat_template": fingerprint,
             "data":          {"training.dataset_path": {"identity": ..., "files": 3, "bytes": 41_000}}}

Other text under the same tokenizer is reported, and weights of another tokenizer are refused. Steps
of older versions have no such facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan.checkpoint import CheckpointError
from titan.checkpoint.manifest import TITAN_JSON, list_steps
from titan.checkpoint.saved import read_metadata
from titan.checkpoint.storage import Location, as_location, join
from titan.config import schema as s
from titan.config.schema import JobConfig, streams
from titan.config.task import reads_text
from titan.data import DataError
from titan.data.examples import is_file
from titan.data.sources import open_documents, resolve_sources
from titan.data.tokenizer import Tokenizer, tokenizer_named
from titan.data.tokenizer_base import fingerprint
from titan.data.tokenizer_files import FOLDER, tokenizer_files
from titan.untrusted import InputError, read_bytes


def sources_of(config: JobConfig, section: str) -> Iterator[tuple[str, s.Section]]:
    """Yield the sources of "training" or "validation", each with the key that names it."""
    if section == "training" and config.data.sources:
        for number, source in enumerate(config.data.sources):
            yield f"data.sources[{number}].path", source
        return
    dataset, path = getattr(config, section).dataset, getattr(config, section).dataset_path
    with suppress(DataError):  # section_rules.py reports it
        for source in resolve_sources(dataset, dataset_path=path):
            yield f"{section}.dataset_path" if path else f"{section}.dataset", source


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the facts that identify a tokenizer."""
    names = ("identity", "kind", "vocab_size", "bos_id", "eos_id")
    return {n: getattr(tokenizer, n) for n in names} | {"file": str(tokenizer.file or "")}


def text_facts(config: JobConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the facts about a run's text for titan.json."""
    sources = [*sources_of(config, "training")] if reads_text(config) else []
    if sources and config.validation.enable and config.validation.dataset:
        sources += sources_of(config, "validation")
    data = {key: facts for key, source in sources if (facts := _source_facts(source))}
    for number, section in enumerate(config.evaluation):
        for task in filter(is_file, section.tasks):
            content = read_bytes(Path(task).expanduser())
            facts = {"files": 1, "bytes": len(content), "identity": fingerprint(content)}
            data[f"evaluation[{number}].tasks, {task}"] = facts
    template = fingerprint(tokenizer.chat_template) if tokenizer.chat_template else ""
    return {"tokenizer": tokenizer_facts(tokenizer), "chat_template": template, "data": data}


def _source_facts(source: s.Section) -> dict[str, Any]:
    """Return sizes and identity of a source, {} for an endless source. Times of files do not count."""
    if isinstance(source, s.SyntheticSource) or streams(source):
        return {}
    if isinstance(source, s.ShardsSource):
        from titan.data.shards import INDEX, read_index  # imports numpy

        index = read_index(Path(source.path).expanduser() / INDEX)
        counts = {name: index.total("train", name) for name in ("documents", "tokens")}
        return counts | {"identity": fingerprint(index.fingerprint, index.splits)}
    documents = open_documents(source)
    files = documents.identity[-1] if documents.identity else ()
    if not (isinstance(files, list) and all(isinstance(f, list) and len(f) == 3 for f in files)):
        return {"bytes": documents.num_bytes, "identity": fingerprint(*documents.identity)}
    names = [(Path(name).name, size) for name, size, _ in files]
    counts = {"files": len(files), "bytes": sum(size for _, size in names)}
    return counts | {"identity": fingerprint(*names)}


def saved_facts(step: Location) -> dict[str, Any]:
    """Return the facts about text in a step's titan.json; {} if there are none, or it is not readable."""
    try:
        saved = read_metadata(step).get("text")
    except CheckpointError:  # loading reports it
        return {}
    if not isinstance(saved, dict):
        return {}
    return {
        key: part for key, part in saved.items() if isinstance(part, dict) or key == "chat_template"
    }


def other_tokenizer(config: JobConfig, tokenizer: Tokenizer, folder: Location) -> str:
    """Compare a job's tokenizer with that of its initial weights.

    The newest step that records its tokenizer counts. Without steps, the initial checkpoint counts.

    Args:
        config: the job.
        tokenizer: tokenizer of the job.
        folder: folder of the job's steps.

    Returns:
        Why weights and tokenizer do not fit; "" if they do, or if the tokenizer of the weights
        is unknown.
    """
    section = config.checkpoint
    if not section.enable or "tokenizer" in section.exclude_from_loading:
        return ""
    numbers = list_steps(folder)[::-1] if section.load_step == -1 else [section.load_step]
    places: list[Location] = [join(folder, f"step-{number}") for number in numbers]
    is_hf = not places and section.initial_load_in_hf
    first = section.initial_load_path or (config.model.hf_assets_path if is_hf else "")
    if not places and first:
        places = [as_location(first)]
    for place in places:
        saved, where = saved_facts(place).get("tokenizer", {}), join(place, TITAN_JSON)
        named = Path(str(saved.get("file") or "")).parent
        if isinstance(place, Path) and (copy := place.absolute().parent.parent / FOLDER).is_dir():
            named = copy
        if is_hf:
            where = named = place
            with suppress(InputError):  # titan cannot read this tokenizer
                if tokenizer_files(str(place)):
                    saved = tokenizer_facts(tokenizer_named(str(place)))
        if "identity" not in saved:
            continue
        if saved["identity"] == tokenizer.identity:
            return ""
        is_bytes = saved.get("kind") == "bytes"
        fix = (
            'tokenizer.name = "bytes" and no tokenizer.path'
            if is_bytes
            else f"tokenizer.path = {named}"
        )
        return (
            f"{where}: its weights belong to the tokenizer {_named(saved)}, and the job has {_named(tokenizer_facts(tokenizer))}; "
            f'set {fix}, or, to train other embeddings on purpose, checkpoint.exclude_from_loading = ["tokenizer"]'
        )
    return ""


def require_one_tokenizer(steps: Sequence[Location]) -> None:
    """Check that steps were trained with the same tokenizer.

    Raises:
        InputError: two tokenizers differ.
    """
    known = [
        (step, of["tokenizer"]) for step in steps if (of := saved_facts(step)).get("tokenizer")
    ]
    for step, saved in known:
        if saved.get("identity") != known[0][1].get("identity"):
            raise InputError(
                f"{step} has the tokenizer {_named(saved)}, and {known[0][0]} has {_named(known[0][1])}: "
                "weights of two tokenizers have no mean"
            )


def text_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each difference between a run's text and a step's."""
    before = {"template": saved.get("chat_template"), **saved.get("tokenizer", {})}
    after = {"template": now["chat_template"], **now["tokenizer"]}
    lines = [
        f"the tokenizer's {name} changed since the step was saved: {_or_none(before[name])} -> {_or_none(after[name])}"
        for name in ("template", "bos_id", "eos_id")
        if before.get(name, after[name]) not in (None, after[name])
    ]
    for key, new in now["data"].items():
        old = saved.get("data", {}).get(key)
        if isinstance(old, dict) and old.get("identity") != new["identity"]:
            counts = f"{key}: {_counted(old)} -> {_counted(new)}"
            lines.append(
                f"WARNING: THE DATA CHANGED since the step was saved, so rows may come again, or never: {counts}"
            )
    return lines


def _or_none(value: object) -> object:
    return "none" if value in (None, "") else value


def _named(facts: dict[str, Any]) -> str:
    file = facts.get("file") or "embedded"
    return (
        f"{facts.get('kind')} of {facts.get('vocab_size')} tokens ({file}, {facts.get('identity')})"
    )


def _counted(facts: dict[str, Any]) -> str:
    counts = {key: value for key, value in facts.items() if isinstance(value, int)}
    return ", ".join(f"{value:,} {key}" for key, value in counts.items()) or "unknown size"
