"""Jinja's sandbox with limits, since a chat template comes with a tokenizer from anybody.

`limited` bounds the time and the memory of a rendering. `LimitedEnvironment` refuses single operations that would take all
memory before `limited` looks again: long repetitions, wide formats and large numbers.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
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
        one, other = _size(left), _size(right)
        _require(operator, left, (one.bit_length() if operator == "**" else one) * other)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        _require("format", getattr(value, "__self__", ""))
        return super().wrap_str_format(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        name, text = (getattr(__obj, f"__{what}__", "") for what in ("name", "self"))
        _require_small(name, text, *args, *named.values())
        return super().call(__context, __obj, *args, **named)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with the marks by which Jinja passes its context
    def guarded(*args: Any, **named: Any) -> Any:
        texts = [each for each in args if isinstance(each, str)]
        _require_small(name, *texts[:1], *args, *named.values())
        return function(*args, **named)

    return guarded


def _require_small(name: str, text: object = "", *given: object) -> None:
    """Raise LimitError for a large number, a wide format, or a text that replaces many others."""
    if any(isinstance(value, int) and abs(value) > _NUMBER for value in given):
        raise LimitError(f"a number is above {_NUMBER:,}")
    is_product = name in ("replace", "join")
    _require(name, text, _size(text) * max(map(_size, given), default=0) if is_product else 0)


def _require(name: str, text: object, length: int = 0) -> None:
    if name in ("format", "%") and isinstance(text, str) and _WIDE.search(text):
        raise LimitError("a format is too wide")
    if length > _LENGTH and name != "%":
        raise LimitError(f"{name} makes too much")


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1
