"""Files that a path means, and the format that each file name ending stands for.

Every reader of data, prompts, tasks and captions asks here. Endings are compared in lower case, and `.gz` or `.zst` belongs to
the ending before it: "A.JSONL.GZ" ends in ".jsonl.gz". Hidden files and folders of a folder are left out, as a glob leaves them out, and each
linked folder is entered once.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from titan.data import DataError

TEXT = (".txt", ".md")
JSONL = (".jsonl", ".ndjson", ".json")
CSV = (".csv", ".tsv")
PARQUET = (".parquet",)
# Formats that are also read with .gz and .zst. Parquet has its own compression.
PACKED = (".gz", ".zst")
_PACKABLE = (*TEXT, *JSONL, *CSV)
# Formats that people have, and that nothing here reads.
_UNREAD = {
    ".bz2",
    ".xz",
    ".lz4",
    ".zip",
    ".7z",
    ".tar",
    ".tgz",
    ".arrow",
    ".pdf",
    ".docx",
}


def ending_of(file: Path) -> str:
    """Return the ending of a file name in lower case, together with the ending before `.gz` or `.zst`: ".jsonl.gz"."""
    name = file.with_name(file.name.lower())
    before = Path(name.stem).suffix if name.suffix in PACKED else ""
    return before + name.suffix


def format_of(file: Path) -> str:
    """Return the ending of a file name in lower case, without `.gz` or `.zst`: ".jsonl"."""
    return ending_of(file).removesuffix(PACKED[0]).removesuffix(PACKED[1])


def is_jsonl(file: Path) -> bool:
    """Return whether the name of a file says that each of its lines is JSON."""
    return format_of(file) in JSONL


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, sorted within each folder."""
    entered = set()
    # A link may lead to a folder above it.
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(parent)) in entered:
            folders.clear()
            continue
        entered.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file


def find_files(path: str, *, endings: Collection[str]) -> tuple[list[Path], str]:
    """Find the files that a path means.

    Args:
        path: a file of any name, a folder, or a glob.
        endings: endings of the files to take from a folder. Packed files (.gz, .zst) are taken too.

    Returns:
        The files, and a remark about files of the folder that are left out.

    Raises:
        DataError: there is no such file, or nothing reads the format of a named file.
    """
    where = Path(path).expanduser()
    if not path.strip():
        raise DataError("the path of the data is empty; '.' is the working folder")
    if "://" in path:
        raise DataError(
            f"'{path}' is an address; copy the data to a disk of this machine first"
        )
    if where.is_dir():
        taken = {
            *endings,
            *(end + packed for end in endings if end in _PACKABLE for packed in PACKED),
        }
        found, others = [], Counter()
        for file in walk(where):
            ending = ending_of(file)
            if ending in taken:
                found.append(file)
            else:
                others[file.name[len(file.name) - len(ending) :]] += 1
        if not found:
            kinds = " or ".join(f"*{ending}" for ending in endings)
            raise DataError(f"no {kinds} in folder '{path}'{_hint(others, path)}")
        return sorted(found), f", left out: {counted(others)}" if others else ""
    files = [where] if where.is_file() else _matches(where)
    if not files:
        raise DataError(
            f"'{path}' is no file or folder, and as a glob matches nothing (working folder: {Path.cwd()})"
        )
    for file in files:
        if {file.suffix.lower(), format_of(file)} & _UNREAD:
            raise DataError(
                f"{file}: *{file.suffix} is not read; unpack it or convert it to text, JSON Lines, CSV or Parquet (*.gz and *.zst are read)"
            )
    return files, ""


def counted(endings: Counter[str]) -> str:
    """Return how many files have each ending: "54 *.md, 2 without ending"."""
    return ", ".join(
        f"{n:,} {f'*{end}' if end else 'without ending'}" for end, n in endings.most_common()
    )


def _matches(pattern: Path) -> list[Path]:
    """Return the files that a glob matches. Leading folders that exist are taken literally, brackets included."""
    root, rest = Path(), [*pattern.parts]
    while rest and (root / rest[0]).exists():
        root /= rest.pop(0)
    found = glob.glob(str(Path(*rest)), root_dir=root, recursive=True)  # noqa: PTH207
    return sorted(root / name for name in found if (root / name).is_file())


def _hint(others: Counter[str], path: str) -> str:
    """Return a glob for the most common ending in a folder, or nothing for an empty folder."""
    named = Counter({ending: n for ending, n in others.items() if ending})
    if not named:
        return ""
    [(ending, count)] = named.most_common(1)
    return f", which has {count:,} *{ending}; name other files, or give a glob: '{path.rstrip('/')}/**/*{ending}'"
