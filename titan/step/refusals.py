"""Errors of titan.parallel's helpers, as those of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from titan.base.untrusted import InputError


@contextmanager
def as_refusals() -> Iterator[None]:
    """Raise a ValueError of a helper of titan.parallel, which knows no jobs, as InputError."""
    try:
        yield
    except ValueError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # Of the helper's own code, and not of torch's or a model's that it calls.
        raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
        if type(error) is ValueError and raised_in.startswith("titan.parallel."):
            raise InputError(error) from error
        raise
