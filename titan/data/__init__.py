"""Path from text to batches: tokenizers, sources, sample order, packing, and the loader that training reads from.

A document passes through these files, in this order. docs/data.md describes the path for users.

    sources.py, reading.py   read text from files and the hub
    tokenizer.py             turns text into ids
    special_tokens.py        tokenizers as data sees them, and marks where a document begins and ends
    writer.py, shards.py     store finite text as memory-mapped token shards
    cache.py                 shares the shards of raw text between processes
    streams.py               packs text that is read while training
    order.py                 computes the order of samples
    shard_samples.py         looks up sequences in the shards by their number
    samples.py               blends all sources into one endless, numbered series of samples
    best_fit.py              packs whole documents into sequences, if the job asks for it
    packing.py               turns sequences of tokens into a batch
    loader.py                prepares batches ahead of time, in a background thread

Only best_fit.py and the last two import torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from titan.base.untrusted import InputError, printable

# Characters of a message. A file that anyone may have written can put any text into it.
_MAX_CHARS = 2000


class DataError(InputError):
    """Error about unusable text, tokenizer or data setting: the name, the cause, and the nearest fix.

    The message may quote a file that anyone may have written. So the message is one line of limited length, with control
    characters spelled out.

    Attributes:
        paste: lines for the job file that correct the mistake. They follow the message.
    """

    def __init__(self, message: str, *, paste: Sequence[str] = ()) -> None:
        self.paste = tuple(printable(line, _MAX_CHARS) for line in paste)
        super().__init__("\n".join([printable(message, _MAX_CHARS), *self.paste]))


def require(module: str, *, purpose: str, extra: str = "huggingface") -> ModuleType:
    """Import an optional package.

    Args:
        module: name of the module to import.
        purpose: the feature that needs it, for the error message.
        extra: the extra of titan-pretrain that installs it.

    Raises:
        DataError: the package is missing. The message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs '{module}', which cannot be imported ({error}); "
            f"install it with: pip install 'titan-pretrain[{extra}]'"
        ) from error


def default_cache_folder() -> Path:
    """Return the folder titan/ in the user's cache folder (XDG base directory specification)."""
    home = os.path.expanduser("~")  # noqa: PTH111 (no error without a home)
    # Docker has "/" as the home of a user without one.
    home = Path("/" if home == "~" else home)
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "titan"
