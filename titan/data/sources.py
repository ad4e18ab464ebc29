"""Documents of each source, in an order that never changes. reading.py reads their files.

`Documents` is finite text with an identity: the paths, sizes and times of its files, so that a cache notices a change.
`TextStream` is Hugging Face text that is read while training, and that can resume at a recorded place. Only a hash of a
document's text decides whether the document is kept for validation, so every reader, order and number of ranks agrees.

A third party's source is a `Section` subclass registered under the entry-point group `titan.sources`, with a method
`documents() -> Documents`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from titan.config import schema as s
from titan.config.plug_ins import load_plug_ins
from titan.data import DataError, files, require
from titan.data.conversations import conversations
from titan.data.reading import (
    Document,
    Meter,
    Reader,
    pieces_of,
    read_csv,
    read_files,
    read_jsonl,
    read_parquet,
    read_python,
    read_text,
)
from titan.data.rows import NoText, RowText, field
from titan.data.unread import Counts, count, unread_line

# Folders without text about the library, or that some Pythons lack: tests, applications, tables of character codes.
_STDLIB_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "__phello__",
    "lib-dynload",
}


# `titan check` reads this many files of a source, and this many documents of each file.
_TRIED_FILES, _TRIED_DOCUMENTS = 16, 3
_COUNTED_ROWS = 100  # of a stream, whose keys are counted


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Finite text. `read()` yields the documents from the first one on, in the same order each time.

    Attributes:
        name: description of the source, for messages.
        file: returns the index of the file that is being read.
    """

    name: str
    identity: list[object]
    """JSON-able. Two sources with equal identities hold the same documents."""
    read: Callable[..., Iterator[str]] | Callable[..., Iterator[Document]]
    num_bytes: int | None = None
    """Size of the files in bytes, for a progress bar, or None if it is unknown."""
    position: Callable[[], int] = lambda: 0
    """Returns the number of these bytes that have been read."""
    file: Callable[[], int] = lambda: 0
    try_first: Callable[[], None] = lambda: None
    """Reads the first documents of the first files. Raises DataError if they are not of the expected kind."""
    unread: str = ""
    """The files of the folder that nothing reads, which `name` counts."""


def in_validation(document: Document, *, fraction: float) -> bool:
    """Return whether a document is held out of training: a hash of its text is in the lowest `fraction`."""
    if not fraction:
        return False
    digest = hashlib.blake2b(digest_size=8)
    # Piece by piece, since a document need not fit in memory. The result is the hash of the whole text.
    for piece in pieces_of(document):
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big") < fraction * 2**64


def open_documents(section: s.Section) -> Documents:
    """Return the documents of a source section.

    Raises:
        DataError: the source is unusable, or contains no text.
    """
    source = s.source_of(section)
    if source.documents is not None:
        return source.documents()
    if isinstance(section, s.StdlibSource):
        return _from_files(section, "stdlib", _stdlib_files(), "", read_python)
    if isinstance(section, s.HuggingFaceSource):
        stream = TextStream(section)
        settings = section.model_dump(exclude={"weight"})
        return Documents(
            name=stream.name,
            identity=["huggingface", settings, stream.fingerprint],
            read=stream.read,
            num_bytes=stream.num_bytes,
            position=lambda: stream.position,
        )
    if source.type not in _FORMATS:
        # Shards and synthetic ids become samples directly, without text (samples.py). A third party's section may lack a type.
        raise DataError(
            f"source '{source.type or type(section).__name__}' holds no text to read"
        )
    kind, (endings, read) = source.type, _FORMATS[source.type]
    found = files.find_files(source.path or "", endings=endings)
    options: dict[str, Any] = {"key": source.text_key}
    if isinstance(section, s.TextSource):
        _require_text(found[0])
        options = {"chars": section.document_chars} if section.document_chars else {}
    elif source.messages_key:
        kind, options = f"{kind} conversations", {"key": source.messages_key}
        read = partial(read, take=conversations().take_conversation())
    return _from_files(section, kind, *found, read, **options)


_FORMATS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "text": (files.TEXT, read_text),
    "csv": (files.CSV, read_csv),
    "jsonl": (files.JSONL, read_jsonl),
    "parquet": (files.PARQUET, read_parquet),
}


def _require_text(found: list[Path]) -> None:
    """Raise DataError for a file whose name says that it is no plain text."""
    for file in found:
        if (kind := _kind_of(file)) is not s.TextSource:
            name = kind.model_fields["type"].default
            raise DataError(
                f'{file}: is read with dataset = "{name}"; as "text" its syntax would be learnt'
            )


def _from_files(
    section: s.Section,
    kind: str,
    found: list[Path],
    left_out: str,
    read: Reader,
    **options: Any,
) -> Documents:
    """Return the documents that `read` finds in the files of a source. `left_out` is a remark of `find_files`."""
    # Path, size and time identify a file. A hash of the content would read all of the text.
    stats = [(str(f.resolve()), f.stat()) for f in found]
    meter = Meter()

    def documents(chosen: list[Path], meter: Meter) -> Iterator[Document]:
        try:
            yield from read_files(chosen, read, meter, **options)
        except NoText as error:
            raise _with_paste(section, error) from None

    def try_first() -> None:
        for file in found[:_TRIED_FILES]:
            deque(islice(documents([file], Meter()), _TRIED_DOCUMENTS), 0)

    return Documents(
        name=f"{kind} ({len(found):,} file{'s' * (len(found) != 1)}{left_out})",
        identity=[
            kind,
            options,
            [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        ],
        read=lambda: documents(found, meter),
        num_bytes=sum(stat.st_size for _, stat in stats),
        position=lambda: meter.num_bytes,
        file=lambda: meter.file,
        try_first=try_first,
        unread=left_out,
    )


def _with_paste(section: s.Section, error: NoText) -> DataError:
    """Return the error with the likely text field of a source, in lines for the job file."""
    source = s.source_of(section)
    if source.messages_key:
        return error
    if not error.likely:
        return DataError(error.message)
    values = {"type": source.type, "path": source.path, "text_key": error.likely}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    where = "; in the job, in place of dataset and dataset_path:"
    return DataError(error.message + where, paste=["[[data.sources]]", *lines])


def _stdlib_files() -> list[Path]:
    """Return the .py files of Python's own library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(
        f
        for f in root.rglob("*.py")
        if not _STDLIB_SKIPPED.intersection(f.relative_to(root).parts)
    )
    if not found:
        raise DataError(
            f"this Python ({sys.executable}) keeps no sources of its library in {root}; "
            "set training.dataset to text of your own"
        )
    return found


class TextStream:
    """Hugging Face dataset that is read row by row. `state()` and `read(state)` resume at a place in it.

    Attributes:
        name: description of the dataset, for messages.
        num_bytes: size of the text column of a downloaded dataset, or None.
        position: characters read so far.
    """

    def __init__(self, section: s.HuggingFaceSource, *, rank: int = 0, world: int = 1) -> None:
        """Open a dataset. Of a stream, open the part of rank `rank` of `world` ranks."""
        configuration = f" ({section.name})" if section.name else ""
        self.name = f"{section.path}{configuration} [{section.split}]"
        self._key = section.text_key
        dataset = _load_dataset(section)
        self.fingerprint = None if section.streaming else dataset._fingerprint
        """Names the content of a downloaded dataset."""
        self.num_bytes = None if section.streaming else _size(dataset, section.text_key)
        # The progress bar takes these characters as bytes.
        self.position = 0
        self._dataset = dataset if section.streaming else dataset.to_iterable_dataset()
        if world > 1:
            from datasets.distributed import split_dataset_by_node

            self._dataset = split_dataset_by_node(self._dataset, rank=rank, world_size=world)
        self._beginning = self._dataset.state_dict()

    def unread(self) -> list[str]:
        """Return a warning about unread keys of the first rows. Each `read` loads its position, so none is moved."""
        counts = Counts()
        for text in islice(self.read(), _COUNTED_ROWS):
            count(counts, "rows", text.unread)
        line = unread_line(counts)
        return [f"{self.name}: {line}"] if line else []

    def read(self, state: dict[str, Any] | None = None) -> Iterator[RowText]:
        """Yield the documents from the recorded place on, or from the first document."""
        # Load a place even for a new start: the dataset would start at the last loaded place each time.
        self._dataset.load_state_dict(self._beginning if state is None else state)
        self.position = 0
        for row in self._dataset:
            text = field(row, self._key, where=self.name)
            self.position += len(text)
            if text:
                yield text

    def state(self) -> dict[str, Any]:
        """Return the JSON-able place after the last document that was read."""
        return self._dataset.state_dict()


def _size(dataset: Any, key: str) -> int | None:
    return dataset.select_columns([key]).data.nbytes if key in dataset.column_names else None


def _load_dataset(section: s.HuggingFaceSource) -> Any:
    datasets = require("datasets", purpose=f"dataset '{section.path}'")
    try:
        return datasets.load_dataset(
            section.path, name=section.name, split=section.split, streaming=section.streaming
        )
    except (
        Exception
    ) as error:  # `datasets` raises many kinds: not found, no network, unknown split
        reason = next(iter(str(error).splitlines()), "")
        raise DataError(
            f"cannot open Hugging Face dataset '{section.path}' (name {section.name!r}, split "
            f"{section.split!r}): {type(error).__name__}: {reason}. Without a network, set "
            "training.dataset_path to a local copy, or training.dataset to local text"
        ) from error


# The source of each dataset name. dataset_path must replace an empty path, and may replace any other path.
_PRESETS: dict[str, s.Section] = {
    "stdlib": s.StdlibSource(),
    "synthetic": s.SyntheticSource(),
    **{
        kind.model_fields["type"].default: kind.model_construct(path="")
        for kind in (*get_args(s._LocalSources), *load_plug_ins("titan.sources"))
    },
    "conversations": s.JsonlSource(path="", messages_key="messages"),
    "c4": s.HuggingFaceSource(path="allenai/c4", name="en"),
    "c4_validation": s.HuggingFaceSource(path="allenai/c4", name="en", split="validation"),
    "c4_test": s.JsonlSource(path="tests/assets/c4_test"),
    "fineweb-edu": s.HuggingFaceSource(path="HuggingFaceFW/fineweb-edu", name="sample-10BT"),
}


def resolve_sources(dataset: str, *, dataset_path: str | None = None) -> list[s.Section]:
    """Return the source that `training.dataset` or `validation.dataset` names: a preset, or a dataset of the hub.

    Args:
        dataset: the name.
        dataset_path: path in place of the preset's.

    Raises:
        DataError: the name is unknown, or needs a path.
    """
    if dataset in _PRESETS:
        preset = _PRESETS[dataset]
        path, fields = dataset_path or s.source_of(preset).path, type(preset).model_fields
        # A local copy without the hub's card has no configurations, so its files are read as plain files.
        if dataset_path and isinstance(preset, s.HuggingFaceSource):
            copy = Path(dataset_path).expanduser()
            if copy.exists() and not (copy / "README.md").exists():
                return [source_of_path(dataset_path, text_key=preset.text_key)]
        if path == "":
            raise DataError(
                f'dataset = "{dataset}" reads local files: set dataset_path beside it'
            )
        return [preset.model_copy(update={"path": path}) if "path" in fields else preset]
    if "/" in dataset and not Path(dataset).expanduser().exists():
        return [s.HuggingFaceSource(path=dataset_path or dataset)]
    # Names of the hub have a slash, so this name is misspelt.
    close = difflib.get_close_matches(dataset, _PRESETS, n=1)
    raise DataError(
        f"dataset '{dataset}' is no preset{f' (did you mean {close[0]!r}?)' if close else ''}; the presets are "
        f"{', '.join(_PRESETS)}. A Hugging Face dataset is written owner/name; local text is "
        'dataset = "text" (jsonl, csv, parquet, shards) with dataset_path'
    )


def training_sources(config: s.JobConfig) -> Sequence[s.Section]:
    """Return the sources that a job trains on.

    Raises:
        DataError: the name of the dataset is unknown, or needs a path.
    """
    training = config.training
    return config.data.sources or resolve_sources(
        training.dataset, dataset_path=training.dataset_path
    )


def source_names(sources: Sequence[s.Section]) -> list[str]:
    """Return a name for each source: the last part of its path without endings, or its kind, and its number if another one has that name."""
    names: list[str] = []
    for number, section in enumerate(sources):
        source = s.source_of(section)
        # A glob is named by its folder.
        name = Path(re.sub(r"/?\*.*", "", source.path or "")).stem or source.type
        while name in names:
            name += f"-{number}"
        names.append(name)
    return names


_FileSource = s.TextSource | s.JsonlSource | s.CsvSource | s.ParquetSource
_KINDS: dict[str, type[_FileSource]] = {
    **dict.fromkeys(files.JSONL, s.JsonlSource),
    **dict.fromkeys(files.CSV, s.CsvSource),
    **dict.fromkeys(files.PARQUET, s.ParquetSource),
}


def _kind_of(file: Path) -> type[_FileSource]:
    return _KINDS.get(files.format_of(file), s.TextSource)


def source_of_path(path: str, *, text_key: str, messages_key: str = "") -> s.Section:
    """Return the source that a path on the command line means, chosen by the names of its files.

    A folder with several kinds of files is refused, because some files often describe the text: README.md, dataset_infos.json.

    Args:
        path: file, folder, glob, or "stdlib".
        text_key: field of the text.
        messages_key: field of the messages. Empty for plain text.

    Raises:
        DataError: there are no files, files of several kinds, or no messages in files of this kind.
    """
    if path == "stdlib":
        return s.StdlibSource()
    found, left_out = files.find_files(path, endings=(*files.TEXT, *_KINDS))
    endings = Counter(map(files.ending_of, found))
    kinds = {*map(_kind_of, found)}
    if len(kinds) > 1:
        raise DataError(
            f"'{path}' holds several kinds of files: {files.counted(endings)}{left_out}; name those to read, as in "
            f"'DIR/**/*{endings.most_common(1)[0][0]}'"
        )
    [kind] = kinds
    keys: dict[str, Any] = {"text_key": text_key, "messages_key": messages_key}
    if messages_key and "messages_key" not in kind.model_fields:
        raise DataError(
            f"'{path}' holds no messages; --messages-key reads JSON Lines and Parquet"
        )
    return kind(path=path, **{key: v for key, v in keys.items() if key in kind.model_fields})
