"""Saving, loading and converting checkpoints."""

from titan.untrusted import InputError


class CheckpointError(InputError):
    """A checkpoint that was asked for is not there, is damaged or does not fit; the message is for the user."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written, on any of the ranks; the message says where and why."""
