"""Arguments with which transformers calls titan's functions: attention, masks, experts and linear recurrences.

titan uses an argument, or knows by name that it changes nothing. It refuses every other one, since a model that passes it would be
trained as another model: chosen keys of a sparse attention, for example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import FIELDS
from .errors import UnsupportedModelError

HARMLESS: dict[str, list[str]] = FIELDS["harmless"]
"""Arguments that change nothing, for each seam."""


def require_known(
    seam: str, where: str, positional: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Check the arguments of a call that titan does not use.

    Args:
        seam: one of `HARMLESS`.
        where: what is called, for the message.
        positional: positional arguments after those that titan uses.
        named: keyword arguments other than those that titan uses.

    Raises:
        UnsupportedModelError: an argument may change what the model computes. None and False are not given.
    """
    unknown = [f"positional argument {n}" for n, x in enumerate(positional, 1) if x is not None]
    for name, value in named.items():
        if value is not None and value is not False and name not in HARMLESS[seam]:
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"{where} gets {', '.join(unknown)} from transformers, which titan's {seam} would ignore: it would train another model"
        )
