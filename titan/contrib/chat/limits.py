"""Jinja's sandbox with limits, since a chat template comes with a tokenizer from anybody.

`limited` bounds the time and the memory of a rendering. `LimitedEnvironment` refuses single operations that would take all
memory before `limited` looks again: long repetitions, wide formats and large numbers.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from resource import RUSAGE_SELF, getrusage
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS, MEMORY_MIB = 10, 1024  # of a rendering; usual ones take a millisecond
_NUMBER, _LENGTH = 10**6, 10**8
_WIDE = re.compile(r"\d{7}")
_PER_MIB = 2**10 if sys.platform.startswith("linux") else 2**20  # units of ru_maxrss


class LimitError(TemplateError):
    """Error: a template takes more than any conversation needs."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise LimitError in this thread after SECONDS of its processor time, or when the process has grown by MEMORY_MIB."""
    end_s = time.thread_time() + SECONDS
    most = getrusage(RUSAGE_SELF).ru_maxrss + MEMORY_MIB * _PER_MIB

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if time.thread_time() > end_s:
            raise LimitError(f"it runs for more than {SECONDS} s")
        # Lines of the template, and calls of everything else.
        if frame.f_code.co_filename != "<template>":
            return None
        if getrusage(RUSAGE_SELF).ru_maxrss > most:
            raise LimitError(f"it takes more than {MEMORY_MIB} MiB")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox without operations whose result is many times as long as their operands."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _guarded(name, f) for name, f in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _require_narrow(left)
        else:
            sizes = [_size(left), _size(right)]
            if (
                sizes[0] * sizes[1] if operator == "*" else sizes[0].bit_length() * sizes[1]
            ) > _LENGTH:
                raise LimitError(f"{operator} makes too much")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        _require_narrow(getattr(value, "__self__", ""))
        return super().wrap_str_format(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        _require_small(
            getattr(__obj, "__name__", ""), getattr(__obj, "__self__", ""), args, named.values()
        )
        return super().call(__context, __obj, *args, **named)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with the marks by which Jinja passes its context
    def guarded(*args: Any, **named: Any) -> Any:
        _require_small(
            name, next((a for a in args if isinstance(a, str)), ""), args, named.values()
        )
        return function(*args, **named)

    return guarded


def _require_small(
    name: str, text: object, args: tuple[Any, ...], named: Iterable[Any]
) -> None:
    """Raise LimitError for a large number, a wide format, or a text that replaces many others."""
    given = [*args, *named]
    if name == "format":
        _require_narrow(text)
    if any(isinstance(value, int) and abs(value) > _NUMBER for value in given):
        raise LimitError(f"a number is above {_NUMBER:,}")
    if (
        name in ("replace", "join")
        and _size(text) * max(map(_size, given), default=0) > _LENGTH
    ):
        raise LimitError(f"{name} makes too much")


def _require_narrow(text: object) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise LimitError("a format is too wide")


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1
