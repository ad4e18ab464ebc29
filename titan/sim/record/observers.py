"""Interfaces that the tracer calls: observers of a recording, and the repetition of microbatches.

tracer.py imports this file alone. Implementations may import the tracer, and no import goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Observer:
    """Observer of a recording. A subclass overrides the events that it needs."""

    def compilation_begins(self) -> None:
        """Handle the beginning of a compilation."""

    def backward_failed(self, error: Exception) -> None:
        """Handle an error inside a backward pass, which may end the process."""


class Repeater(Protocol):
    """Repetition of microbatches.

    Attributes:
        failure: Reason why the program cannot be recorded like this, or an empty text.
    """

    failure: str

    def run(self, part: str, function: Callable[[], Any]) -> Any:
        """Run a part of a microbatch, or repeat it."""

    def end_step(self) -> None:
        """End a step."""
