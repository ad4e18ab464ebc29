"""Turn text into batches: tokenizers, sources, the order of samples, packing, and the loader that training reads from.

A document passes through these files, in this order. docs/data.md describes it for users.

    sources.py, reading.py   read text from files and the hub
    tokenizer.py             turns it into ids
    special_tokens.py        marks where a document begins and ends
    writer.py, shards.py     keep finite text as memory-mapped token shards
    cache.py                 shares the shards of raw text between processes
    streams.py               packs text that is read while training
    order.py                 says which sample comes when
    shard_samples.py         gives rows of the shards by their number
    samples.py               makes one endless numbered sequence of all sources
    best_fit.py              fills such rows with whole documents, if asked
    packing.py               makes a batch of rows of tokens
    loader.py                does so ahead of time, in a background thread

Only best_fit.py and the last two import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from titan.untrusted import InputError, printable

# Characters of a message. A stranger's file may put any text into one.
_MAX_CHARS = 2000


class DataError(InputError):
    """Report that text, a tokenizer or a data setting is not usable: which, why, and the nearest fix.

    The message may quote a stranger's file. So it is one line of limited length, with control characters spelled out.

    paste: lines for the job file that correct the mistake; they follow the message.
    """

    def __init__(self, message: str, *, paste: Sequence[str] = ()) -> None:
        self.paste = tuple(printable(line, _MAX_CHARS) for line in paste)
        super().__init__("\n".join([printable(message, _MAX_CHARS), *self.paste]))


def require(module: str, *, purpose: str, extra: str = "huggingface") -> ModuleType:
    """Import an optional package. Raises DataError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs '{module}', which cannot be imported ({error}); "
            f"install it with: pip install 'titan-pretrain[{extra}]'"
        ) from error
