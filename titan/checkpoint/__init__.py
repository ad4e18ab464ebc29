"""Saving, loading and converting checkpoints."""

from titan.untrusted import InputError


class CheckpointError(InputError):
    """A checkpoint that was asked for is not there, is damaged or does not fit; the message is for the user."""

    def __init__(self, message: object, *, kind: str = "checkpoint_damaged") -> None:
        super().__init__(message)
        self.kind = kind  # titan/health/errors.py


class SaveFailed(RuntimeError):
    """A checkpoint could not be written, on any of the ranks; the message says where and why."""

    def __init__(self, message: object, *, kind: str = "save_failed") -> None:
        super().__init__(message)
        self.kind = kind
