"""Define what the tracer calls and does not know: who follows a recording, and what repeats microbatches.

tracer.py imports this file alone. Those that implement it, or that use the tracer, may import the tracer: no import goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Observer:
    """Follow a recording. A subclass overrides the events that it needs."""

    def compilation_begins(self) -> None:
        """Handle the beginning of a compilation, before anything of it runs."""

    def backward_failed(self, error: Exception) -> None:
        """Handle an error inside a backward pass, which may end the process."""


class Repeater(Protocol):
    """Run few microbatches and repeat the others. failure: why the program cannot be recorded like this."""

    failure: str

    def run(self, part: str, function: Callable[[], Any]) -> Any:
        """Run a part of a microbatch, or repeat it."""

    def end_step(self) -> None:
        """Note that a step is over."""
