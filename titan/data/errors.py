"""The one exception of this package that is meant for people, and the check for optional packages.

The command line prints a `DataError` without a traceback and exits with 2.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from titan.untrusted import InputError


class DataError(InputError):
    """Text, a tokenizer or a data setting is not usable; the message says which, why, and the nearest fix."""


def require(module: str, *, purpose: str) -> ModuleType:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs '{module}', which cannot be imported ({error}); "
            "install it with: pip install 'titan-pretrain[huggingface]'"
        ) from error
