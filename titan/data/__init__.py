"""Text to batches: tokenizers, sources, the order of samples, packing, and the loader the trainer reads from.

The way of a document, one file a stop: sources.py reads text; tokenizer.py turns it into ids, special_tokens.py marks where
it begins and ends; writer.py and shards.py keep finite text as memory-mapped token shards (cache.py shares them
between processes), streams.py packs endless text lane by lane; order.py says which sample comes when; samples.py
joins them into one endless numbered sequence; packing.py cuts a batch from it; loader.py does so ahead of time
in a background thread. Only the last two import torch. docs/data.md tells the same for users.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from titan.untrusted import InputError, printable

_MAX_CHARS = 2000


class DataError(InputError):
    """Text, a tokenizer or a data setting is not usable; the message says which, why, and the nearest fix.

    It may quote what a stranger's file says, so it is one line, of limited length, with control characters spelled out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _MAX_CHARS))


def require(module: str, *, purpose: str) -> ModuleType:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs '{module}', which cannot be imported ({error}); "
            "install it with: pip install 'titan-pretrain[huggingface]'"
        ) from error
