"""The one exception of this package that is meant for people, and the check for optional packages.

The command line prints a `DataError` without a traceback and exits with 2.
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
