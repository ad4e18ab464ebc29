"""Identity of a job: does a checkpoint's model, text and settings fit the job that goes on from it? Imports no torch.

titan.json in each step describes the job that saved it (`read_metadata`). Three answers follow from the comparison:

    another model, or another tokenizer     refused: it would misuse weights of the same shapes
    other settings                          reported, but for those of free_keys.toml
    other data under the same tokenizer     reported

    "model": {"model.name": "llama3", "model.overrides.dim": 64, ..., "task.name": "next_token"}
    "text": {"tokenizer":     {"identity": ..., "kind": ..., "vocab_size": ..., "bos_id": ..., "eos_id": ..., "file": ...},
             "chat_template": fingerprint,
             "data":          {"training.dataset_path": {"identity": ..., "files": 3, "bytes": 41_000}}}

Steps of older versions lack some facts. titan.train asks before it imports torch, and the manager asks again about the loaded step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field

from titan.base.untrusted import Count, Finite, InputError, parse_json
from titan.checkpoint import CheckpointError
from titan.checkpoint.formats import LOST, NEWER, require_known, unreadable
from titan.checkpoint.manifest import TITAN_JSON, list_steps
from titan.checkpoint.storage import Location, as_location, join, name_of, read_file
from titan.config import schema as s
from titan.config.errors import ConfigError, key_text
from titan.config.plug_ins import door, parts_of
from titan.config.schema import JobConfig, streams
from titan.config.task import NEXT_TOKEN, any_options, reads_text, task_module, task_options
from titan.config.toml import KeyPath, format_value, tomllib
from titan.data import DataError
from titan.data.sources import open_documents, resolve_sources
from titan.data.special_tokens import fingerprint
from titan.data.tokenizer import Tokenizer, tokenizer_named
from titan.data.tokenizer_files import FOLDER, tokenizer_files

K = TypeVar("K")
_TABLE = tomllib.loads(Path(__file__).with_name("free_keys.toml").read_text("utf-8"))
_FREE = {name: group["kind"] for group in _TABLE["keys"] for name in group["names"]}
# Sizes that weigh terms of the loss or set the initial weights. They do not change what a model computes.
_OF_TRAINING = {*_TABLE["of_training"]}
_MODEL, _OPTION = "model.overrides.", "task.options."


@dataclass
class _Text:
    """Facts of titan.json about a run's text, with the types to check."""

    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat_template: str = ""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Place:
    """Place in the data."""

    position: Count = 0
    skipped: list[tuple[Count, Count]] = field(default_factory=list)


@dataclass
class _Saved:
    """Fields of titan.json that titan reads, with the types to check."""

    step: Count = 0
    tokens: Count = 0
    model_only: bool = False
    config: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    text: _Text = field(default_factory=_Text)
    data: _Place = field(default_factory=_Place)
    recovery: dict[str, list[Finite] | Count] = field(default_factory=dict)
    loss_scale: dict[str, Annotated[Finite, Field(ge=0)]] = field(default_factory=dict)
    sequences_per_step: Annotated[int, Field(ge=1)] = 1


def read_metadata(path: Location, *required: str) -> dict[str, Any]:
    """Return the `metadata` that a step was saved with.

    Args:
        path: folder of the step.
        *required: keys that the metadata must have.

    Raises:
        CheckpointError: the file is unusable, or lacks a required key.
    """
    name = join(path, TITAN_JSON)
    try:
        text = read_file(name)
        require_known(text, file=name)
        step = parse_json(text, _Saved, name=name).step
        content = parse_json(text, dict[str, Any], name=name)
        if name_of(path)[:5] == "step-" and name_of(path) != f"step-{step}":
            raise InputError(f"{name}: belongs to step {step}")
    except OSError as error:
        raise unreadable(name, error) from error
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(f"{path} is not a checkpoint of titan: {error}") from error
    if missing := [key for key in required if key not in content]:
        raise CheckpointError(f"{name}: lacks {', '.join(missing)}")
    return content


def differing(before: Mapping[K, Any], now: Mapping[K, Any]) -> dict[K, tuple[Any, Any]]:
    """Return the old and the new value of each key that differs, None where one of the two has no such key."""
    pairs = {key: (before.get(key), now.get(key)) for key in {**before, **now}}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def change_lines(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return each change as `key: old -> new`."""
    return [
        f"{key}: {' -> '.join('not set' if v is None else format_value(v) for v in values)}"
        for key, values in changes.items()
    ]


def freedom(key: str) -> str:
    """Return the kind of a key in free_keys.toml, "" for a key that may not differ."""
    while key and key not in _FREE:
        key = key.rpartition(".")[0]
    return _FREE.get(key, "")


def settings(config: JobConfig) -> dict[str, Any]:
    """Return every setting of a job by its key, defaults included."""
    return dict(leaves(config.whole.model_dump(mode="json")))


def saved_settings(text: str, now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a job in TOML.

    Args:
        text: the resolved job. Keys that its titan did not know have their defaults.
        now: settings that stand in for unknown ones: all of them if there is no text, those that the text lacks if another titan wrote keys
            that this one does not have.
    """
    tables = tomllib.loads(text)
    try:
        return settings(JobConfig.model_validate(tables)) if tables else now
    except (ConfigError, ValueError):
        return {**now, **dict(leaves(tables))}


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of every key that is not a table."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield key_text(path), value


def changed_settings(
    saved: str, config: JobConfig, *, sequences: tuple[int | None, int]
) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs and is not free.

    Args:
        saved: the checkpoint's resolved config, as TOML.
        config: the run's config.
        sequences: sequences in a step, then (None if unknown) and now. Their distribution over ranks does not matter.
    """
    now = settings(config)
    found = differing(saved_settings(saved, now), now)
    found = {
        key: values
        for key, values in found.items()
        if freedom(key) in ("", "format", "measured")
    }
    if config.lr_scheduler.total_steps:
        found.pop("training.steps", None)  # the schedule does not depend on them
    # The keys may differ if ranks and accumulation make up for it, so compare the resulting number of sequences.
    if sequences[0] not in (None, sequences[1]):
        found["training.global_batch_size"] = sequences
    return found


def job_facts(config: JobConfig) -> dict[str, Any]:
    """Return the settings that decide what a job's model computes, by key, for titan.json.

    They are the family and its sizes, the task, and the task's options, except the options that it lists in `may_change`.
    """
    sizes, module = config.model.sizes, task_module(config)
    names = [field.name for field in dataclasses.fields(sizes) if field.init]
    # A family may say in other words what its sizes follow from.
    of_sizes = sizes.facts or {n: getattr(sizes, n) for n in names}
    facts = {"model.name": config.model.name} | {_MODEL + n: v for n, v in of_sizes.items()}
    facts["task.name"] = NEXT_TOKEN
    if module is not None:
        options = task_options(config)
        free = any_options(config).may_change
        facts["task.name"] = config.task.name or config.model.name
        facts |= {
            _OPTION + k: v for k, v in dataclasses.asdict(options).items() if k not in free
        }
    return json.loads(json.dumps(facts, default=str))  # as titan.json stores it


def changed_model(
    saved: Mapping[str, Any], config: JobConfig, *, of_training: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Compare a step's model with the job's model.

    Args:
        saved: the step's titan.json. Steps of an older titan have no facts in it, but a config.
        config: the job.
        of_training: compare the sizes that matter only for training, in place of the sizes that decide what the model computes.

    Returns:
        The old and the new value of each key that differs.
    """
    before, now = saved.get("model"), job_facts(config)
    if not before:
        # A step of an older titan has no facts. Its keys may be unknown, or its package gone.
        with suppress(ConfigError, ValueError, LookupError, TypeError, AttributeError):
            old = tomllib.loads(saved["config"])
            names = {"name", "flavor", "overrides"} & old["model"].keys()
            model = {name: old["model"][name] for name in names}
            tables = {"model": model, "task": old.get("task", {})}
            before = job_facts(JobConfig.model_validate(tables))
    before = before or {}
    # Another version of titan has other facts.
    shared = before.keys() & now.keys()
    found = {key: pair for key, pair in differing(before, now).items() if key in shared}
    if "model.name" in found:  # the sizes of another family do not compare
        found = {"model.name": found["model.name"]}
    return {
        key: values
        for key, values in found.items()
        if (key.removeprefix(_MODEL) in _OF_TRAINING) == of_training
    }


def require_same_model(path: Location, config: JobConfig, *, but: Collection[str] = ()) -> None:
    """Check that a step's model computes the same as the job's model.

    Args:
        path: folder of the step.
        config: the job.
        but: keys that may differ.

    Raises:
        CheckpointError: the models differ. The message names the keys.
    """
    found = changed_model(read_metadata(path), config)
    changes = {key: values for key, values in found.items() if key not in but}
    if not changes:
        return
    key, (old, new) = next(iter(changes.items()))
    others = change_lines(changes)[1:]
    rest = f" (also {'; '.join(others[:4])}{', ...' * (len(others) > 4)})" if others else ""
    message = (
        f"{format_value(new)}, but {path} was saved with {format_value(old)}{rest}: this is another model. Set it back. Or, to begin "
        f"with what fits of these weights, name another job.dump_folder, checkpoint.initial_load_path = {format_value(str(path))} and "
        f"checkpoint.initial_load_changes = {format_value([*but, *changes])}"
    )
    problem = config.source_map.problem(key, message)
    raise CheckpointError(str(problem), kind="checkpoint_differs")


def _steps(config: JobConfig, folder: Location) -> list[Location]:
    """Return the steps of a folder that a run may continue from, the newest first."""
    wanted = config.checkpoint.load_step
    return [
        join(folder, f"step-{n}") for n in reversed(list_steps(folder)) if wanted in (-1, n)
    ]


def step_to_continue(config: JobConfig) -> int:
    """Return the step that a run continues after, or 0. Only local folders are read, so the trainer may find another."""
    section, saved = config.checkpoint, require_startable(config)
    if not saved:
        return 0
    is_own = list_steps(Path(config.job.dump_folder) / section.folder)
    return saved.get("step", 0) if is_own or not section.initial_load_model_only else 0


def require_startable(config: JobConfig) -> dict[str, Any]:
    """Return the titan.json of the step that a run would continue from, or begin with.

    Only local folders are read. Whether the step is whole is checked later.

    Returns:
        The contents, or {} if there is no step or none can be read.

    Raises:
        CheckpointError: the step has another model, or a newer titan wrote it.
    """
    section, may_differ = config.checkpoint, list[str]()
    if not section.enable or "://" in section.folder:
        return {}
    folder = Path(config.job.dump_folder) / section.folder
    try:
        steps = _steps(config, folder)
    except CheckpointError:
        return {}  # the manager tries again, and reports it
    other = section.initial_load_path or "://"
    if not steps and "://" not in other and not section.initial_load_in_hf:
        steps, may_differ = [Path(other)], section.initial_load_changes
    for path in steps:
        try:
            found = read_metadata(path)
        except CheckpointError as error:
            if error.kind == NEWER:
                raise
            if error.kind == LOST:
                break  # as above
            continue
        require_same_model(path, config, but=may_differ)
        return found
    return {}


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


@door("text")
class FactsOfText(Protocol):
    """Function that returns the facts about more texts of a run, such as files of tasks, for titan.json."""

    def __call__(self, config: JobConfig, /) -> dict[str, Any]: ...


def text_facts(config: JobConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the facts about a run's text for titan.json."""
    sources = [*sources_of(config, "training")] if reads_text(config) else []
    if sources and config.validation.enable and config.validation.dataset:
        sources += sources_of(config, "validation")
    data = {key: facts for key, source in sources if (facts := _source_facts(source))}
    for facts_of in parts_of(FactsOfText):
        data |= facts_of(config)
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
    if not (
        isinstance(files, list) and all(isinstance(f, list) and len(f) == 3 for f in files)
    ):
        return {"bytes": documents.num_bytes, "identity": fingerprint(*documents.identity)}
    names = [(Path(name).name, size) for name, size, _ in files]
    counts = {"files": len(files), "bytes": sum(size for _, size in names)}
    return counts | {"identity": fingerprint(*names)}


def saved_facts(step: Location) -> dict[str, Any]:
    """Return the facts about text in a step's titan.json; {} if there are none, or it is not readable."""
    with suppress(CheckpointError):  # loading reports it
        return read_metadata(step).get("text", {})
    return {}


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
    places = _steps(config, folder)
    is_hf = not places and section.initial_load_in_hf
    first = section.initial_load_path or (config.model.hf_assets_path if is_hf else "")
    if not places and first:
        places = [as_location(first)]
    for place in places:
        saved, where = saved_facts(place).get("tokenizer", {}), join(place, TITAN_JSON)
        named: Location = Path(str(saved.get("file") or "")).parent
        if (
            isinstance(place, Path)
            and (copy := place.absolute().parent.parent / FOLDER).is_dir()
        ):
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
        fix = f"tokenizer.path = {named}"
        if saved.get("kind") == "bytes":
            fix = 'tokenizer.name = "bytes" and no tokenizer.path'
        return (
            f"{where}: its weights belong to the tokenizer {_named(saved)}, and the job has {_named(tokenizer_facts(tokenizer))}; "
            f'set {fix}, or, to train other embeddings on purpose, checkpoint.exclude_from_loading = ["tokenizer"]'
        )
    return ""


def text_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each difference between a run's text and a step's."""
    before, after = (
        {"template": text.get("chat_template"), **text.get("tokenizer", {})}
        for text in (saved, now)
    )
    lines = [
        f"the tokenizer's {name} changed since the step was saved: {_or_none(old)} -> {_or_none(new)}"
        for name, (old, new) in differing(before, after).items()
        if name in ("template", "bos_id", "eos_id") and old is not None
    ]
    for key, new in now["data"].items():
        old = saved.get("data", {}).get(key)
        if old and old.get("identity") != new["identity"]:
            counts = f"{key}: {_counted(old)} -> {_counted(new)}"
            lines.append(
                f"WARNING: THE DATA CHANGED since the step was saved, so rows may come again, or never: {counts}"
            )
    return lines


def _or_none(value: object) -> object:
    return "none" if value in (None, "") else value


def _named(facts: dict[str, Any]) -> str:
    file = facts.get("file") or "embedded"
    return f"{facts.get('kind')} of {facts.get('vocab_size')} tokens ({file}, {facts.get('identity')})"


def _counted(facts: dict[str, Any]) -> str:
    counts = {key: value for key, value in facts.items() if isinstance(value, int)}
    return ", ".join(f"{value:,} {key}" for key, value in counts.items()) or "unknown size"
