"""Errors of the family, and the messages of transformers' errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UnsupportedModelError(ValueError):
    """Model that titan cannot run or lay out. The message names the module and the reason."""


class WrongKeyError(ValueError):
    """Problems of a [model] section: each a key and a message."""


def message_of(error: Exception) -> str:
    """Return the message of an error of other code in one line. A message may lack a verb, as a KeyError's does."""
    text = " ".join(str(error).split())[:300]
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn errors of other code, which may be anyone's, into a refusal of the model.

    Args:
        what: what cannot be done, for the message.
    """
    try:
        yield
    except (UnsupportedModelError, WrongKeyError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{what}: {message_of(error)}") from error
