"""Version of the format of a checkpoint's files: manifest.json, tensors.json and titan.json. Imports no torch.

It is read before anything else of a file. A newer titan may write other fields and other hashes, and its steps are not
damaged. A newer titan keeps these fields in manifest.json: `format`, and `titan`, the version that wrote it. In the other
files `format` is the first field.

    {"format": 2, ...       "was written by a newer titan (format 2, titan 0.9)", exit code 2, and nothing is renamed
    {"format": 3, ...       damaged: a flipped bit turns 1 into 3, 5 or 9, so no format has these numbers
"""

from __future__ import annotations

import re
from contextlib import suppress

from titan.base.untrusted import InputError, is_lost
from titan.checkpoint import CheckpointError
from titan.checkpoint.storage import Location, folder_of, join, read_file

FORMAT = 1
# Kinds of failures (titan/base/errors.py).
DAMAGED, NEWER, LOST = "checkpoint_damaged", "checkpoint_newer", "disk_lost"
_NEVER = (3, 5, 9)
# Inside of a JSON string the quotes would be escaped.
_FORMAT = re.compile(rb'"format"\s*:\s*(\d{1,9})\s*[,}]')
_FIRST = re.compile(rb"\s*\{\s*" + _FORMAT.pattern)
_TITAN = re.compile(rb'"titan"\s*:\s*"([^"\\]{1,40})"')


def require_known(text: bytes, *, file: Location, is_first: bool = True) -> None:
    """Check that this titan knows the format of a file.

    Args:
        text: the file's content, or its beginning.
        file: the file.
        is_first: whether `format` must be the first field.

    Raises:
        CheckpointError: a newer titan wrote the file.
    """
    found = _FIRST.match(text) if is_first else _FORMAT.search(text)
    number = int(found[1]) if found else FORMAT
    if number <= FORMAT or number in _NEVER:
        return
    raise newer(file, f"format {number}")


def newer(file: Location, by: str) -> CheckpointError:
    """Return the error about a file of a newer titan, which is known by its format or its fields, `by`."""
    manifest = b""
    with suppress(OSError, InputError):
        manifest = read_file(join(folder_of(file), "manifest.json"))
    if version := _TITAN.search(manifest):
        by += f", titan {version[1].decode(errors='replace')}"
    return CheckpointError(
        f"{file}: was written by a newer titan ({by}); this titan knows format {FORMAT}. Use that titan, or a newer one",
        kind=NEWER,
    )


def unreadable(location: Location, error: OSError) -> CheckpointError:
    """Return the error about a file that cannot be read. Only a file that is gone makes a step damaged."""
    why = error.strerror or str(error) or "it is missing"
    if is_lost(error):
        return CheckpointError(
            f"{location}: cannot be read ({why}), which says nothing about its content. Look at the mount and the file server; the "
            "same command continues",
            kind=LOST,
        )
    return CheckpointError(f"{folder_of(location)} is not a checkpoint: {location}: {why}")
