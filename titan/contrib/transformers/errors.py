"""Error of the family, and the messages of transformers' errors."""


class UnsupportedModelError(ValueError):
    """Model that titan cannot run or lay out. The message names the module and the reason."""


class WrongKeyError(ValueError):
    """Problems of a [model] section: each a key and a message."""


def message_of(error: Exception) -> str:
    """Return the message of an error of other code in one line. A message may lack a verb, as a KeyError's does."""
    text = " ".join(str(error).split())[:300]
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"
