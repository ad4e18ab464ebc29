"""Base classes of the errors by which a run, or another command, ends with a line instead of a traceback.

`titan train` and the other commands know these classes alone: an error says itself how the process ends.
"""

from __future__ import annotations

from collections.abc import Sequence


class RunFailure(Exception):
    """Failure whose message explains it to the user.

    Attributes:
        kind: key of the doctor's table (titan/ops/doctor/diagnosis.py); empty: that of its cause.
        exit_code: exit code of the process.
    """

    kind: str = ""
    exit_code: int = 1

    def __init__(self, message: object = "", *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind or self.kind


class UserError(RunFailure):
    """Failure that the user can fix."""

    exit_code = 2


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3" or "ranks 1, 2, 3", with at most eight numbers."""
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
